"""What the table of changes says of reports on real runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from executors import EXECUTORS

import loaderkit
from loaderkit import Pipeline
from loaderkit.pipeline.config.parsing import parse
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import SlowTime, Step
from loaderkit.profile.whatif.demands import model_of
from loaderkit.profile.whatif.predict import rate_of
from loaderkit.profile.whatif.table import what_if
from profiles.predictions import is_within
from profiles.reports import FOLDER


def pipeline_of(photos: Path) -> Pipeline:
    return Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8).batch(4).transfer("cpu")


def report_of(photos: Path, executor: str = "thread") -> Report:
    with loaderkit.build(pipeline_of(photos), overrides=EXECUTORS[executor]) as loader, loader.profile() as recording:
        list(loader)
    return recording.result


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.matrix(2)
def test_a_report_of_every_executor_gives_the_same_table_each_time(photos: Path, executor: str) -> None:
    report = Report.from_json(report_of(photos, executor).to_json())
    config = pipeline_of(photos).with_overrides(EXECUTORS[executor]).config
    rows, off = what_if(report, config)
    assert off is not None
    assert {row.name for row in rows} & {"executor: inline", "executor: thread"}
    assert all(0 < row.samples_per_s < 1e9 and 0 <= row.stall_percent <= 100 for row in rows)
    assert what_if(report, config) == (rows, off)


def test_a_report_that_keeps_no_times_is_one_of_steady_times(photos: Path) -> None:
    report = report_of(photos)
    stages = [row.model_copy(update={"services": [], "slow": [], "chunk": None}) for row in report.stages]
    model = model_of(report.model_copy(update={"stages": stages}))
    assert model is not None
    assert all(stage.times.every == float("inf") and stage.times.factors == (1.0,) for stage in model.stages)


@pytest.mark.parametrize(("kind", "is_serial"), [("bandwidth", False), ("lock", True)])
def test_a_full_link_makes_no_few_samples_wait(photos: Path, kind: str, is_serial: bool) -> None:
    report = report_of(photos)
    row, *others = report.stages
    slow = [SlowTime(epoch=0, position=8 * n, at_s=float(n), chunk=1, chunk_s=1.0) for n in range(4)]
    services = [[0.01, 56], [1.0, 4]]
    changed = {
        "p50_s": 0.01,
        "services": services,
        "slow": slow,
        "busy_s": 4.56,
        "cpu_s": 0.1,
        "io_s": 4.46,
        "delayed_s": 0,
    }
    varied = report.model_copy(
        update={
            "verdict": report.verdict.model_copy(update={"stage": "read", "kind": kind}),
            "stages": [row.model_copy(update=changed), *others],
        }
    )
    model = model_of(varied)
    assert model is not None
    assert (model.serial_stage == "read") is is_serial


def test_others_want_more_cpus_than_they_get(photos: Path) -> None:
    """Two workers get half a CPU of two: six threads of others have the rest. What is late beyond that is a wait."""
    report = report_of(photos)
    reading, decoding, *_ = report.stages
    computing = {"busy_s": 1.8, "cpu_s": 0.45, "io_s": 0.0, "gil_s": 0.0, "delayed_s": 1.35}
    waiting = {"busy_s": 0.2, "cpu_s": 0.0, "io_s": 0.1, "gil_s": 0.0, "delayed_s": 0.1}
    rows = [reading.model_copy(update=waiting), decoding.model_copy(update=computing)]
    verdict = report.verdict.model_copy(update={"stage": decoding.name, "kind": "computing"})
    changes = {"verdict": verdict, "stages": rows, "wall_s": 1.0, "host": {**report.host, "others_cpus": 1.5}}
    machine = report.machine.model_copy(update={"cpus": 2})
    model = model_of(report.model_copy(update={**changes, "machine": machine}))
    assert model is not None
    assert model.others_cpus == pytest.approx(4 * 2 - 1.9)
    read, decode = model.stages
    assert decode.wait_s == pytest.approx(0.0, abs=1e-9)
    assert read.wait_s == pytest.approx(0.2 / reading.num_items)


@pytest.mark.parametrize(("kind", "is_better"), [("computing", True), ("gil", False)])
def test_more_workers_do_not_overlap_what_is_late_under_the_gil(photos: Path, kind: str, is_better: bool) -> None:
    """Beside other programs, who holds the GIL waits for a CPU with it."""
    report = report_of(photos)
    reading, decoding, *rest = report.stages
    late = {
        "busy_s": 2.0,
        "cpu_s": 0.1,
        "io_s": 0.0,
        "gil_s": 0.9 if kind == "gil" else 0.0,
        "delayed_s": 1.0,
        "workers": 2,
    }
    nothing = {"busy_s": 0.0, "cpu_s": 0.0, "io_s": 0.0, "gil_s": 0.0, "delayed_s": 0.0, "workers": 2}
    rows = [reading.model_copy(update=nothing), decoding.model_copy(update=late)]
    rows += [row.model_copy(update=nothing) for row in rest]
    changed = report.model_copy(
        update={
            "stages": [row.model_copy(update={"slow": [], "services": []}) for row in rows],
            "wall_s": 1.1,
            "host": {**report.host, "others_cpus": 2.0},
            "machine": report.machine.model_copy(update={"cpus": 4}),
            "verdict": report.verdict.model_copy(update={"stage": "decode", "kind": kind}),
        }
    )
    model = model_of(changed)
    assert model is not None
    more = replace(model, pools=tuple(replace(pool, workers=2 * pool.workers) for pool in model.pools))
    assert (rate_of(more) > 1.2 * rate_of(model)) is is_better


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.matrix(2)
def test_what_build_refuses_is_not_shown(photos: Path, executor: str) -> None:
    """Threads share the generators that a seeded function draws from, and a function with a lock stays in its process."""
    files = Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8)
    report = report_of(photos, executor)
    seeded = files.call(abs, seeded=True).batch(4).with_overrides({"prefetch.executor": "inline"})
    lock = threading.Lock()
    unsendable = files.call(lambda sample: sample if lock else None).batch(4)
    for pipeline in (pipeline_of(photos), seeded, unsendable):
        for row in what_if(report, pipeline.config)[0]:
            overrides = {one.key: one.value for one in row.settings}
            assert pipeline is not unsendable or overrides.get("prefetch.executor") != "process"
            if overrides and pipeline is not unsendable:  # whose description no file can hold, nor be changed by key
                loaderkit.build(pipeline, overrides=overrides).close()


@pytest.mark.prove
def test_a_prediction_is_as_sure_as_the_run_was_steady(photos: Path) -> None:
    report, config = report_of(photos), pipeline_of(photos).config

    def halves(stalls_s: Sequence[float]) -> set[float | None]:
        steps = [Step(at_s=float(n), compute_s=0.01, stall_s=stall_s) for n, stall_s in enumerate(stalls_s)]
        rows, _ = what_if(report.model_copy(update={"steps": report.steps.model_copy(update={"steps": steps})}), config)
        return {row.interval_percent for row in rows}

    assert halves([0.01] * 3) == {None}
    steady, varied = halves([0.01] * 100), halves([0.01, 0.02, 0.04, 0.01, 0.05] * 20)
    slow_at_times = halves([0.01] * 40 + [0.05] * 20 + [0.01] * 40)
    least = [min(one or 0.0 for one in found) for found in (steady, varied, slow_at_times)]
    assert least == sorted(least)
    assert least[0] < 1 < least[2]


def test_recorded_predictions_hold() -> None:
    """Of the recorded runs whose changes were made and measured then. Both have intervals of 95 %."""
    rows = []
    for path in (FOLDER / "database.json", FOLDER / "imagenet-files.json"):
        report = Report.from_json(path.read_text())
        now, off = what_if(report, parse(report.config))
        assert off is not None
        assert abs(off) < 15
        found = {row.name: row.measured for row in report.what_if if row.measured is not None}
        rows += [{**row.model_dump(), "measured": found[row.name].model_dump()} for row in now if row.name in found]
    assert len(rows) >= 6
    assert sum(map(is_within, rows)) >= 0.8 * len(rows), rows
