"""Boxes and keypoints follow their image: against geometry in plain NumPy, and against masks drawn where they are."""

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
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.stages.image.ops import MOVES_PIXELS

Array = NDArray[Any]
Stages = Callable[[Pipeline], Pipeline]
FORMATS = ["xyxy", "xywh", "cxcywh"]
FIELDS = ("image", "mask", "spot", "boxes", "keypoints")


@pytest.fixture
def rng(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(64))


def converted(corners: Array, box_format: str) -> Array:
    """Boxes of corners in another format."""
    left, top, right, bottom = np.asarray(corners, float).reshape(-1, 4).T
    if box_format == "xywh":
        return np.stack([left, top, right - left, bottom - top], 1)
    if box_format == "cxcywh":
        return np.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], 1)
    return np.stack([left, top, right, bottom], 1)


def encoded(pixels: Array, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def row(rng: np.random.Generator, box_format: str = "xyxy", *, central: bool = False) -> dict[str, Any]:
    """A JPEG with a box and a keypoint, and masks of both: a filled rectangle, and 5 x 5 pixels about the keypoint."""
    height, width = (int(side) for side in rng.integers(60, 140, 2))
    low, high = (0.4, 0.6) if central else (0.0, 1.0)
    left, top = (int(rng.integers(int(low * side), int(high * side) - 4)) for side in (width, height))
    right, bottom = (
        int(rng.integers(first + 4, int(high * side) + 1)) for first, side in ((left, width), (top, height))
    )
    x, y = int(rng.integers(2, width - 2)), int(rng.integers(2, height - 2))
    mask, spot = np.zeros((2, 1, height, width), np.uint8)
    mask[0, top:bottom, left:right] = 255
    spot[0, y - 2 : y + 3, x - 2 : x + 3] = 255
    return {
        "image": encoded(rng.integers(0, 256, (height, width, 3), np.uint8)),
        "mask": torch.from_numpy(mask),
        "spot": torch.from_numpy(spot),
        "boxes": converted(np.array([left, top, right, bottom]), box_format),
        "keypoints": [[x, y]],
    }


def delivered(
    rows: list[dict[str, Any]], stages: Stages, box_format: str = "xyxy", **options: Any
) -> list[dict[str, Any]]:
    """The samples behind the stages, unbatched."""
    begun = Pipeline.dataset(rows).shuffle(False).epochs(1).read()
    boxes: dict[str, Any] = {"boxes": {"boxes": box_format}}
    decoded = begun.decode(masks=["mask", "spot"], keypoints=["keypoints"], **options, **boxes)
    pipeline = stages(decoded).batch(len(rows), ragged=dict.fromkeys(FIELDS, "list")).prefetch(executor="inline")
    with loaderkit.build(pipeline) as loader:
        (batch,) = loader
    return [{name: batch[name][number].numpy() for name in FIELDS} for number in range(len(rows))]


def extent(mask: Array) -> Array:
    """The corners of what is set in a mask [1, H, W]; a box without area if there is nothing."""
    rows, columns = np.nonzero(mask[0])
    if not rows.size:
        return np.zeros(4)
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


# What `exact` marks moves pixels without resampling them.
CASES: dict[str, tuple[Stages, bool]] = {
    "resize": (lambda stages: stages.resize([37, 171]), False),
    "resize of the shorter edge": (lambda stages: stages.resize(40), False),
    "center_crop": (lambda stages: stages.center_crop([41, 50]), True),
    "center_crop of a smaller image": (lambda stages: stages.center_crop([150, 51]), True),
    "random_crop": (lambda stages: stages.random_crop([40, 51]), True),
    "random_crop of a padded image": (lambda stages: stages.random_crop([99, 51], padding=9, pad_if_needed=True), True),
    "random_resized_crop": (lambda stages: stages.random_resized_crop([64, 90]), False),
    "random_resized_crop, enlarged": (lambda stages: stages.random_resized_crop(200, scale=(0.3, 0.5)), False),
    "random_horizontal_flip": (lambda stages: stages.random_horizontal_flip(), True),
    "random_vertical_flip": (lambda stages: stages.random_vertical_flip(), True),
    "random_rotation": (lambda stages: stages.random_rotation(180, expand=True), False),
    "several": (
        lambda stages: (
            stages.random_crop([58, 56], name="first")
            .color_jitter(0.5)
            .random_horizontal_flip()
            .resize([116, 112])
            .random_vertical_flip()
            .gaussian_blur(3)
            .center_crop([100, 90])
        ),
        False,
    ),
}


@pytest.mark.parametrize("box_format", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_boxes_and_keypoints_are_where_their_masks_are(case: str, box_format: str, rng: np.random.Generator) -> None:
    stages, is_exact = CASES[case]
    rows = [row(rng, box_format) for _ in range(6)]
    for sample in delivered(rows, stages, box_format):
        assert sample["boxes"].dtype == sample["keypoints"].dtype == np.float32
        height, width = sample["image"].shape[1:]
        boxes = sample["boxes"].astype(float)
        if box_format != "xyxy":
            first = boxes[:, :2] - (boxes[:, 2:] / 2 if box_format == "cxcywh" else 0)
            boxes = np.concatenate([first, first + boxes[:, 2:]], 1)
        (corners,) = boxes
        expected = extent(sample["mask"])
        if expected.any():
            assert np.abs(corners - expected).max() <= (1e-3 if is_exact else 1), (corners, expected)
        else:  # nothing is left of it
            assert min(corners[2:] - corners[:2]) <= (1e-3 if is_exact else 1)
        assert corners.min() >= -1e-3
        assert (corners[[0, 2]] <= width + 1e-3).all()
        assert (corners[[1, 3]] <= height + 1e-3).all()
        ((x, y),) = sample["keypoints"]
        left, top, right, bottom = extent(sample["spot"])
        if 0 < left < right < width and 0 < top < bottom < height:  # all of it is seen
            assert abs(x - (left + right - 1) / 2) <= (1e-3 if is_exact else 1)
            assert abs(y - (top + bottom - 1) / 2) <= (1e-3 if is_exact else 1)
        elif not right:
            assert not (3 < x < width - 4 and 3 < y < height - 4)


def test_rotation_within_the_image(rng: np.random.Generator) -> None:
    for sample in delivered([row(rng, central=True) for _ in range(8)], lambda stages: stages.random_rotation(180)):
        assert np.abs(sample["boxes"][0] - extent(sample["mask"])).max() <= 1


@pytest.mark.parametrize("size", [24, [20, 30]])
def test_images_decoded_smaller(size: Any, rng: np.random.Generator) -> None:
    rows = [row(rng) for _ in range(6)]
    for stages in (lambda s: s.resize(size), lambda s: s.random_resized_crop(size, scale=(0.8, 1.0))):
        plain, scaled = delivered(rows, stages), delivered(rows, stages, scaled=True)
        for one, other in zip(plain, scaled, strict=True):
            assert np.array_equal(one["boxes"], other["boxes"])
            assert np.array_equal(one["keypoints"], other["keypoints"])


def test_every_stage_that_acts_on_images_is_known_to_move_pixels_or_not() -> None:
    kinds = {name: kind for name, kind in STAGES.items() if kind.needs_images and kind.scope == "sample"}
    for name in ("color_jitter", "random_grayscale", "gaussian_blur", "random_erasing"):
        del kinds[name]
    args = {name: {"size": 8} if "size" in kind.args.model_fields else {} for name, kind in kinds.items()}
    args["random_rotation"] = {"degrees": 5}
    for name, kind in kinds.items():
        assert kind.ops is not None, name
        assert not MOVES_PIXELS.isdisjoint(kind.ops(kind.args.model_validate(args[name])).kinds)
        assert name in CASES


# ------------------------------------------------------------------------------------------- plain geometry, to the digit


def rotated(points: Array, degrees: float, height: float, width: float) -> Array:
    """Counter-clockwise about the middle, with y pointing down."""
    turn = np.exp(-1j * np.radians(degrees))
    middle = width / 2 + 1j * height / 2
    moved = (points[..., 0] + 1j * points[..., 1] - middle) * turn + middle
    return np.stack([moved.real, moved.imag], -1)


GEOMETRY: dict[str, tuple[Stages, Callable[[Array, int, int], Array]]] = {
    "mirrored": (lambda s: s.random_horizontal_flip(1), lambda p, h, w: p * [-1, 1] + [w, 0]),
    "upside down": (lambda s: s.random_vertical_flip(1), lambda p, h, w: p * [1, -1] + [0, h]),
    "not mirrored": (lambda s: s.random_horizontal_flip(0).random_vertical_flip(0), lambda p, h, w: p),
    "resized": (lambda s: s.resize([50, 33]), lambda p, h, w: p * [33 / w, 50 / h]),
    "cropped": (lambda s: s.center_crop([38, 40]), lambda p, h, w: p - [(w - 40) / 2, (h - 38) / 2]),
    "rotated": (lambda s: s.random_rotation([31, 31]), lambda p, h, w: rotated(p, 31, h, w)),
    "rotated twice": (
        lambda s: s.random_rotation([90, 90], expand=True).random_rotation([-90, -90], expand=True),
        lambda p, h, w: p,
    ),
}


@pytest.mark.parametrize("case", GEOMETRY)
def test_against_plain_geometry(case: str, rng: np.random.Generator) -> None:
    stages, move = GEOMETRY[case]
    height, width = (2 * int(half) for half in rng.integers(30, 60, 2))
    first = rng.uniform(0, [width, height], (7, 2))
    corners = np.concatenate([first, first + rng.uniform(0, 1, (7, 2)) * ([width, height] - first)], 1)
    keypoints = np.concatenate([rng.uniform(-9, 150, (7, 5, 2)), rng.integers(0, 3, (7, 5, 1))], 2)
    item = row(rng) | {"image": encoded(np.zeros((height, width, 3), np.uint8))}
    item |= {name: torch.zeros(1, height, width, dtype=torch.uint8) for name in ("mask", "spot")}
    (sample,) = delivered([item | {"boxes": corners.astype(np.float32), "keypoints": keypoints}], stages)

    moved = move(corners[:, [[0, 1], [2, 1], [2, 3], [0, 3]]], height, width)
    limits = np.array(sample["image"].shape[:0:-1])
    expected = np.concatenate([moved.min(1).clip(0, limits), moved.max(1).clip(0, limits)], 1)
    assert np.allclose(sample["boxes"], expected, atol=1e-3)
    assert np.allclose(sample["keypoints"][..., :2], move(keypoints[..., :2] + 0.5, height, width) - 0.5, atol=1e-3)
    assert np.array_equal(sample["keypoints"][..., 2], keypoints[..., 2])


# ------------------------------------------------------------------------------------------------- batches and executors


class Scenes:
    """Photographs of one size with 0 to 4 boxes, as lists, arrays or tensors of whole numbers or fractions."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        first, size = rng.integers(0, 30, (index % 5, 2)), rng.integers(1, 20, (index % 5, 2))
        boxes = np.concatenate([first, size], 1)
        kinds: list[Callable[[Array], Any]] = [np.ndarray.tolist, np.float32, torch.from_numpy, np.float64]
        return {
            "image": encoded(rng.integers(0, 256, (50, 60, 3), np.uint8)),
            "boxes": kinds[index % 4](boxes),
            "labels": torch.arange(index % 5),
        }


def scenes(**ragged: Any) -> Pipeline:
    decoded = Pipeline.dataset(Scenes()).shuffle(seed=3).epochs(2).read().decode(boxes={"boxes": "xywh"})
    moved = decoded.random_resized_crop(32).random_horizontal_flip().sanitize_boxes(["labels"])
    return moved.batch(4, ragged=ragged, pad_value=-1).normalize()


def test_the_same_boxes_with_every_executor() -> None:
    pipeline = scenes(boxes="list", labels="list")
    found = []
    for executor in ("inline", "thread", "process"):
        with loaderkit.build(pipeline, overrides=EXECUTORS[executor]) as loader:
            found.append([(batch["__key__"], batch["boxes"], batch["labels"]) for batch in loader])
    for batches in found:
        for (keys, boxes, labels), (first_keys, first_boxes, first_labels) in zip(batches, found[0], strict=True):
            assert keys == first_keys
            assert all(map(torch.equal, boxes, first_boxes))
            assert all(map(torch.equal, labels, first_labels))
            assert [tensor.shape for tensor in boxes] == [(len(numbers), 4) for numbers in labels]
            assert {tensor.dtype for tensor in boxes} == {torch.float32}


def test_padded_boxes() -> None:
    listed, padded = scenes(boxes="list", labels="pad"), scenes(boxes="pad", labels="pad")
    with loaderkit.build(listed) as lists, loaderkit.build(padded) as pads:
        for batch, other in zip(lists, pads, strict=True):
            for number, boxes in enumerate(batch["boxes"]):
                assert other["boxes_sizes"][number].tolist() == [len(boxes), 4]
                assert torch.equal(other["boxes"][number, : len(boxes)], boxes)
                assert other["boxes"][number, len(boxes) :].eq(-1).all()


def test_without_ragged_the_error_says_what_to_write() -> None:
    with loaderkit.build(scenes()) as loader, pytest.raises(StageError, match=r"set `ragged: \{boxes: list\}`"):
        list(loader)


def test_large_boxes_are_moved_as_well_as_small_ones(tmp_path: Path, rng: np.random.Generator) -> None:
    """Large arrays that no stage touches are read straight into the batch."""
    corners = np.sort(rng.uniform(0, 40, (30_000, 2, 2)), 1).reshape(-1, 4).astype(np.float32)
    for folder in ("images", "boxes"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(encoded(np.zeros((40, 40, 3), np.uint8)))
        np.save(tmp_path / "boxes" / f"{number}.npy", corners)
    source = Pipeline.files(str(tmp_path), fields={"image": "images/*.jpg", "boxes": "boxes/*.npy"}).epochs(1)
    for fields in (None, ["image"]):
        decoded = source.read().decode(fields=fields, boxes={"boxes": "xyxy"})
        with loaderkit.build(decoded.resize([20, 80], fields=["image"]).batch(3)) as loader:
            (batch,) = loader
        assert np.allclose(batch["boxes"], corners * [2, 0.5, 2, 0.5], atol=1e-4)


# ------------------------------------------------------------------------------------------------------- sanitize_boxes


def sanitized(fields: dict[str, Any], labels: list[str], **args: Any) -> dict[str, Any]:
    item = {"image": encoded(np.zeros((40, 60, 3), np.uint8)), **fields}
    begun = Pipeline.dataset([item]).epochs(1).read().decode(boxes={"boxes": "xyxy"}, keypoints=["keypoints"])
    stages = begun.sanitize_boxes(labels, **args).batch(1, ragged=dict.fromkeys(fields.keys() - {"names"}, "list"))
    with loaderkit.build(stages.prefetch(executor="inline")) as loader:
        (batch,) = loader
    return {name: batch[name][0] for name in fields}


def test_sanitize_boxes_drops_small_ones_with_their_labels(rng: np.random.Generator) -> None:
    corners = rng.uniform(-20, 70, (40, 2, 2))
    corners.sort(1)
    fields: dict[str, Any] = {
        "boxes": corners.reshape(-1, 4),
        "labels": torch.arange(40),
        "scores": np.arange(40.0),
        "names": [f"box {number}" for number in range(40)],
        "keypoints": rng.uniform(0, 30, (40, 3, 3)),
    }
    for least, area in ((1.0, 1.0), (5.0, 1.0), (1.0, 200.0)):
        found = sanitized(fields, ["labels", "scores", "names", "keypoints"], min_size=least, min_area=area)
        expected = []
        for number, ((left, top), (right, bottom)) in enumerate(corners.clip(0, [60, 40])):
            if right - left >= least and bottom - top >= least and (right - left) * (bottom - top) >= area:
                expected.append(number)
        assert 0 < len(expected) < 40
        assert found["labels"].tolist() == found["scores"].tolist() == expected
        assert found["names"] == [f"box {number}" for number in expected]
        assert np.allclose(found["keypoints"], fields["keypoints"][expected], atol=1e-4)
        assert np.allclose(found["boxes"], corners.clip(0, [60, 40]).reshape(-1, 4)[expected], atol=1e-4)


def test_sanitize_boxes_may_leave_none() -> None:
    fields = {"boxes": [[70, 0, 80, 9]], "labels": torch.tensor([3]), "keypoints": torch.zeros(1, 2)}
    found = sanitized(fields, ["labels"])
    assert found["boxes"].shape == (0, 4)
    assert found["labels"].shape == (0,)


# ------------------------------------------------------------------------------------------------------------- mistakes


GOOD: dict[str, Any] = {"boxes": [[1, 2, 3, 4]], "labels": torch.tensor([3]), "keypoints": [[1, 2]]}


@pytest.mark.parametrize(
    ("wrong", "labels", "message"),
    [
        (
            {"boxes": [[5, 6, 3, 4]]},
            [],
            r"box 0 of its field 'boxes' is \[5.0, 6.0, 3.0, 4.0\], which as xyxy is no box",
        ),
        ({"boxes": [[1, 2, 3, 4], [1, 2, np.nan, 4]]}, [], "box 1 of its field 'boxes'"),
        ({"boxes": [1, 2, 3, 4]}, [], r"its field 'boxes' is list, not boxes \[N, 4\] \(xyxy\)"),
        ({"boxes": np.zeros((2, 5))}, [], r"is array float64 \[2, 5\], not boxes"),
        ({"boxes": [["a", "b", "c", "d"]]}, [], "its field 'boxes' is list, not boxes"),
        ({"keypoints": np.zeros((4, 3))}, [], r"is array float64 \[4, 3\], not keypoints \[N, 2\]"),
        ({}, ["lables"], "it has no field 'lables', which `labels` names, only image, boxes, labels, keypoints"),
        ({"labels": torch.arange(2)}, ["labels"], "its field 'labels' has 2 entries for 1 boxes"),
        ({"labels": 3}, ["labels"], "its field 'labels' is int, which has no entries for boxes"),
    ],
)
def test_wrong_annotations(wrong: dict[str, Any], labels: list[str], message: str) -> None:
    with pytest.raises(StageError, match=message):
        sanitized(GOOD | wrong, labels)


def test_boxes_of_several_images_are_refused(rng: np.random.Generator) -> None:
    item = {name: encoded(np.zeros((40, side, 3), np.uint8)) for name, side in (("left", 60), ("right", 50))}
    begun = Pipeline.dataset([item | {"boxes": [[1, 2, 3, 4]]}]).epochs(1).read().decode(boxes={"boxes": "xyxy"})
    for stages in (begun.resize(8), begun.resize([8, 8], fields=["left"])):
        with loaderkit.build(stages.batch(1)) as loader, pytest.raises(StageError, match="belong to one"):
            list(loader)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int16])
def test_boxes_in_tensors_of_any_type(dtype: torch.dtype) -> None:
    given = torch.tensor([[1, 2, 3, 4]]).to(dtype).requires_grad_(dtype.is_floating_point)
    found = sanitized(GOOD | {"boxes": given, "keypoints": given[:, :2]}, ["labels"])
    assert found["boxes"].tolist() == [[1, 2, 3, 4]]
    assert found["keypoints"].tolist() == [[1, 2]]
    assert found["boxes"].dtype == found["keypoints"].dtype == torch.float32
    assert not found["boxes"].requires_grad


def to_float(sample: dict[str, Any]) -> None:
    sample["image"] = sample["image"] / 255


def test_boxes_of_a_float_image_are_refused_unless_a_mask_shows_where_they_lie() -> None:
    """Above all a table of uint8 is no image that they are clipped to."""
    item: dict[str, Any] = {"image": encoded(np.zeros((40, 60, 3), np.uint8)), "boxes": [[50, 30, 80, 90]]}
    table, mask = {"table": torch.zeros(1, 20, dtype=torch.uint8)}, {"mask": np.zeros((1, 40, 60), np.uint8)}
    begun = Pipeline.dataset([item | table]).read().decode(fields=["image"], boxes={"boxes": "xyxy"})
    floats = begun.call(to_float)
    without = Pipeline.dataset([item]).read().decode(boxes={"boxes": "xyxy"}).call(to_float)
    for stages in (floats.sanitize_boxes([]), without.sanitize_boxes([]), floats.resize([20, 30])):
        with (
            loaderkit.build(stages.batch(1).prefetch(executor="inline")) as loader,
            pytest.raises(StageError, match="before a `call` that makes them float"),
        ):
            next(iter(loader))
    masked = Pipeline.dataset([item | mask]).read().decode(boxes={"boxes": "xyxy"}, masks=["mask"]).call(to_float)
    for stages in (begun, masked):
        with loaderkit.build(stages.sanitize_boxes([]).batch(1).prefetch(executor="inline")) as loader:
            assert next(iter(loader))["boxes"].tolist() == [[[50, 30, 60, 40]]]


EMPTY_BOXES: list[Any] = [[], (), np.zeros(0), np.zeros((0, 4)), torch.zeros(0), torch.zeros(0, 4)]
EMPTY_KEYPOINTS: list[Any] = [
    [],
    np.zeros(0),
    np.zeros((0, 2)),
    torch.zeros(0, 17, 3),
    np.zeros((0, 17, 2)),
    torch.zeros(0),
]


def test_images_without_boxes_or_keypoints() -> None:
    for boxes, keypoints in zip(EMPTY_BOXES, EMPTY_KEYPOINTS, strict=True):
        found = sanitized({"boxes": boxes, "labels": torch.zeros(0), "keypoints": keypoints}, ["labels", "keypoints"])
        assert (found["boxes"].shape, found["labels"].shape) == ((0, 4), (0,))
        assert found["keypoints"].shape == (np.shape(keypoints) if np.ndim(keypoints) > 1 else (0, 2))
        rows = [row(np.random.default_rng(0)) | {"boxes": boxes, "keypoints": keypoints}]
        (sample,) = delivered(rows, lambda stages: stages.random_resized_crop(24).random_horizontal_flip())
        assert (sample["boxes"].shape, sample["keypoints"].shape) == ((0, 4), found["keypoints"].shape)


def unpack(sample: dict[str, Any]) -> None:
    """Boxes out of what a `json` holds."""
    sample["boxes"] = sample.pop("target")["boxes"]


def test_a_call_may_make_the_boxes_and_change_them() -> None:
    item = {"image": encoded(np.zeros((40, 60, 3), np.uint8)), "target": {"boxes": [[0, 0, 30, 10]]}}
    begun = Pipeline.dataset([item]).epochs(1).read().decode(boxes={"boxes": "xyxy"})
    with loaderkit.build(begun.call(unpack).resize([20, 30]).batch(1)) as loader:
        assert next(iter(loader))["boxes"].tolist() == [[[0, 0, 15, 5]]]
    missing = pytest.raises(StageError, match=r"resize failed for sample '0'.* it has no field 'boxes', which `decode`")
    with loaderkit.build(begun.resize([20, 30]).batch(1)) as loader, missing:
        next(iter(loader))


@pytest.mark.parametrize(
    ("decode", "stage", "message"),
    [
        ("{boxes: {boxes: xyxy}, masks: [boxes]}", "resize: {size: 4}", "'boxes' is named more than once"),
        ("{boxes: {boxes: xyhw}}", "resize: {size: 4}", "did you mean 'xywh'?"),
        ("{boxes: [boxes]}", "resize: {size: 4}", "fields with their formats, as in {boxes: xyxy}"),
        ("{boxes: {boxes: xyxy}, device: dali-cpu}", "resize: {size: 4}", "not with `device: dali-cpu`"),
        ("{keypoints: [boxes], device: dali-cpu}", "resize: {size: 4}", "not with `device: dali-cpu`"),
        ("{}", "sanitize_boxes: {labels: []}", "no `decode` before it names boxes"),
        ("{boxes: {a: xyxy, b: xywh}}", "sanitize_boxes: {labels: []}", "several fields of boxes (a, b)"),
        ("{boxes: {a: xyxy}}", "sanitize_boxes: {labels: [], boxes: b}", "the boxes a, not 'b'"),
        ("{boxes: {a: xyxy}}", "sanitize_boxes", "'labels' is missing: fields with one entry for each box"),
    ],
)
def test_wrong_descriptions(decode: str, stage: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    item = "source: {kind: files, url: data}\n"
    path.write_text(f"{item}stages:\n  - read\n  - decode: {decode}\n  - {stage}\n  - batch: {{size: 2}}\n")
    with pytest.raises(ConfigError) as caught:
        loaderkit.build(path)
    assert message in str(caught.value)
