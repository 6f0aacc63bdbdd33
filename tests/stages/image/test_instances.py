"""Masks of instances follow their image and their boxes: against single masks, NumPy, Pillow and torchvision."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import EXECUTORS
from numpy.typing import NDArray
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError
from loaderkit.stages.image.arrays import instances_of

Array = NDArray[Any]
Stages = Callable[[Pipeline], Pipeline]
MOST = 4


@pytest.fixture
def rng(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(64))


def jpeg(pixels: Array) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def scene(rng: np.random.Generator, num: int, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """A JPEG with `num` filled rectangles, their boxes, and the masks also one by one, as masks of class numbers."""
    height, width = size or (int(side) for side in rng.integers(50, 110, 2))
    masks, boxes = np.zeros((num, height, width), np.uint8), np.zeros((num, 4))
    for number in range(num):
        left, top = int(rng.integers(0, width - 6)), int(rng.integers(0, height - 6))
        right, bottom = int(rng.integers(left + 3, width + 1)), int(rng.integers(top + 3, height + 1))
        masks[number, top:bottom, left:right] = 1
        boxes[number] = left, top, right, bottom
    single = {f"mask{n}": masks[n] if n < num else np.zeros((height, width), np.uint8) for n in range(MOST)}
    picture = jpeg(rng.integers(0, 256, (height, width, 3), np.uint8))
    return {"image": picture, "masks": masks, "boxes": boxes, "labels": np.arange(num), **single}


def delivered(rows: Any, stages: Stages, **options: Any) -> list[dict[str, Any]]:
    singles = [f"mask{n}" for n in range(MOST)]
    decoded = (
        Pipeline.dataset(rows)
        .shuffle(False)
        .epochs(1)
        .read()
        .decode(boxes={"boxes": "xyxy"}, instance_masks=["masks"], masks=singles)
    )
    fields = ["image", "masks", "boxes", "labels", *singles]
    pipeline = stages(decoded).batch(3, ragged=dict.fromkeys(fields, "list"), drop_last=False)
    found = []
    with loaderkit.build(pipeline, overrides=EXECUTORS["inline"] | options) as loader:
        for batch in loader:
            found += [{name: batch[name][row].numpy() for name in fields} for row in range(len(batch["__key__"]))]
    return found


CASES: dict[str, tuple[Stages, bool]] = {
    "resize": (lambda stages: stages.resize([37, 121]), False),
    "resize, smaller": (lambda stages: stages.resize(23), False),
    "center_crop": (lambda stages: stages.center_crop([41, 160]), True),
    "random_crop": (lambda stages: stages.random_crop([40, 41]), True),
    "random_crop with another fill": (
        lambda stages: stages.random_crop([99, 51], padding=9, pad_if_needed=True, fill=1),
        True,
    ),
    "random_resized_crop": (lambda stages: stages.random_resized_crop([64, 90]), False),
    "random_horizontal_flip": (lambda stages: stages.random_horizontal_flip(), True),
    "random_vertical_flip": (lambda stages: stages.random_vertical_flip(), True),
    "random_rotation": (lambda stages: stages.random_rotation(180, expand=True), False),
    "several": (
        lambda stages: (
            stages.random_crop([48, 46])
            .color_jitter(0.5)
            .random_horizontal_flip()
            .resize([96, 92])
            .random_vertical_flip()
            .center_crop([80, 90])
        ),
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_is_moved_as_a_mask_alone(case: str, rng: np.random.Generator) -> None:
    stages, is_exact = CASES[case]
    for found in delivered([scene(rng, num) for num in (3, 1, MOST, 0)], stages):
        height, width = found["image"].shape[1:]
        assert found["masks"].shape == (len(found["boxes"]), height, width)
        assert found["masks"].dtype == np.bool_
        for number, (mask, box) in enumerate(zip(found["masks"], found["boxes"], strict=True)):
            alone = found[f"mask{number}"][0]
            if "fill" not in case:  # which class numbers take, too
                np.testing.assert_array_equal(mask, alone == 1)
            rows, columns = np.nonzero(mask)
            if is_exact and rows.size:  # of nothing that was padded is anything set
                np.testing.assert_array_equal(
                    [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], box, err_msg=case
                )


def test_resizing_and_turning_equal_pillow(rng: np.random.Generator) -> None:
    rows = [scene(rng, num) for num in (3, 2)]
    resized = delivered(rows, lambda stages: stages.resize([33, 71]))
    turned = delivered(rows, lambda stages: stages.random_rotation([30, 30]))
    for row, small, rotated in zip(rows, resized, turned, strict=True):
        for number, mask in enumerate(row["masks"]):
            picture = Pillow.fromarray(mask)
            nearest = np.asarray(picture.resize((71, 33), Pillow.Resampling.NEAREST))
            np.testing.assert_array_equal(small["masks"][number], nearest == 1)
            np.testing.assert_array_equal(rotated["masks"][number], np.asarray(picture.rotate(30)) == 1)


@pytest.mark.integration
def test_crops_and_flips_equal_torchvision(rng: np.random.Generator) -> None:
    from torchvision_transforms import tv_tensors, v2

    rows = [scene(rng, num) for num in (3, 1, 0)]
    cut = delivered(rows, lambda stages: stages.center_crop([44, 160]).random_horizontal_flip(p=1))
    for row, found in zip(rows, cut, strict=True):
        size = row["masks"].shape[1:]
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(row["boxes"]), format="XYXY", canvas_size=size)
        masks = tv_tensors.Mask(torch.from_numpy(row["masks"]))
        steps = [v2.CenterCrop([44, 160]), v2.RandomHorizontalFlip(1.0), v2.ClampBoundingBoxes()]
        image = tv_tensors.Image(torch.zeros(3, *size, dtype=torch.uint8))
        labels = torch.arange(len(boxes))
        theirs = v2.Compose([*steps, v2.SanitizeBoundingBoxes(min_size=1)])(
            {"image": image, "boxes": boxes, "masks": masks, "labels": labels}
        )
        is_left = (found["boxes"][:, 2:] - found["boxes"][:, :2] >= 1).all(1)
        np.testing.assert_array_equal(found["masks"][is_left], theirs["masks"].numpy() == 1)
        np.testing.assert_allclose(found["boxes"][is_left], theirs["boxes"].numpy())


def test_kept_rows_are_those_of_kept_boxes(rng: np.random.Generator) -> None:
    rows = [scene(rng, num, (60, 90)) for num in (4, 3, 0, 4, 2)]

    def stages(begun: Pipeline) -> Pipeline:
        return begun.random_crop([30, 40]).sanitize_boxes(["labels"], min_size=2)

    dropped = 0
    for row, found in zip(rows, delivered(rows, stages), strict=True):
        assert len(found["masks"]) == len(found["boxes"]) == len(found["labels"])
        dropped += len(row["boxes"]) - len(found["boxes"])
        for mask, box, label in zip(found["masks"], found["boxes"], found["labels"], strict=True):
            np.testing.assert_array_equal(mask, found[f"mask{label}"][0] == 1)
            left, top, right, bottom = box.astype(int)
            assert mask.sum() == (right - left) * (bottom - top)
    assert dropped


class Scenes:
    """Made where they are asked for, with the same numbers everywhere."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = scene(np.random.default_rng(number), number % (MOST + 1))
        return {name: row[name] for name in ("image", "masks", "boxes", "labels")}


def test_the_same_with_every_executor_and_resumed() -> None:
    decoded = Pipeline.dataset(Scenes()).shuffle(seed=3).epochs(2).read()
    begun = decoded.decode(boxes={"boxes": "xyxy"}, instance_masks=["masks"]).random_resized_crop([30, 40])
    names = ["masks", "boxes", "labels"]
    pipeline = begun.random_horizontal_flip().sanitize_boxes(["labels"]).batch(2, ragged=dict.fromkeys(names, "list"))
    expected: list[Any] = []
    for name in ("inline", "thread", "process"):
        overrides = EXECUTORS[name]
        found: list[Any] = []
        state: dict[str, Any] = {}
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            for batch in loader:
                found.append([*batch["masks"], *batch["boxes"]])
                state = loader.state_dict() if len(found) == 2 else state
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            loader.load_state_dict(state)
            resumed = [[*batch["masks"], *batch["boxes"]] for batch in loader]
        expected = expected or found
        for one, other in zip(found + resumed, expected + expected[2:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), name


def test_of_files(tmp_path: Path, rng: np.random.Generator) -> None:
    """A stack in a .npy, one number for each instance in a PNG, and both in an .npz."""
    fields = {name: f"{name}/*" for name in ("image", "masks", "ids", "more")}
    for name in fields:
        (tmp_path / name).mkdir()
    for number in range(3):
        row = scene(rng, number + 1, (50, 60))
        numbers = np.zeros((50, 60), np.uint8)
        numbers[5:20, 5:30], numbers[25:40, 10:50] = 7, 2
        (tmp_path / f"image/{number}.jpg").write_bytes(row["image"])
        np.save(tmp_path / f"masks/{number}.npy", row["masks"] * 255)
        Pillow.fromarray(numbers).save(tmp_path / f"ids/{number}.png")
        np.savez(tmp_path / f"more/{number}.npz", stack=row["masks"].astype(bool), numbers=numbers.astype(np.int32))
    names = ["masks", "ids", "stack", "numbers"]
    begun = Pipeline.files(tmp_path, fields=fields).shuffle(False).epochs(1).read().decode(instance_masks=names)
    pipeline = begun.center_crop([40, 40]).batch(3, ragged=dict.fromkeys(names, "list"))
    with loaderkit.build(pipeline, overrides=EXECUTORS["inline"]) as loader:
        (batch,) = loader
    for number in range(3):
        masks = np.load(tmp_path / f"masks/{number}.npy")[:, 5:45, 10:50] == 255
        np.testing.assert_array_equal(batch["masks"][number], masks)
        np.testing.assert_array_equal(batch["stack"][number], masks)
        ids = np.asarray(Pillow.open(tmp_path / f"ids/{number}.png"))[5:45, 10:50]
        for name in ("ids", "numbers"):  # in ascending order
            np.testing.assert_array_equal(batch[name][number], ids == np.array([2, 7])[:, None, None])


def test_a_call_may_make_them(rng: np.random.Generator) -> None:
    """And images that it left as tensors go with them, also where there are three, as channels."""

    def make(sample: dict[str, Any]) -> dict[str, Any]:
        masks = (sample["image"][0] > torch.tensor([50, 100, 150])[:, None, None]).byte()
        return {"masks": masks, "image": sample["image"]}

    rows = [{"image": jpeg(rng.integers(0, 256, (40, 60, 3), np.uint8))} for _ in range(3)]
    begun = Pipeline.dataset(rows).shuffle(False).epochs(1).read().decode(instance_masks=["masks"]).call(make)
    pipeline = begun.random_crop([20, 30]).random_horizontal_flip().batch(3)
    with loaderkit.build(pipeline, overrides=EXECUTORS["inline"]) as loader:
        (batch,) = loader
    limits = torch.tensor([50, 100, 150])[:, None, None]
    assert torch.equal(batch["masks"], batch["image"][:, :1] > limits)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 30, 30), np.uint8), "are 30 x 30, and its image 60 x 50"),
        (np.full((1, 50, 60), 3, np.uint8), "other numbers than 0 and 1, or 0 and 255"),
        (np.zeros((2, 50, 60), np.float32), "array float32 .* not masks of instances"),
        (np.zeros((2, 2, 50, 60), bool), "not masks of instances"),
        ("mask.png", "text, not masks of instances"),
    ],
)
def test_wrong_masks(value: Any, message: str, rng: np.random.Generator) -> None:
    row = {**scene(rng, 2, (50, 60)), "masks": value}
    with pytest.raises(StageError, match=message):
        delivered([row], lambda stages: stages.center_crop(20))


def test_as_many_masks_as_boxes(rng: np.random.Generator) -> None:
    row = scene(rng, 2, (50, 60))
    with pytest.raises(StageError, match=r"'masks' has 1 entries for 2 boxes: `instance_masks` names it"):
        delivered([{**row, "masks": row["masks"][:1]}], lambda stages: stages.sanitize_boxes([]))
    with pytest.raises(StageError, match=r"no field 'masks', which `decode` names as masks of instances"):
        delivered([{name: row[name] for name in row if name != "masks"}], lambda stages: stages.resize(20))


def test_a_field_is_one_thing() -> None:
    with pytest.raises(ConfigError, match="named more than once in `masks`, `boxes`, `keypoints` and `instance_masks`"):
        Pipeline.dataset([{}]).read().decode(masks=["m"], instance_masks=["m"]).batch(1).config  # noqa: B018


def test_lists_of_masks() -> None:
    assert instances_of([]).shape == (0, 0, 0)
    masks = [torch.eye(3, dtype=torch.uint8), torch.zeros(3, 3, dtype=torch.uint8)]
    assert torch.equal(instances_of(masks), torch.stack(masks).bool())
    with pytest.raises(ValueError, match="not masks of instances"):
        instances_of([torch.zeros(3, 3), torch.zeros(3, 4)])


def test_no_mask_is_made_for_each_pixel() -> None:
    """A depth map, say, that was named by mistake, is no 100,000 masks."""
    with pytest.raises(ValueError, match="of 100000 different numbers, whose masks would be more than 4 GiB"):
        instances_of(np.arange(100_000, dtype=np.int32).reshape(250, 400))
