"""How a stage's times vary, from its accounts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.profile.report_parts import SlowTime, StageRow
from loaderkit.profile.whatif.times import Draws, Times, times_of

_NUM, _CHUNK, _USUAL_S = 4000, 4, 0.001


def row_of(slow: list[SlowTime], **changes: Any) -> StageRow:
    """4,000 samples that wait 1 ms each in chunks of four, by four workers, but for the slow chunks."""
    slow_s = sum(one.chunk_s for one in slow)
    usual_s = (_NUM - _CHUNK * len(slow)) * _USUAL_S
    counts: dict[float, int] = {_USUAL_S: _NUM - _CHUNK * len(slow)}
    for one in slow:
        each_s = one.chunk_s / _CHUNK
        counts[each_s] = counts.get(each_s, 0) + _CHUNK
    zeros = dict.fromkeys(
        ("num_bytes", "num_failed", "cpu_s", "gil_s", "delayed_s", "starved_s", "blocked_s", "idle_s"), 0
    )
    rates = dict.fromkeys(("slot_s", "items_per_s", "bytes_per_s", "stall_s", "stall_percent"), 0.0)
    known = {"busy_s": slow_s + usual_s, "io_s": slow_s + usual_s, "services": sorted(counts.items()), "slow": slow}
    none = {"p50_s": _USUAL_S, "p99_s": None, "queued_mean": None, "queued_max": None}
    row = {
        "name": "read",
        "kind": "read",
        "pool": 0,
        "workers": 4,
        "num_items": _NUM,
        **zeros,
        **rates,
        **known,
        **none,
    }
    return StageRow.model_validate({**row, **changes})


def slow_at(position: int, at_s: float, chunk_s: float = 0.1) -> SlowTime:
    return SlowTime(epoch=0, position=position, at_s=at_s, chunk=_CHUNK, chunk_s=chunk_s)


def found_in(slow: list[SlowTime]) -> Times:
    row = row_of(slow)
    return times_of(row, row.io_s / row.num_items, wall_s=2.0, stride=1)


def test_stragglers_come_alone() -> None:
    found = found_in([slow_at(position, position / 1000) for position in range(7, _NUM, 100)])
    assert (found.run, found.pause) == (1, 0)
    assert found.every == pytest.approx(100)
    assert found.gaps == pytest.approx([1.0] * 39)
    assert found.slow_wait == pytest.approx(40 * 0.096 / (40 * 0.1 + 3840 * 0.001))


def test_slow_samples_in_a_row_are_runs() -> None:
    begins = range(100, _NUM, 400)
    found = found_in([slow_at(begin + _CHUNK * n, begin / 500 + 0.1 * n) for begin in begins for n in range(5)])
    assert (found.run, found.chunk, found.pause) == (5, _CHUNK, 0)
    assert found.every == pytest.approx(400)


def test_what_ends_at_once_is_a_pause() -> None:
    begins = range(100, _NUM, 400)
    slow = [slow_at(begin + _CHUNK * n, begin / 500, 0.1 - 0.001 * n) for begin in begins for n in range(4)]
    found = found_in(slow)
    row = row_of(slow)
    assert found.pause * row.io_s / row.num_items == pytest.approx(0.1)
    assert found.pause_every_s == pytest.approx(2.0 / 10, rel=0.02)


def test_many_slow_samples_at_random_are_no_runs() -> None:
    rng = np.random.default_rng(11)
    positions = np.flatnonzero(rng.random(_NUM // _CHUNK) < 0.1) * _CHUNK
    found = found_in([slow_at(int(position), position / 100) for position in positions])
    assert (found.run, found.pause) == (1, 0)
    assert found.every == pytest.approx(_NUM / len(positions))


def test_steady_times_have_no_slow_ones() -> None:
    found = found_in([])
    assert math.isinf(found.every)
    assert found.factors == (1.0,)


@given(st.floats(0, 1e-2), st.floats(0, 1e-2), st.floats(0, 0.9), st.floats(0, 0.9), st.integers(1, 4))
def test_draws_have_the_means(cpu_s: float, wait_s: float, slow_cpu: float, slow_wait: float, run: int) -> None:
    times = Times(slow_cpu=slow_cpu, slow_wait=slow_wait, every=50.0, run=run, chunk=2)
    draws = Draws(times, (cpu_s, wait_s), 1000, 1000, np.random.default_rng(0))
    found = np.sum([draws.of(low, low + 10) for low in range(0, 1000, 10)], axis=0)
    assert found == pytest.approx([1000 * cpu_s, 1000 * wait_s], abs=1e-9)
