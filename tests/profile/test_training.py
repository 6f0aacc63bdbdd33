"""A network that really trains, profiled; and what the profiler says put to the test."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

import loaderkit
from loaderkit.cli.demo.photos import demo_data
from loaderkit.cli.demo.training import SmallNet, train_on, training_pipeline
from profiles.bottlenecks import DOZEN
from profiles.predictions import look_at, pairs_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_data(tmp_path_factory.mktemp("demo"), 160)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_the_parts_sum_to_the_loops_own_time(data: Path, executor: str) -> None:
    """As a clock around every `next` and every step has it, wherever something else gets the CPU in between."""
    asks, gets = [], []
    trained_s = 0.0
    pipeline = training_pipeline(data, 32, slow=False)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        model = SmallNet(len(loader.classes or ()))
        with loader.profile() as report:
            batches = iter(loader)
            while True:
                asks.append(time.perf_counter())
                batch = next(batches, None)
                gets.append(time.perf_counter())
                if batch is None:
                    break
                train_on(model, batch)
                trained_s += time.perf_counter() - gets[-1]
        num_batches = len(loader)
    steps = report.result.steps
    assert report.num_batches == num_batches
    assert asks[-1] - gets[0] <= steps.compute_s + steps.stall_s + steps.overhead_s <= gets[-1] - asks[0]
    assert steps.stall_s + steps.overhead_s <= sum(gets) - sum(asks)
    assert steps.compute_s >= trained_s
    assert sum(report.stall.by_stage.values()) == pytest.approx(steps.stall_s + steps.release_s)
    for row in report.stages:
        assert row.busy_s + row.starved_s + row.blocked_s + row.idle_s == pytest.approx(row.slot_s)
    assert min(steps.compute_s, steps.stall_s, steps.overhead_s) >= 0


@pytest.mark.prove
def test_verdicts_changes_and_predictions_hold() -> None:
    found = [look_at(case, seconds=4.0, checks=False) for case in DOZEN]
    assert sum(one["is_right"] for one in found) >= 0.95 * len(found)
    errors = [abs(row["measured"]["error_percent"]) for _, row in pairs_of(found)]
    assert len(errors) >= 30
    assert statistics.median(errors) <= 10
    changes = [one["change"] for one in found if one["change"] is not None and "speedup" in one["change"]]
    assert sum(change["speedup"] > 1 for change in changes) >= 0.9 * len(changes)
