"""The pipelines of detection, segmentation, pictures with captions and clicks, as they stand, on what their examples make."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_examples import ROOT

import loaderkit
from loaderkit.cli import main

Batches = list[dict[str, Any]]
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Made:
    """Makes the data of a pipeline by its example, and gives the pipeline's file."""

    def make(name: str, num: int) -> Path:
        program = f"make_{name.replace('-', '_')}.py"
        monkeypatch.setattr(sys, "argv", [program, str(tmp_path / "made"), str(num)])
        runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")
        assert str(num) in capsys.readouterr().out
        monkeypatch.setenv(name.upper().replace("-", "_"), str(tmp_path / "made"))
        return Path(ROOT / f"pipelines/{name}.yaml")

    return make


def batches_of(file: Path, **overrides: Any) -> Batches:
    """Those of an epoch, which are the same again where a loader resumes."""
    settings = {"stages.transfer.device": "cpu", "order.epochs": 1, **overrides}
    with loaderkit.build(file, overrides=settings) as loader:
        batches = list(loader)
        assert len(batches) == len(loader) > 1
    with loaderkit.build(file, overrides=settings) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loaderkit.build(file, overrides=settings) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert len(rest) == len(batches) - 1
    for batch, other in zip(batches[1:], rest, strict=True):
        for name, value in batch.items():
            values, others = ([one] if isinstance(one, torch.Tensor) else one for one in (value, other[name]))
            assert all(
                torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                for a, b in zip(values, others, strict=True)
            )
    return batches


def test_detection(made: Made) -> None:
    num = 0
    for batch in batches_of(made("detection", 12)):
        assert batch["image"].shape == (4, 3, 320, 320)
        assert 0 <= batch["image"].min() <= batch["image"].max() <= 1
        for masks, boxes, labels in zip(batch["masks"], batch["boxes"], batch["labels"], strict=True):
            assert masks.shape == (len(boxes), 320, 320)
            assert len(labels) == len(boxes)
            assert masks.dtype == torch.bool
            for mask, box in zip(masks.numpy(), boxes.numpy(), strict=True):
                rows, columns = np.nonzero(mask)
                if rows.size:
                    extent = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                    assert (extent[:2] >= box[:2] - 1).all()  # of a disc that was cut, less than its box
                    assert (extent[2:] <= box[2:] + 1).all()
                    num += 1
    assert num > 12


def test_segmentation(made: Made) -> None:
    colours = torch.tensor([[90, 140, 220], [60, 140, 60], [120, 120, 120]]) / 255
    overrides = {"stages.color_jitter.brightness": 0, "stages.color_jitter.contrast": 0}
    for batch in batches_of(made("segmentation", 16), **overrides, **{"stages.color_jitter.saturation": 0}):
        assert batch["mask"].shape == (8, 1, 256, 256)
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, None, :, None, None]
        levels = (batch["image"] * std + mean).movedim(1, 3)
        seen = ((levels[:, :, :, None] - colours) ** 2).sum(-1).argmin(-1)
        assert (seen == batch["mask"][:, 0]).float().mean() > 0.9


@pytest.mark.integration
def test_image_text(made: Made) -> None:
    file = made("image-text", 64)
    for batch in batches_of(file):
        assert batch["image"].shape == (16, 3, 224, 224)
        ids, attention = batch["input_ids"], batch["attention_mask"]
        assert ids.shape == attention.shape == (16, 8)
        assert (ids[:, 0] == 1).all()
        assert ((ids == 2).sum(1) == 1).all()
        assert torch.equal(ids != 0, attention.bool())
        # Of what the caption names last the picture's corner is.
        corner = batch["image"][:, :, -1, -1].argmax(1)
        assert all(
            int(row) in {8: (0,), 9: (1,), 10: (2,), 11: (0, 1)}[int(one[6])]
            for row, one in zip(corner, ids, strict=True)
        )


def test_dlrm(made: Made) -> None:
    file = made("dlrm", 10_000)
    rows = torch.cat([batch["row"] for batch in batches_of(file)])
    assert rows.shape == (8192, 40)
    stored = {row.tobytes() for row in np.fromfile(Path(os.environ["DLRM"], "clicks.bin"), "<i4").reshape(-1, 40)}
    assert {row.tobytes() for row in rows.numpy()} <= stored
    assert set(rows[:, 0].tolist()) == {0, 1}


@pytest.mark.parametrize(
    "name", ["detection", "segmentation", "video", "audio", "gpt", "sft", "image-text", "dlrm", "volumes"]
)
def test_the_page_has_the_commands_of_the_pipeline(name: str) -> None:
    """The tests of the pages run them."""
    page = (ROOT / f"docs/jobs/{name}.md").read_text()
    head = (ROOT / f"pipelines/{'unet3d' if name == 'volumes' else name}.yaml").read_text()
    commands = [line.removeprefix("#").strip() for line in head.splitlines() if "python examples/make_" in line]
    assert commands
    assert all(command.partition("  ")[0] in page for command in commands)
    assert f"loaderkit run pipelines/{'unet3d' if name == 'volumes' else name}.yaml" in page


@pytest.mark.parametrize(
    "name", ["detection", "segmentation", "dlrm", pytest.param("image-text", marks=pytest.mark.integration)]
)
def test_check_passes(name: str, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(made(name, 4096 if name == "dlrm" else 32))]) == 0, capsys.readouterr().err
