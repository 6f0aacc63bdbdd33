"""Which files are samples: notes beside the images are none, and images that `include` leaves out are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import SourceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 photographs in mixed formats and cases, and what lies beside them."""
    data = tmp_path / "data"
    (data / "cats").mkdir(parents=True)
    for number in range(12):
        extension = ("jpg", "jpg", "JPG", "jpeg", "png", "PNG")[number % 6]
        image = Image.new("RGB", (8, 8), (number, 0, 0))
        image.save(data / "cats" / f"{number:02}.{extension}", "PNG" if extension.lower() == "png" else "JPEG")
    (data / "a-notes.txt").write_text("first in the order")
    (data / "cats" / "README").write_text("")
    (data / "cats" / "prices.csv").write_text("")
    (data / ".thumbs.png").write_bytes(b"hidden")
    return data


def keys(folder: Path, **args: Any) -> list[str]:
    made = Pipeline.files(str(folder), **args).shuffle(False).epochs(1).read().batch(100)
    with loaderkit.build(made) as loader:
        (batch,) = loader
    return [key.rpartition("/")[2] for key in batch["__key__"]]


def checked(folder: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool = False, **source: Any) -> str:
    pipeline = folder.parent / "pipeline.yaml"
    described = json.dumps({"kind": "files", "url": str(folder), **source})
    pipeline.write_text(f"source: {described}\nstages: [read, decode, batch: {{size: 4}}]\n")
    assert main(["check", str(pipeline), *(["--json"] if as_json else [])]) == 0
    return capsys.readouterr().out


def test_notes_beside_images_are_no_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [key[:2] for key in keys(folder)] == [f"{number:02}" for number in range(12)]
    assert keys(folder, limit=1) == ["00.jpg"]
    assert len(keys(folder, label="parent")) == 12  # a-notes.txt lies in no folder
    out = checked(folder, capsys)
    assert "samples       12\n" in out
    assert "left out      3 files that `include` does not take: 1 without extension, 1 .csv, 1 .txt\n" in out


@pytest.mark.parametrize(
    ("include", "num", "said"),
    [
        ("**/*.jpg", 4, "8 files that `include` does not take: 2 .JPG, 2 .PNG, 2 .jpeg, 2 .png"),
        ("**/*.{jpg,jpeg,png}", 8, "4 files that `include` does not take: 2 .JPG, 2 .PNG"),
        (["**/*.[jJ][pP]*[gG]", "**/*.png", "**/*.PNG"], 12, None),
    ],
)
def test_images_that_include_leaves_out_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str], include: Any, num: int, said: str | None
) -> None:
    out = checked(folder, capsys, include=include)
    assert f"samples       {num}\n" in out
    assert (said or "") in out
    assert ("left out" in out) == (said is not None)


def test_the_counts_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(checked(folder, capsys, as_json=True, include="**/*.jpg"))
    assert told["left_out"] == {"JPG": 2, "jpeg": 2, "png": 2, "PNG": 2}


def test_every_file_is_a_sample_if_include_says_so(folder: Path) -> None:
    (folder / "cats" / "README").unlink()
    with loaderkit.build(Pipeline.files(str(folder), include="**/*").read().batch(4)) as loader:
        assert loader.num_samples == 14


def test_without_images_every_file_is_a_sample(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.ones(3))
    (tmp_path / ".hidden.png").touch()
    assert keys(tmp_path) == ["0.npy", "1.npy", "2.npy"]


def test_a_picture_beside_as_many_others_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.ones(3))
    Image.new("RGB", (8, 8)).save(tmp_path / "preview.png")
    with pytest.raises(SourceError, match=r"1 images and 3 other files \(3 \.npy\): say in `include`"):
        keys(tmp_path)
    assert keys(tmp_path, include="*.npy") == ["0.npy", "1.npy", "2.npy"]
