"""The interval is the one at which the least is lost: by the formula itself, by Young's where that holds, by a simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.checkpoint.timing.advice import PlannedJob, advice, sizes
from loaderkit.checkpoint.timing.interval import Interruptions
from profiles.goodput import simulate

CASES = st.builds(
    Interruptions,
    pause_s=st.floats(0.01, 60.0),
    flush_s=st.floats(0.01, 1000.0),
    mtbf_s=st.floats(3600.0, 1e6),
    upload_s=st.none() | st.floats(1.0, 5000.0),
    restart_s=st.floats(0.0, 600.0),
    lost_machines=st.floats(0.0, 1.0),
    uploads_all=st.booleans(),
)


@given(CASES)
def test_no_other_interval_loses_less(case: Interruptions) -> None:
    """Up to what is beyond the formula's first order."""
    best_s = case.best_interval_s()
    assert best_s >= case.least_interval_s
    others = np.geomspace(max(case.least_interval_s, 0.01), 1e6, 400)
    least = min(case.lost_share(float(other_s)) for other_s in others)
    assert case.lost_share(best_s) <= least * 1.05


@given(st.floats(0.01, 10.0), st.floats(1e4, 1e7))
def test_it_is_young_s_where_saves_are_cheap(pause_s: float, mtbf_s: float) -> None:
    case = Interruptions(pause_s, pause_s, mtbf_s)
    assert case.best_interval_s() == pytest.approx(math.sqrt(2 * pause_s * mtbf_s), rel=0.05)


@given(CASES, st.floats(1.1, 10.0))
def test_what_lasts_longer_is_saved_less_often(case: Interruptions, factor: float) -> None:
    assert replace(case, mtbf_s=case.mtbf_s * factor).best_interval_s() >= case.best_interval_s() * 0.999


def test_saves_never_queue_up() -> None:
    assert Interruptions(0.1, 500.0, 3600.0).best_interval_s() == pytest.approx(499.9)
    assert Interruptions(0.1, 5.0, 3600.0, upload_s=900.0, uploads_all=True).best_interval_s() == pytest.approx(899.9)


def test_a_simulated_job_loses_least_near_it() -> None:
    found = simulate(4, seed=3, num_interruptions=2000)
    assert found["num_losses_within_5_percent"] == 4


@pytest.mark.prove
def test_200_simulated_jobs() -> None:
    found = simulate(200, seed=1)
    assert found["num_losses_within_5_percent"] == 200
    assert found["num_intervals_within_5_percent"] >= 196


class TestAdvice:
    def test_sizes_times_and_levers(self) -> None:
        parts = sizes(70e9)
        assert sum(parts.values()) == 980e9
        told = advice(PlannedJob(sum(parts.values()), ranks=64, store=2e9, mtbf_s=10800.0))
        assert told["pause_s"] == pytest.approx(980e9 / 64 / 10e9)
        assert told["flush_s"] == pytest.approx(490.5)
        assert told["host_bytes"] == pytest.approx(2 * 8 / 64 * 980e9)
        assert told["interval_s"] == pytest.approx(490.5 - 980 / 640)
        by_name = {lever["lever"]: lever for lever in told["levers"]}
        assert not by_name["training waits for each save"]["is_gain"]
        assert all(lever["is_gain"] for name, lever in by_name.items() if not name.startswith("training waits"))

    def test_with_local_a_restore_and_a_save_are_shorter(self) -> None:
        job = PlannedJob(1e12, ranks=64, store=2e9, mtbf_s=10800.0)
        without, found = advice(job), advice(replace(job, local=16e9))
        assert found["flush_s"] == pytest.approx(63.0)
        assert found["upload_s"] == pytest.approx(500.5)
        assert found["restart_s"] < without["restart_s"]
        assert found["lost_share"] < without["lost_share"]
        assert not [lever for lever in found["levers"] if "local" in lever["lever"]]
