"""Saving beside loading: a report tells a loop's pauses for saving from its computing, and what went on behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit.checkpoint.save_log import SAVES
from loaderkit.errors import ConnectorError
from loaderkit.profile.build import steps_of, utilisation
from loaderkit.profile.render.html import to_html
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report
from loaderkit.profile.step_log import StepLog


def values(num: int) -> loaderkit.Pipeline:
    samples = [{"x": torch.tensor(number)} for number in range(num)]
    return loaderkit.Pipeline.iterable(samples).read().batch(4)


def test_the_report_on_a_loop_that_saves(tmp_path: Path) -> None:
    model = torch.nn.Linear(200, 100)
    with (
        loaderkit.build(values(40)) as loader,
        loaderkit.CheckpointManager(tmp_path / "run", every=3) as checkpoints,
    ):
        with loader.profile() as recording:
            for step, _ in enumerate(loader, 1):
                checkpoints.save(step, {"model": model, "loader": loader})
            checkpoints.wait_until_finished()
        stats = checkpoints.stats()
    report: Report = recording.result
    assert [row.step for row in report.saves] == [3, 6, 9]
    files = [item for row in report.saves for item in row.objects]
    assert {item.rank for item in files} == {0}
    on_disk = list((tmp_path / "run").rglob("*.distcp"))
    assert sorted(item.num_bytes for item in files) == sorted(path.stat().st_size for path in on_disk)
    for name in ("hashing_s", "writing_s", "syncing_s"):
        assert sum(getattr(item, name) for item in files) == pytest.approx(stats[name])
    assert sum(row.staging_s for row in report.saves) == pytest.approx(stats["staging_s"])
    assert sum(row.flush_s for row in report.saves) == pytest.approx(stats["flush_s"])
    assert all(row.error is None and row.commit_s is not None and row.num_bytes > 0 for row in report.saves)
    steps = report.steps
    assert 0 < steps.save_staging_s <= stats["staging_s"] + 1e-9
    names = {name: seconds for name, _, seconds, _ in steps.parts()}
    assert names["copying what is saved"] == steps.save_staging_s
    assert sum(names.values()) == pytest.approx(steps.compute_s + steps.stall_s + steps.overhead_s)
    assert stats["last"]["ranks"][0].keys() == {item.object for item in report.saves[-1].objects}
    assert Report.from_json(report.to_json()) == report
    for text in (to_text(report), to_html(report)):
        assert "Checkpoints saved" in text
        assert "copying what is saved" in text


def test_a_failed_save_is_in_the_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = loaderkit.CheckpointManager(run)
    with loaderkit.build(values(12)) as loader, loader.profile() as recording:
        for _ in loader:
            pass
        if run.exists():
            run.rmdir()
        run.write_text("a file where the directory would be")
        checkpoints.save(1, {"x": torch.ones(3)})
        with pytest.raises(ConnectorError):
            checkpoints.wait_until_finished()
    checkpoints.close()
    (row,) = recording.result.saves
    assert row.error is not None
    assert "step 1 is not saved" in to_text(recording.result, width=1000)


@pytest.mark.parametrize("cause", ["waiting_s", "staging_s"])
def test_a_pause_for_saving_is_no_computing(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    now_s = 0.0
    log = StepLog(lambda: now_s)

    def step(compute_s: float, pause_s: float) -> None:
        nonlocal now_s
        log.on_request()
        now_s += 1.0
        log.on_batch()
        now_s += compute_s + pause_s
        monkeypatch.setattr(SAVES.pauses, cause, getattr(SAVES.pauses, cause) + pause_s)

    for pause_s in (0.0, 5.0, 0.0, 2.0):
        step(3.0, pause_s)
    log.on_request()
    log.on_end()
    log.close()
    steps = steps_of(log, 4.0)
    paused: dict[str, Any] = {"waiting_s": steps.save_waiting_s, "staging_s": steps.save_staging_s}
    assert paused == {"waiting_s": 0.0, "staging_s": 0.0} | {cause: 7.0}
    assert steps.compute_s == 19.0
    assert steps.parts()[0][2] == 12.0
    found = utilisation(log)
    assert found is not None
    assert found.percent == pytest.approx(75.0)
    assert found.whole_run_percent == pytest.approx(75.0)
