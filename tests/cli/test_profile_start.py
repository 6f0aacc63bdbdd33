"""`loaderkit profile P --start CHECKPOINTS`: what ran when, and which of it the first step waited for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import loaderkit
from loaderkit.cli import main
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import StartReport
from loaderkit.profile.start.critical_path import BATCHES, BUILD, FIRST, IMPORT, OPEN, STATE, TENSORS, start_report


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline's file, beside checkpoints of it in `run`."""
    np.save(tmp_path / "rows.npy", np.zeros((20, 3), np.float32))
    path = tmp_path / "p.yaml"
    path.write_text("source: {kind: array, url: rows.npy}\nstages:\n- read\n- batch: {size: 4}\n")
    state = {"model": torch.nn.Linear(3, 2), "note": 1}
    with loaderkit.start(path, tmp_path / "run", state) as run:
        next(iter(run.loader))
        run.checkpoints.save(7, state)
    return path


def test_a_start_is_profiled(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = str(pipeline.parent / "run")
    assert main(["profile", str(pipeline), "--start", checkpoints, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = StartReport.model_validate(found)
    assert (report.kind, report.step) == ("start", 7)
    assert {OPEN, STATE, TENSORS, IMPORT, BUILD, FIRST} <= {part.name for part in report.parts}
    assert all(0 <= part.begin_s <= part.end_s <= report.total_s + 1e-6 for part in report.parts)
    assert main(["profile", str(pipeline), "--start", checkpoints]) == 0
    assert "first batch after" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--steps", "3"], ["--cold"], ["--what-if"]])
def test_other_options_do_not_apply(pipeline: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(pipeline), "--start", str(pipeline.parent / "run"), *option]) == 2
    assert "only --json, --out and --set apply" in capsys.readouterr().err


def critical(times: dict[str, tuple[float, float]], first: tuple[float, float]) -> set[str]:
    report = start_report("p", 3, times, first, 1.0, list_s=0.5, index_s=0.0)
    assert report.total_s == 1.0 + first[1]
    assert all(len(line) <= 80 for line in to_text(report).splitlines())
    return {part.name for part in report.parts if part.is_critical} - {"the program's imports"}


def test_the_path_is_what_the_first_step_waited_for() -> None:
    restored = {OPEN: (0.0, 1.0), STATE: (1.0, 2.0), TENSORS: (2.0, 9.0), "restore": (1.0, 9.0)}
    built = {IMPORT: (0.1, 1.1), BUILD: (1.1, 4.0), BATCHES: (4.0, 4.1), "wait for the loader": (9.0, 9.0)}
    assert critical(restored | built, (9.0, 9.0)) == {OPEN, STATE, TENSORS}
    slow = built | {BUILD: (1.1, 12.0), BATCHES: (12.0, 12.1)}
    assert critical(restored | slow, (12.1, 12.6)) == {IMPORT, BUILD, BATCHES, FIRST}
    early = built | {BUILD: (1.1, 1.5), BATCHES: (2.0, 2.1)}
    assert critical(restored | early, (9.0, 12.0)) == {OPEN, STATE, BATCHES, FIRST}
    without = {OPEN: (0.0, 0.1), IMPORT: (0.0, 1.0), BUILD: (1.0, 3.0)}
    assert critical(without, (3.0, 3.5)) == {IMPORT, BUILD, FIRST}
