"""Loops of torch's DataLoader whose limit is known: it is what the report names, and what it suggests is worth doing."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from watched_accounts import FOLDER, from_json, read, to_json
from watched_loops import CASES, Case, make, run

import loaderkit
from loaderkit.diagnosis.watched.rules import diagnose_watched
from loaderkit.profile.report import Report

_OTHERS = 0.3  # CPUs: where other programs use more, some limits are those of the machine


def limit_of(report: Report) -> tuple[str | None, str]:
    return report.verdict.stage, report.verdict.kind


def assert_agrees(report: Report, waited_s: float, took_s: float) -> None:
    """The clock of the loop itself, around next(), sees the same share of waiting and handing over: a busy machine is no
    matter, as both are of the same loop."""
    steps = report.steps
    share = (steps.stall_s + steps.overhead_s) / steps.wall_s
    assert 100 * share == pytest.approx(100 * waited_s / took_s, rel=0.1, abs=3), (
        steps.model_dump(exclude={"steps"}),
        waited_s,
    )


@pytest.mark.parametrize("machine", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_limit_is_named_on_recorded_accounts(machine: Path) -> None:
    """What these loops said of themselves on some machine: tests/helpers/watched_accounts.py."""
    recorded = list(read(machine))
    assert {name for name, _, _ in recorded} == CASES.keys()
    for name, case, stats in recorded:
        verdict = diagnose_watched(stats)
        assert (verdict.stage, verdict.kind) in case.expected, (name, verdict)
        assert {setting.key for setting in verdict.settings} <= case.changes, name
        assert case.says in verdict.evidence + verdict.change, (name, verdict)


def test_accounts_come_back_from_their_files() -> None:
    watched = loaderkit.watch([1, 2, 3])
    assert [*watched] == [1, 2, 3]
    seen = json.loads(json.dumps(to_json(watched.stats())))
    assert json.loads(json.dumps(to_json(from_json(seen)))) == seen


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_limit_is_named(name: str) -> None:
    case = CASES[name]
    report, waited_s, took_s = run(make(case), case, name)
    is_busy = (report.host["others_cpus"] or 0.0) > _OTHERS
    evidence = json.dumps([report.verdict.model_dump(), report.stall.model_dump(), report.host])
    assert limit_of(report) in case.expected or (is_busy and case.is_touchy), evidence
    assert report.verdict.stage is None or report.stall.percent >= 5
    if limit_of(report) in case.expected:
        first = report.verdict.causes[0]  # the data set itself may be nearly as slow
        assert {setting.key for setting in first.settings} <= case.changes
    if limit_of(report) in case.expected and not is_busy:
        assert case.says in report.verdict.evidence + report.verdict.change, evidence
    assert_agrees(report, waited_s, took_s)
    assert sum(report.stall.by_stage.values()) == pytest.approx(report.stall.total_s)
    assert report.num_samples == case.samples["number"] * case.epochs
    dataset = report.stages[0]
    assert dataset.slot_s == pytest.approx(dataset.busy_s + dataset.blocked_s)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("number", range(16))
def test_drawn_loops_have_the_limit_that_was_drawn(number: int, rng: random.Random) -> None:
    num_workers, batch_size = rng.choice([0, 1, 2, 2, 3, 6]), rng.choice([1, 4, 16])
    batch_s = rng.uniform(0.01, 0.06)  # what one worker takes for a batch
    kind = rng.choice(["waiting", "computing"])
    is_slow = rng.random() < 0.7  # the loader, not the step
    num_ready = min(num_workers or 1, 2) if kind == "computing" else num_workers or 1  # how many batches come at a time
    step_s = (
        batch_s / num_ready / rng.uniform(3, 8)
        if is_slow or not num_workers
        else batch_s / num_ready * rng.uniform(4, 8) + 0.05
    )
    name = {"waiting": "wait_s", "computing": "cpu_s"}[kind]
    case = Case(
        {"number": 30 * batch_size, name: batch_s / batch_size}, {"num_workers": num_workers, "batch_size": batch_size},
        {("dataset", kind)} if is_slow or not num_workers else {(None, "training")}, step_s,
    )  # fmt: skip
    report, waited_s, took_s = run(make(case), case)
    evidence = json.dumps(
        [case.samples, case.loader, step_s, report.verdict.model_dump(), report.stall.by_stage, report.host]
    )
    assert_agrees(report, waited_s, took_s)
    if report.host["others_cpus"] > _OTHERS and None in dict(case.expected):
        assert (report.verdict.stage is None) == (report.stall.percent < 5)  # other programs make it wait as they like
    elif report.verdict.stage != "start":  # of which a run this short has much
        assert limit_of(report) in case.expected, evidence


def slow_pin(batch: Any, device: Any = None) -> Any:
    """What pinning might be."""
    if isinstance(batch, list):
        time.sleep(0.02)
    return batch


def test_a_thread_that_pins_memory_may_be_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch's own thread, and a function in the place of the one that pins."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", slow_pin)
    case = Case({"number": 200}, {"num_workers": 2, "pin_memory": True}, {("pin_memory", "waiting")}, step_s=0.001)
    report, _, _ = run(make(case), case)
    assert [row.name for row in report.stages] == ["dataset", "pin_memory", "handover"]
    assert report.stall.by_stage["pin_memory"] > report.stall.by_stage["dataset"]


@pytest.mark.prove
@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.changes])
def test_what_is_suggested_helps(name: str) -> None:
    case = CASES[name]
    before, _, _ = run(make(case), case, name)
    changed = {setting.key: setting.value for setting in before.verdict.settings}
    if not changed:
        pytest.skip(f"nothing to set: {before.verdict.change}")
    after, _, _ = run(make(case, **changed), case, name)
    assert after.throughput["samples_per_s"] > 1.1 * before.throughput["samples_per_s"], (changed, before.verdict)
