"""How many examples Hypothesis draws for a test that takes long."""

from __future__ import annotations

from hypothesis import settings


def num_examples(most: int) -> int:
    """`most` in `make prove`, and 1 of 4 of them in `make test`."""
    profile = settings.get_profile("prove").max_examples
    return most * settings.default.max_examples // profile  # type: ignore[union-attr]
