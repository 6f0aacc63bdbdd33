"""What people have becomes a pipeline of at most 12 lines, and its batches are right: examples of pages, with 480 pictures."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_examples import named
from mixed_photos import upright, write_mixed
from PIL import Image
from torch.utils.data import DataLoader

import loaderkit
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit.cli import main

PAGES = {
    "photos.yaml": "docs/recipes.md",
    "leaves.yaml": "docs/recipes.md",
    "hf.yaml": "docs/jobs/from-hugging-face.md",
    "segmentation.yaml": "docs/jobs/segmentation.md",
    "coco.py": "docs/jobs/detection.md",
    "coco.yaml": "docs/jobs/detection.md",
    "plain.py": "docs/jobs/from-dataloader.md",
    "kept.yaml": "docs/jobs/from-dataloader.md",
    "replaced.yaml": "docs/jobs/from-dataloader.md",
}
NUM_PHOTOS = 480


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def files(folder: Path, rng: random.Random) -> list[Path]:
    """Photographs in mixed formats, by the order of their keys."""
    return sorted(write_mixed(folder / "data" / "photos", NUM_PHOTOS, rng.randrange(2**32)).glob("*/*"))


def recipe(folder: Path, name: str) -> Path:
    """The recipe, written beside the data."""
    text = named(PAGES[name], name)
    assert text.count("\n") <= 12
    (folder / name).write_text(text)
    return folder / name


def assert_trains(path: Path, num_samples: int, size: int) -> None:
    """Two epochs of the recipe: as many images of that size as there are, in another order."""
    with loaderkit.build(path) as loader:
        assert loader.num_samples == num_samples
        epochs = [list(loader) for _ in range(2)]
    keys = [[key for batch in epoch for key in batch["__key__"]] for epoch in epochs]
    assert (
        len({*keys[0]})
        == len(keys[0])
        == len({*keys[1]})
        == len(keys[1])
        > num_samples - epochs[0][0]["image"].shape[0]
    )
    assert keys[0] != keys[1]
    for batch in epochs[0]:
        assert batch["image"].dtype == torch.float32
        assert batch["image"].shape[1:] == (3, size, size)


def decoded(path: Path) -> tuple[list[Any], list[int]]:
    """Images and labels of the recipe as far as its `decode`, in canonical order."""
    pipeline: Any = from_yaml(path.read_text())
    pipeline["stages"] = [*pipeline["stages"][:2], {"batch": {"size": 32, "ragged": {"image": "list"}}}]
    pipeline["order"] = {"shuffle": "none"}
    with loaderkit.build(pipeline) as loader:
        batches = list(loader)
    return [image for batch in batches for image in batch["image"]], [
        label for batch in batches for label in batch["label"]
    ]


def assert_right(path: Path, files: list[Path]) -> None:
    """Every picture is upright and in the colours that Pillow says, with the number of its folder."""
    folders = sorted({file.parent.name for file in files})
    images, labels = decoded(path)
    assert labels == [folders.index(file.parent.name) for file in files]
    for image, file in zip(images, files, strict=True):
        np.testing.assert_array_equal(image, upright(file), err_msg=str(file))


def test_photographs_in_mixed_formats(folder: Path, files: list[Path]) -> None:
    path = recipe(folder, "photos.yaml")
    (files[0].parent / "notes.txt").write_text("no photograph")
    assert_trains(path, NUM_PHOTOS, 64)
    assert_right(path, files)


@pytest.mark.integration
@pytest.mark.parametrize("decode", [True, False])
def test_a_copy_by_hugging_faces_datasets(folder: Path, files: list[Path], decode: bool) -> None:
    datasets: Any = importlib.import_module("datasets")
    labels = [file.parent.name for file in files]
    copy = datasets.Dataset.from_dict({"image": [str(file) for file in files], "label": labels})
    copy = copy.class_encode_column("label").cast_column("image", datasets.Image(decode=decode))
    copy.save_to_disk(folder / "data" / "photos-hf")
    path = recipe(folder, "hf.yaml")
    assert_trains(path, NUM_PHOTOS, 64)
    assert_right(path, files)


def test_masks_in_a_second_folder(folder: Path, rng: random.Random) -> None:
    for name in ("images", "masks"):
        (folder / "data" / "segmentation" / name).mkdir(parents=True)
    for number in range(NUM_PHOTOS):
        classes = np.kron(
            np.array([[rng.randrange(8) for _ in range(3)] for _ in range(2)], np.uint8), np.ones((20, 20), np.uint8)
        )
        Image.fromarray(30 * classes).save(folder / "data" / "segmentation" / "images" / f"{number:03}.jpg", quality=95)
        Image.fromarray(classes).save(folder / "data" / "segmentation" / "masks" / f"{number:03}.png")
    path = recipe(folder, "segmentation.yaml")
    assert_trains(path, NUM_PHOTOS, 32)
    pipeline: Any = from_yaml(path.read_text())
    pipeline["stages"] = pipeline["stages"][:-1]  # as levels, without `normalize`
    with loaderkit.build(pipeline) as loader:
        for batch in loader:
            shown = (batch["image"].float().mean(1, keepdim=True) / 30).round()
            assert (shown == batch["mask"]).float().mean() > 0.8, "all but the edges between two classes"


def test_boxes_as_coco_has_them(folder: Path, rng: random.Random) -> None:
    """A white square in each black photograph, with its box: what is left of one is where the other is."""
    for name in ("train2017", "annotations"):
        (folder / "data" / "coco" / name).mkdir(parents=True)
    found: dict[str, Any] = {"categories": [{"id": 7}, {"id": 9}], "images": [], "annotations": []}
    for number in range(NUM_PHOTOS):
        name, pixels = f"{number:012}.jpg", np.zeros((90, 120, 3), np.uint8)
        found["images"].append({"id": 3 * number, "file_name": name})
        if number % 3:  # the others show nothing
            left, top, size = rng.randrange(80), rng.randrange(50), rng.randrange(20, 40)
            pixels[top : top + size, left : left + size] = 255
            box = {"image_id": 3 * number, "category_id": 7 + 2 * (number % 2), "bbox": [left, top, size, size]}
            found["annotations"].append({**box, "iscrowd": 0})
        Image.fromarray(pixels).save(folder / "data" / "coco" / "train2017" / name, quality=95)
    for category in found["categories"]:
        category["name"] = str(category["id"])
    (folder / "data" / "coco" / "annotations" / "instances_train2017.json").write_text(json.dumps(found))
    (folder / "coco.py").write_text(named(PAGES["coco.py"], "coco.py"))
    path = recipe(folder, "coco.yaml")
    assert_trains(path, NUM_PHOTOS, 64)
    pipeline: Any = from_yaml(path.read_text())
    pipeline["stages"] = pipeline["stages"][:-2]  # as levels, without `normalize` and `transfer`
    num_boxes = 0
    with loaderkit.build(pipeline) as loader:
        assert loader.classes == ["7", "9"]
        for batch in loader:
            assert batch["image_id"].tolist() == [3 * int(key) for key in batch["__key__"]]
            for key, image, boxes, labels in zip(
                *(batch[name] for name in ("__key__", "image", "boxes", "labels")), strict=True
            ):
                assert labels.tolist() == [int(key) % 2] * len(boxes)
                expected = torch.zeros(64, 64)
                for left, top, right, bottom in boxes.round().int().tolist():
                    expected[top:bottom, left:right] = 255
                assert (image.float().mean(0) - expected).abs().mean() < 25, (
                    "but for edges, and less than 2 pixels of a square"
                )
                num_boxes += len(boxes)
    assert num_boxes > NUM_PHOTOS / 3


class TestAScriptWithADataLoader:
    @pytest.fixture(autouse=True)
    def _script(self, folder: Path, photos: Path) -> None:
        (folder / "data").mkdir()
        for name in ("train", "val"):
            (folder / "data" / name).symlink_to(photos)
        (folder / "plain.py").write_text(named(PAGES["plain.py"], "plain.py"))
        sys.modules.pop("plain", None)  # another test's

    def test_it_runs(self, folder: Path) -> None:
        text = named(PAGES["plain.py"], "plain.py")
        assert 50 <= text.count("\n") <= 65
        ran = subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True, capture_output=True, text=True)
        assert ran.stdout.count("right") == 2

    def test_its_data_set_kept(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = recipe(folder, "kept.yaml")
        assert main(["check", str(path)]) == 0
        assert "read draws from global generators (random)" in capsys.readouterr().out
        plain: Any = importlib.import_module("plain")
        expected: Any = DataLoader(plain.Photos("data/train", augment=False), batch_size=16, drop_last=True)
        overrides = {"source.args.augment": False, "order.shuffle": "none"}
        with loaderkit.build(path) as train, loaderkit.build(path, overrides=overrides) as same:
            assert train.num_samples == len(expected.dataset)
            assert sum(len(labels) for _, labels in train) == 48
            for (images, labels), (images_before, labels_before) in zip(same, expected, strict=True):
                assert torch.equal(images, images_before)
                assert torch.equal(labels, labels_before)

    def test_its_data_set_replaced(self, folder: Path) -> None:
        path = recipe(folder, "replaced.yaml")
        with loaderkit.build(path) as loader, loaderkit.build(path) as again:
            assert loader.num_samples == 60
            for (images, labels), (same_images, _) in zip(loader, again, strict=True):
                assert images.shape == (16, 3, 64, 64)
                assert images.dtype == torch.float32
                assert {*labels.tolist()} <= {0, 1, 2}
                assert torch.equal(images, same_images), "drawn from the sample's own numbers"


def test_labels_in_a_table_and_rare_classes(folder: Path) -> None:
    (folder / "data" / "leaves").mkdir(parents=True)
    for number in range(40):
        Image.new("RGB", (60, 40), (6 * number, 0, 0)).save(folder / "data" / "leaves" / f"{number:03}.jpg")
    rows = "".join(f"{number:03},{'oak' if number % 10 else 'yew'}\n" for number in range(40))
    (folder / "data" / "leaves" / "train.csv").write_text(f"id,species\n{rows}")
    with loaderkit.build(recipe(folder, "leaves.yaml")) as loader:
        assert loader.classes == ["oak", "yew"]
        batches = [batch for _ in range(10) for batch in loader]
    labels = torch.cat([batch["label"] for batch in batches])
    keys = [key for batch in batches for key in batch["__key__"]]
    assert labels.tolist() == [int(int(key.removesuffix(".jpg")) % 10 == 0) for key in keys]
    assert len(labels) == 400
    assert 140 < labels.sum() < 260  # 200 within six standard deviations
