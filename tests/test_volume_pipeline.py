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
    for folder in ("images", "labels"):
        (tmp_path / "data/volumes" / folder).mkdir(parents=True)
    for number in range(8):
        scan = np.random.default_rng(number).integers(0, 1000, (40, 36, 33), np.int16)
        for folder, values in (("images", scan), ("labels", (scan > 990).astype(np.uint8))):
            nibabel.Nifti1Image(values, np.eye(4)).to_filename(tmp_path / f"data/volumes/{folder}/{number}.nii.gz")
    (tmp_path / "segment-scans.yaml").write_text(named("docs/jobs/volumes.md", "segment-scans.yaml"))
    monkeypatch.chdir(tmp_path)
    with loaderkit.build("segment-scans.yaml") as loader:
        batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert batch["scan"].shape == (4, 32, 32, 32)
        assert ((batch["scan"] > 990) == batch["mask"].bool()).all()


def test_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four windows of each scan, as they are cut of it, side by side; and the scan is read once."""
    rng = np.random.default_rng(3)
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    scans = {}
    for number in range(3):
        scan = rng.integers(-900, 900, (34, 32, 20 + number), np.int16)
        scans[f"case_{number}"] = scan
        for folder, values in (("images", scan), ("labels", (scan > 880).astype(np.uint8))):
            nibabel.Nifti1Image(values, np.eye(4)).to_filename(tmp_path / folder / f"case_{number}.nii.gz")
    monkeypatch.setenv("VOLUMES", str(tmp_path))
    overrides = {
        "stages.transfer.device": "cpu",
        "stages.random_volume_crop.size": [8, 6, 5],
        "stages.random_volume_flip.p": 0,
        "order.epochs": 1,
        "stages.batch.size": 6,
        "stages.batch.drop_last": False,
    }
    with loaderkit.build(ROOT / "pipelines/patches.yaml", overrides=overrides) as loader:
        batches = list(loader)
        rows = {row["name"]: row for row in loader.stats().to_dict()["stages"]}
    keys = [key for batch in batches for key in batch["__key__"]]
    assert keys == [key for key in keys[::4] for _ in range(4)]
    patches = np.concatenate([batch["image"].numpy() for batch in batches])
    labels = np.concatenate([batch["label"].numpy() for batch in batches])
    assert ((patches > 880) == labels.astype(bool)).all()
    places = []
    for key, patch in zip(keys, patches, strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(scans[Path(key).name.partition(".")[0]], (8, 6, 5))
        (place,) = np.argwhere((windows == patch).all((-3, -2, -1)))
        places.append((key, *place.tolist()))
    assert len({*places}) > 10
    assert rows["read"]["num_bytes"] < 2 * sum(file.stat().st_size for file in tmp_path.rglob("*.gz"))
