"""Loops of torch's DataLoader whose limit is known: it is what the report names, and what it suggests is worth doing."""

from __future__ import annotations

import json

import pytest
from watched_loops import CASES, make, run

from loaderkit.profile.report import Report

_OTHERS = 0.3  # CPUs: where other programs use more, some limits are those of the machine


def limit_of(report: Report) -> tuple[str | None, str]:
    return report.verdict.stage, report.verdict.kind


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", CASES)
def test_the_limit_is_named(name: str) -> None:
    case = CASES[name]
    report, waited_s, took_s = run(make(case), case, name)
    is_busy = (report.host["others_cpus"] or 0.0) > _OTHERS
    evidence = json.dumps([report.verdict.model_dump(), report.stall.model_dump(), report.host])
    assert limit_of(report) in case.expected | (case.busy if is_busy else set()), evidence
    assert report.verdict.stage is None or report.stall.percent >= 5
    assert {setting.key for setting in report.verdict.settings} <= case.changes
    if limit_of(report) in case.expected and not is_busy:
        assert case.says in report.verdict.evidence + report.verdict.change, evidence
    # The clock of the loop itself sees the same share of waiting; both have the same loop, so that a busy machine is no matter.
    assert report.stall.percent == pytest.approx(100 * waited_s / took_s, rel=0.1, abs=3), evidence
    assert sum(report.stall.by_stage.values()) == pytest.approx(report.stall.total_s)
    assert report.num_samples == case.samples["number"] * case.epochs
    dataset = report.stages[0]
    assert dataset.slot_s == pytest.approx(dataset.busy_s + dataset.blocked_s)


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
