"""A network that really trains, profiled; and what the profiler says put to the test."""

from __future__ import annotations

import statistics
import time

import pytest

import loaderkit
from loaderkit.demo.photos import DemoData, demo_data
from loaderkit.demo.show import files_pipeline
from loaderkit.demo.training import Trainer
from profiles.bottlenecks import DOZEN
from profiles.predictions import look_at, pairs_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    return demo_data(tmp_path_factory.mktemp("demo"), 320)


@pytest.mark.alone
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_the_parts_sum_to_the_loops_own_time(data: DemoData, executor: str) -> None:
    with loaderkit.build(files_pipeline(data, 32), overrides={"prefetch.executor": executor}) as loader:
        trainer = Trainer(len(loader.classes or ()))
        with loader.profile() as report:
            begin_s = time.perf_counter()
            for batch in loader:
                trainer.step(batch)
            loop_s = time.perf_counter() - begin_s
        num_batches = len(loader)
    steps = report.result.steps
    assert report.num_batches == num_batches
    assert steps.compute_s + steps.stall_s + steps.overhead_s == pytest.approx(loop_s, rel=0.01)
    assert sum(report.stall.by_stage.values()) == pytest.approx(steps.stall_s, rel=0.01)
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
