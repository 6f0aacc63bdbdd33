"""Waits for the GIL or for a CPU are charged to the stages that had them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.engine.metrics.contention import ContentionResult, charged_to_holders
from loaderkit.engine.metrics.snapshot import StageStats

HELD, FREE = ContentionResult(gil_taken=1.0), ContentionResult(gil_taken=0.1)
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))


@st.composite
def rows(draw: st.DrawFn) -> list[StageStats]:
    made = []
    for number, kind in enumerate(draw(st.lists(st.sampled_from(["read", "decode", "call", "batch"]), max_size=5))):
        cpu_s, delayed_s, waiting_s = draw(st.tuples(seconds, seconds, seconds))
        busy_s = cpu_s + delayed_s + waiting_s
        made.append(
            StageStats(
                f"{kind}-{number}", 2, busy_s=busy_s, cpu_s=cpu_s, delayed_s=delayed_s, waits=kind in ("read", "call")
            )
        )
    return made


@given(rows(), st.data(), st.sampled_from([HELD, FREE, ContentionResult()]))
def test_the_sum_stays_and_no_wait_is_negative(
    stages: list[StageStats], data: st.DataObject, trial: ContentionResult
) -> None:
    causes = ["start", "memory", "wakeup", *(row.name for row in stages)]
    waits_s = data.draw(st.dictionaries(st.sampled_from(causes), seconds))
    charged = charged_to_holders(waits_s, stages, [trial])
    assert sum(charged.values()) == pytest.approx(sum(waits_s.values()))
    assert min(charged.values(), default=0.0) >= 0
    for cause in ("start", "memory", "wakeup"):
        assert charged.get(cause) == waits_s.get(cause)


@given(rows(), st.data())
def test_what_waits_for_neither_stays_where_it_is(stages: list[StageStats], data: st.DataObject) -> None:
    for row in stages:
        row.busy_s -= row.delayed_s
        row.delayed_s = 0.0
    waits_s = data.draw(st.dictionaries(st.sampled_from([row.name for row in stages] or ["start"]), seconds))
    assert charged_to_holders(waits_s, stages, [FREE, ContentionResult()]) == waits_s


def test_a_cheap_stage_behind_the_gil_is_not_to_blame() -> None:
    decode = StageStats("decode", 2, busy_s=10.0, cpu_s=0.1)
    call = StageStats("call", 2, busy_s=10.0, cpu_s=9.9, waits=True)
    charged = charged_to_holders({"decode": 6.0, "call": 3.0}, [decode, call], [HELD])
    assert charged["call"] == pytest.approx(3.0 + 6.0 * 0.99 * 0.99)
    assert charged_to_holders({"decode": 6.0, "call": 3.0}, [decode, call], [FREE]) == {"decode": 6.0, "call": 3.0}


def test_a_function_that_waits_is_not_behind_the_gil() -> None:
    """It may wait for a server, say."""
    asks = StageStats("call", 2, busy_s=10.0, cpu_s=0.1, waits=True)
    computes = StageStats("call-2", 2, busy_s=10.0, cpu_s=9.9, waits=True)
    assert charged_to_holders({"call": 6.0}, [asks, computes], [HELD]) == {"call": 6.0}
