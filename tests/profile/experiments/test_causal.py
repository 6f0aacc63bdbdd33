"""Verdicts put to the test: what is slowed, what must follow, and what is made of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import loaderkit
from loaderkit import Loader, Pipeline
from loaderkit.engine.work import Stage
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.profile.experiments.causal import check_verdict, judge, plan_check
from loaderkit.profile.experiments.loops import sleep_step
from loaderkit.profile.report import Report
from loaderkit.stages.slowed import Manner, Slowdown, slowed


def report_of(pipeline: Pipeline, num_batches: int = 40, **overrides: Any) -> Report:
    with loaderkit.build(pipeline, overrides=overrides) as loader, loader.profile() as recording:
        for _, _ in zip(loader, range(num_batches), strict=False):
            pass
    return recording.result


class Waiting:
    """Items that wait: at once, or one after the other."""

    def __init__(self, seconds: float, lock: threading.Lock | None = None) -> None:
        self._seconds = seconds
        self._lock = lock

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, int]:
        if self._lock is None:
            time.sleep(self._seconds)
        else:
            with self._lock:
                time.sleep(self._seconds)
        return {"x": index}


def make_from(pipeline: Pipeline, given: Mapping[str, Any]) -> Any:
    def make(overrides: Mapping[str, Any], slowdown: Slowdown | None) -> Loader:
        config = to_config(pipeline, {**given, **overrides})
        return Loader(compile_pipeline(config, rank=0, world_size=1, slowdown=slowdown))

    return make


@pytest.mark.prove
@pytest.mark.alone
def test_a_true_verdict_holds() -> None:
    pipeline = Pipeline.dataset(Waiting(4e-3)).read().batch(4)
    given = {"prefetch.concurrency": 2}
    report = report_of(pipeline, **given)
    assert report.verdict.stage == "read"
    found = check_verdict(make_from(pipeline, given), sleep_step(0.0), report, seconds=6)
    assert found is not None
    assert found.agrees is not False  # on a busy machine it may be too noisy to say
    assert found.expected_percent > 40


@pytest.mark.prove
@pytest.mark.alone
def test_a_false_verdict_does_not() -> None:
    pipeline = Pipeline.dataset(Waiting(4e-3)).read().call(lambda sample: None).batch(4)
    given = {"prefetch.concurrency": 2}
    report = report_of(pipeline, **given)
    wrong = report.verdict.model_copy(update={"stage": "call", "kind": "computing"})
    stages = [row.model_copy(update={"cpu_s": 1.0 if row.name == "call" else 0.0}) for row in report.stages]
    blamed = report.model_copy(update={"verdict": wrong, "stages": stages})
    found = check_verdict(make_from(pipeline, given), sleep_step(0.0), blamed, seconds=6)
    assert found is not None
    assert found.expected_percent == pytest.approx(50)
    assert found.agrees is not True


@pytest.mark.prove
@pytest.mark.alone
def test_in_the_loops_own_thread_loading_and_training_add_up() -> None:
    pipeline = Pipeline.dataset(Waiting(2e-3)).read().batch(4)
    given = {"prefetch.executor": "inline"}
    with loaderkit.build(pipeline, overrides=given) as loader, loader.profile() as recording:
        for _, _ in zip(loader, range(30), strict=False):
            time.sleep(16e-3)  # twice as long as a batch takes
    report = recording.result
    assert report.verdict.stage == "read"
    found = check_verdict(make_from(pipeline, given), sleep_step(16e-3), report, seconds=6)
    assert found is not None
    assert 10 < found.expected_percent < 25  # half of a third
    assert found.agrees is not False


@pytest.mark.prove
@pytest.mark.alone
def test_where_training_is_the_limit_a_slower_stage_changes_nothing(photos: Path) -> None:
    pipeline = Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8).batch(4)
    report = report_of(pipeline)
    verdict = report.verdict.model_copy(update={"stage": None, "kind": "training"})
    unblamed = report.model_copy(update={"verdict": verdict})
    found = check_verdict(make_from(pipeline, {}), sleep_step(0.05), unblamed, seconds=6)
    assert found is not None
    assert found.expected_percent == 0
    assert found.agrees is not False


@pytest.mark.parametrize("kind", ["memory", "depth", "start", "wakeup", "unknown"])
def test_where_no_stage_is_blamed_there_is_nothing_to_slow(kind: str, photos: Path) -> None:
    report = report_of(Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8).batch(4))
    stage = None if kind in ("unknown",) else "memory"
    assert plan_check(report.verdict.model_copy(update={"stage": stage, "kind": kind}), report.stages) is None


@pytest.mark.parametrize(
    ("expected", "measured", "half", "agrees"),
    [
        (50.0, 48.0, 5.0, True),
        (50.0, 30.0, 4.0, True),
        (50.0, 2.0, 4.0, False),
        (50.0, 40.0, 20.0, True),
        (12.0, 11.0, 8.0, True),
        (50.0, 10.0, 20.0, False),
        (50.0, 30.0, 60.0, None),
        (0.0, 1.0, 4.0, True),
        (0.0, 45.0, 5.0, False),
        (0.0, 10.0, 80.0, None),
    ],
)
def test_judgement(expected: float, measured: float, half: float, agrees: bool | None, photos: Path) -> None:
    report = report_of(Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8).batch(4), 4)
    found = judge(Slowdown("decode", 0.5, "wait"), expected, measured, half, report.stages[1])
    assert found.agrees is agrees


@pytest.mark.parametrize("manner", ["wait", "compute", "gil", "turns"])
def test_a_slowed_stage_does_the_same_and_takes_longer(manner: Manner) -> None:
    calls = []

    def run(item: int) -> int:
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        calls.append(item)
        return item + 1

    stage = Stage("decode", "decode", "sample", run)
    assert slowed(stage, Slowdown("read", 5.0, manner)) is stage
    slow = slowed(stage, Slowdown("decode", 5.0, manner))
    clock = time.perf_counter if manner in ("wait", "turns") else time.thread_time
    begin_s = clock()
    assert slow.run(3) == 4
    assert clock() - begin_s >= 0.12
    assert calls == [3]


def test_a_loader_with_a_slowed_stage_gives_the_same_batches(photos: Path) -> None:
    pipeline = Pipeline.files(photos, include="**/*.jpg").read().decode().random_resized_crop(8).batch(4)
    make = make_from(pipeline, {})
    with make({}, None) as one, make({}, Slowdown("decode", 0.5, "turns")) as other:
        for batch, same in zip(one, other, strict=True):
            assert batch["__key__"] == same["__key__"]
            assert (batch["image"] == same["image"]).all()
