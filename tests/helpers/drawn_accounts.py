"""What tests of verdicts draw of a run's accounts: what one worker alone showed, and how long items take."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from loaderkit.engine.metrics.contention import ContentionResult

services = st.sampled_from([{}, {0.01: 100}, {0.01: 90, 0.3: 10}])
"""Seconds -> how many items took as long."""


def contention_results(stages: Sequence[str]) -> st.SearchStrategy[ContentionResult]:
    """What one worker alone showed against all of them."""
    return st.builds(
        ContentionResult,
        st.one_of(st.none(), st.floats(0, 3)),
        st.one_of(st.none(), st.floats(0, 1)),
        st.one_of(st.none(), st.floats(0, 1)),
        slowdowns=st.dictionaries(st.sampled_from(stages), st.floats(0.5, 4)),
    )
