"""The verdict on a restore: by what it waited for, how near it comes to a bare read, and what checksums took."""

from __future__ import annotations

import pytest

from loaderkit.diagnosis.restores import diagnose_restore


@pytest.mark.parametrize(
    ("waited", "percent", "share", "limit", "settings"),
    [
        ({"read": 0.9}, 95.0, 0.5, "store", {}),
        ({"read": 0.9}, 30.0, 0.1, "read", {"prefetch.concurrency": 8}),
        ({"read": 0.9}, 30.0, 0.5, "verify", {}),
        ({"place": 0.9}, 30.0, 0.5, "place", {}),
        ({"memory": 0.9}, 30.0, 0.0, "memory", {}),
        ({"read": 0.1}, 30.0, 0.5, "loop", {}),
        ({"start": 0.9}, 30.0, 0.0, "start", {}),
        ({}, 0.0, 0.0, "loop", {}),
    ],
)
def test_by_what_it_waited_for(
    waited: dict[str, float], percent: float, share: float, limit: str, settings: dict[str, int]
) -> None:
    verdict = diagnose_restore(waited, 1.0, percent, 4, share)
    assert verdict.limit == limit
    assert {one.key: one.value for one in verdict.settings} == settings
    assert all(str(one) in verdict.change for one in verdict.settings)
