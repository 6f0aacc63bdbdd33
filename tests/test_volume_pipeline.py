"""Scans and their labels, by the pipeline and the recipe as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from doc_examples import ROOT, named

import loaderkit


def test_unet3d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On what the example makes; a scan that is smaller than the window is padded."""
    monkeypatch.setattr(sys, "argv", ["make_volumes.py", str(tmp_path), "3"])
    runpy.run_path(str(ROOT / "examples/make_volumes.py"))
    assert "3 scans" in capsys.readouterr().out
    monkeypatch.setenv("VOLUMES", str(tmp_path))
    overrides = {"stages.transfer.device": "cpu", "stages.batch.size": 1, "order.epochs": 2}
    with loaderkit.build(ROOT / "pipelines/unet3d.yaml", overrides=overrides) as loader:
        batches = list(loader) + list(loader)
    assert len(batches) == 6
    for batch in batches:
        assert batch["image"].shape == batch["label"].shape == (1, 128, 128, 128)
        inside = batch["image"][batch["label"] == 1].float()
        assert not len(inside) or 90 < inside.mean() < 110


def test_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("scans", "masks"):
        (tmp_path / "data/cases" / folder).mkdir(parents=True)
    for number in range(8):
        scan = np.random.default_rng(number).integers(0, 1000, (40, 36, 33), np.int16)
        for folder, values in (("scans", scan), ("masks", (scan > 990).astype(np.uint8))):
            nibabel.Nifti1Image(values, np.eye(4)).to_filename(tmp_path / f"data/cases/{folder}/{number}.nii.gz")
    (tmp_path / "segment-scans.yaml").write_text(named("docs/jobs/volumes.md", "segment-scans.yaml"))
    monkeypatch.chdir(tmp_path)
    with loaderkit.build("segment-scans.yaml") as loader:
        batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert batch["scan"].shape == (4, 32, 32, 32)
        assert ((batch["scan"] > 990) == batch["mask"].bool()).all()
