"""Boxes, keypoints and masks of instances. These fields follow their image through each stage that moves its pixels.

`decode` names them. The pixel in column x and row y covers [x, x + 1) x [y, y + 1) of the image's plane, in which boxes lie; a
keypoint names a pixel, whose middle is half a pixel further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator

from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, Image, Pictures
from loaderkit.stages.image.arrays import instances_of
from loaderkit.stages.image.ops import Crop, Flip, ImageOp, ImageOps, Rotate, Scale, VerticalFlip, size_after
from loaderkit.stages.values import describe, image_fields

Coordinates = NDArray[np.float64]
ALONE = "masks of instances"
"""The field in which masks of instances are given to a stage's function."""
Size = tuple[int, int]
"""(height, width)."""

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]


def _with_formats(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"fields with their formats, as in {{boxes: xyxy}} (or xywh, cxcywh), not {value!r}")
    return value


BoxFields = Annotated[Mapping[str, BoxFormat], BeforeValidator(_with_formats)]


@dataclass(frozen=True)
class Annotations:
    """The fields of samples that are boxes, each with its format, the fields that are keypoints, and the fields that
    are masks of instances."""

    boxes: Mapping[str, BoxFormat]
    keypoints: tuple[str, ...]
    instances: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.boxes or self.keypoints or self.instances)

    @cached_property
    def names(self) -> frozenset[str]:
        """All of these fields."""
        return frozenset((*self.boxes, *self.keypoints, *self.instances))

    def convert(self, sample: Sample) -> None:
        """Make tensors, float32 and bool, of the annotations that the sample has. Raises ValueError for a value that is
        no such thing."""
        self.convert_instances(sample)
        for name, box_format in self.boxes.items():
            if name in sample:
                sample[name] = as_boxes(corners_of(sample, name, box_format), box_format)
        for name in self.keypoints:
            if name in sample:
                sample[name] = _as_tensor(_keypoints_of(sample, name))

    def convert_instances(self, sample: Sample) -> None:
        """The same of masks of instances only."""
        for name in self.instances:
            if name in sample:
                try:
                    sample[name] = instances_of(sample[name])
                except ValueError as error:
                    raise ValueError(f"its field {name!r} is {error}") from None

    def move(self, sample: Sample, matrix: Coordinates, size: Size) -> None:
        """Move boxes and keypoints by `matrix` [2, 3] into an image of `size`, to which boxes are clipped. Raises
        ValueError."""
        for name, box_format in self.boxes.items():
            corners = corners_of(sample, name, box_format)
            around = _moved(corners[:, [[0, 1], [2, 1], [2, 3], [0, 3]]], matrix)  # [N, 4 corners, (x, y)]
            corners = np.concatenate([around.min(1), around.max(1)], 1)
            sample[name] = as_boxes(clipped(corners, size), box_format)
        for name in self.keypoints:
            keypoints = _keypoints_of(sample, name)
            keypoints[..., :2] = _moved(keypoints[..., :2] + 0.5, matrix) - 0.5
            sample[name] = _as_tensor(keypoints)

    def move_instances(self, sample: Sample, run: Callable[..., Any], draws: Any, sizes: tuple[Size, Size]) -> None:
        """Move masks of instances as `run` moves an image with a channel for each; `sizes` are the image's, before and after.
        Raises ValueError."""
        for name in self.instances:
            if name not in sample:
                raise ValueError(f"it has no field {name!r}, which `decode` names as masks of instances")
            masks: torch.Tensor = sample[name]
            if not len(masks):
                sample[name] = torch.zeros((0, *sizes[1]), dtype=torch.bool)
                continue
            if masks.shape[1:] != sizes[0]:
                raise ValueError(
                    f"its masks of instances {name!r} are {masks.shape[2]} x {masks.shape[1]}, and its image {sizes[0][1]} x "
                    f"{sizes[0][0]}, on which they would not lie"
                )
            alone: Sample = {ALONE: Image(masks.numpy().view(np.uint8).transpose(1, 2, 0), mask=True)}
            run(alone, draws)
            moved = np.ascontiguousarray(alone[ALONE].pixels.transpose(2, 0, 1))
            sample[name] = torch.from_numpy(moved.view(np.bool_))


_TV_TENSORS = {
    "BoundingBoxes": "boxes: {...: xyxy}",
    "KeyPoints": "keypoints: [...]",
    "Mask": "masks: [...]}, or {instance_masks: [...]",
}


def refuse_unnamed(value: Any) -> None:
    """Raise ValueError for a field that moves with an image by its torchvision type, but is not named in `decode`."""
    kind = type(value)
    if kind.__name__ in _TV_TENSORS and kind.__module__.startswith("torchvision."):
        spelt = _TV_TENSORS[kind.__name__]
        raise ValueError(
            f"torchvision's {kind.__name__}, which would not follow its image: name it, `decode: {{{spelt}}}`"
        )


def corners_of(sample: Sample, name: str, box_format: BoxFormat) -> Coordinates:
    """The boxes of a field as (left, top, right, bottom), float64 [N, 4]. Raises ValueError."""
    boxes = _numbers(sample, name)
    if boxes is not None and boxes.shape == (0,):  # an empty list
        boxes = boxes.reshape(0, 4)
    if boxes is None or boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"its field {name!r} is {describe(sample[name])}, not boxes [N, 4] ({box_format})")
    first, second = boxes[:, :2], boxes[:, 2:]
    if box_format == "cxcywh":
        first = first - second / 2
    corners = np.concatenate([first, second if box_format == "xyxy" else first + second], 1)
    is_box = np.isfinite(corners).all(1) & (corners[:, 2:] >= corners[:, :2]).all(1)
    if not is_box.all():
        number = int(is_box.argmin())
        raise ValueError(
            f"box {number} of its field {name!r} is {boxes[number].tolist()}, which as {box_format} is no box (edges out of "
            f"order, or not finite): `decode: {{boxes: {{{name}: ...}}}}` says which format it is, xyxy, xywh or cxcywh"
        )
    return corners


def as_boxes(corners: Coordinates, box_format: BoxFormat) -> torch.Tensor:
    """Boxes in a format, from their corners."""
    first, second = corners[:, :2], corners[:, 2:]
    if box_format == "cxcywh":
        first, second = (first + second) / 2, second - first
    elif box_format == "xywh":
        second = second - first
    return _as_tensor(np.concatenate([first, second], 1))


def clipped(corners: Coordinates, size: Size) -> Coordinates:
    """Boxes without what lies outside the image."""
    height, width = size
    return corners.clip(0, [width, height, width, height])


def _keypoints_of(sample: Sample, name: str) -> Coordinates:
    keypoints = _numbers(sample, name)
    if keypoints is not None and keypoints.shape == (0,):
        keypoints = keypoints.reshape(0, 2)
    shape = () if keypoints is None else keypoints.shape
    if keypoints is None or (len(shape), *shape[-1:]) not in ((2, 2), (3, 2), (3, 3)):
        raise ValueError(
            f"its field {name!r} is {describe(sample[name])}, not keypoints [N, 2], [N, K, 2] or [N, K, 3] (x, y, visibility)"
        )
    return keypoints


def _numbers(sample: Sample, name: str) -> Coordinates | None:
    """A copy of a field's numbers; None if it holds something else. Raises ValueError if the sample has no such field."""
    if name not in sample:
        raise ValueError(
            f"it has no field {name!r}, which `decode` names as boxes or keypoints, only {', '.join(sample)}"
        )
    value = sample[name]
    try:
        if isinstance(value, torch.Tensor):  # of any type and device
            value = value.detach().to("cpu", torch.float64).numpy()
        return np.array(value, np.float64)
    except (RuntimeError, TypeError, ValueError):
        return None


def _as_tensor(coordinates: Coordinates) -> torch.Tensor:
    return torch.from_numpy(coordinates.astype(np.float32))


def _moved(points: Coordinates, matrix: Coordinates) -> Coordinates:
    moved: Coordinates = points @ matrix[:, :2].T + matrix[:, 2]
    return moved


def following(
    run: Callable[..., Any],
    ops: ImageOps,
    fields: tuple[str, ...] | None,
    annotations: Annotations,
    run_on_masks: Callable[..., Any],
) -> Callable[..., Any]:
    """A stage's function of one sample, which also moves annotations as it moves the images' pixels. `run_on_masks` is
    the same function for a sample that has the field `ALONE`."""

    def follow(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None = None) -> Any:
        annotations.convert_instances(sample)  # a `call` may have made them
        canvas = canvas_of(sample, fields)
        jobs = run(sample, draws, scratch)
        if canvas is not None:
            name, size = canvas
            moved = sample[name]
            target = moved.frames[0].size if type(moved) is Clip else moved.size
            annotations.move(sample, _matrix(ops.of(*size, draws), size, target), target)
            annotations.move_instances(sample, run_on_masks, draws, (size, target))
        return jobs

    return follow


def canvas_of(sample: Sample, fields: tuple[str, ...] | None = None) -> tuple[str, Size] | None:
    """The image that boxes lie in, and its size; None if `fields` name only others.

    Masks count only if there is no other image. Raises ValueError if several images are possible, or if only a table
    [N, M] of uint8 could be the image.
    """
    shown = {
        name: value.frames[0] if type(value) is Clip else value
        for name, value in sample.items()
        if type(value) is not Pictures
    }
    images = image_fields(shown, None)
    if all(getattr(sample[name], "ndim", 3) == 2 for name, _ in images):
        listed = ", ".join(f"{name} ({describe(value)})" for name, value in sample.items())
        raise ValueError(
            f"it has no image [C, H, W] that its boxes and keypoints lie in, only {listed}. Images are uint8 here: put this "
            "stage before a `call` that makes them float"
        )
    sizes = {name: image.size for name, image in images if not image.mask} or {
        name: image.size for name, image in images
    }
    acted_on = [name for name in sizes if fields is None or name in fields]
    if not acted_on:
        return None
    if len(acted_on) < len(sizes) or len({*sizes.values()}) > 1:
        listed = ", ".join(f"{name} {width} x {height}" for name, (height, width) in sizes.items())
        raise ValueError(
            f"it has several images ({listed}), and its boxes and keypoints belong to one: images have to be of one size, and "
            "a stage acts on all or none of them; `decode: {fields: ...}` leaves the others encoded"
        )
    return acted_on[0], sizes[acted_on[0]]


def _matrix(ops: tuple[ImageOp, ...], size: Size, target: Size) -> Coordinates:
    """The matrix [2, 3] that takes a point (x, y, 1) of an image of `size` to its place after the operations."""
    matrix = np.eye(3)
    for op in ops:
        matrix = _step(op, size, target) @ matrix
        size = size_after((op,), *size)
    return matrix[:2]


def _step(op: ImageOp, size: Size, target: Size) -> Coordinates:
    height, width = size
    step = np.eye(3)
    if isinstance(op, Crop):
        step[:2, 2] = -op.left, -op.top
    elif isinstance(op, Scale):
        step[0, 0], step[1, 1] = op.width / width, op.height / height
    elif isinstance(op, Flip) and op.is_on:
        step[0] = -1, 0, width
    elif isinstance(op, VerticalFlip) and op.is_on:
        step[1] = 0, -1, height
    elif isinstance(op, Rotate):  # about the middle, which stays the middle
        cos, sin = math.cos(math.radians(op.degrees)), math.sin(math.radians(op.degrees))
        step[:2, :2] = [[cos, sin], [-sin, cos]]
        step[:2, 2] = np.array(target[::-1]) / 2 - step[:2, :2] @ np.array(size[::-1]) / 2
    return step
