"""Percentiles of a histogram."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.engine.metrics.histogram import Histogram


@given(st.lists(st.floats(1e-8, 100), min_size=1, max_size=300), st.floats(0.01, 1))
def test_percentiles_within_ten_percent(seconds: list[float], share: float) -> None:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value, 1)
    found = histogram.percentile(share)
    reached = -(-share * len(seconds) // 1)
    exact = sorted(seconds)[max(0, int(reached) - 1)]
    assert found == pytest.approx(exact, rel=0.1)


def test_an_empty_one_has_no_percentile() -> None:
    assert Histogram().percentile(0.5) is None
