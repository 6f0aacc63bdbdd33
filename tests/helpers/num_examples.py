"""How many examples Hypothesis draws for a test that takes long."""

from __future__ import annotations

from hypothesis import settings


def num_examples(most: int) -> int:
    """`most` in `make prove`, which draws 100 where a test says nothing, and as many fewer as `make test` draws fewer."""
    return most * settings.default.max_examples // 100  # type: ignore[union-attr]
