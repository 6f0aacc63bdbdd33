"""Resizing images: what is cut out of which image, and how it becomes an image of another size.

Bilinear, the usual case, is left to be done as jobs, those of a whole chunk in one call: every call that
gives the GIL away may wait to get it back.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from loaderkit.stages.base import Image
from loaderkit.stages.kernels import Part, resampled_from
from loaderkit.stages.values import to_tensor

Interpolation = Literal["bilinear", "bicubic", "nearest"]
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels of the whole image."""


ResampleJob = tuple[NDArray[np.uint8], NDArray[np.uint8], Part | None, bool]
"""(target, pixels, part, antialias): resize a part of pixels, None for all of them, into the target, uint8 [H, W, 3]; without
`antialias` the filter does not widen where it shrinks."""


def resized(
    image: Image,
    box: Box | None,
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: bool,
    jobs: list[ResampleJob],
    scratch: dict[str, Any] | None = None,
) -> Image:
    """Resize `box` of an image to (height, width), rounding as Pillow does. Masks take the nearest pixel.

    What is left to do is appended to `jobs`. With `scratch` the result lies in its memory, which the next image resized
    with that scratch overwrites.
    """
    pixels, part = cut(image, box)
    if part is None and pixels.shape[:2] == size:
        return Image(pixels, image.mask)
    if not image.mask and interpolation == "bilinear":
        source = resampled_from(pixels)
        if source is not None:
            target = _memory((*size, 3), scratch)
            jobs.append((target, source, part, antialias))
            return Image(target)
    if part is not None:
        return Image(_with_pillow(pixels, part, size))
    mode = "nearest-exact" if image.mask or interpolation == "nearest" else interpolation
    planes = torch.nn.functional.interpolate(
        to_tensor(Image(pixels)).unsqueeze(0), size=size, mode=mode, antialias=antialias and mode != "nearest-exact"
    )
    return Image(planes[0].permute(1, 2, 0).contiguous().numpy(), image.mask)


def cut(image: Image, box: Box | None) -> tuple[NDArray[np.uint8], Part | None]:
    """The pixels of a box, None for all of them, and which part of these it is, if not all: a reduced image has a pixel for
    several."""
    if image.reduction == 1 and (box is None or box == image.box):
        return image.pixels, None  # all of it, or the piece it was made for
    top, left, height, width = box or (0, 0, *image.size)
    row, column, num_rows, num_columns = reduced_box((top, left, height, width), image.reduction)
    first_row, first_column = row - image.origin[0], column - image.origin[1]
    pixels = image.pixels[first_row : first_row + num_rows, first_column : first_column + num_columns]
    step = image.reduction
    return pixels, None if step == 1 else (top / step - row, left / step - column, height / step, width / step)


def reduced_box(box: Box, step: int) -> Box:
    """The pixels that a box has in the image decoded at 1/step."""
    if step == 1:
        return box
    top, left, height, width = box
    row, column = top // step, left // step
    return row, column, -(-(top + height) // step) - row, -(-(left + width) // step) - column


def _with_pillow(pixels: NDArray[np.uint8], part: Part, size: tuple[int, int]) -> NDArray[np.uint8]:
    top, left, height, width = part
    image = Pillow.fromarray(pixels).resize(
        size[::-1], Pillow.Resampling.BILINEAR, box=(left, top, left + width, top + height)
    )
    return np.array(image)


def _memory(shape: tuple[int, ...], scratch: dict[str, Any] | None) -> NDArray[np.uint8]:
    kept: NDArray[np.uint8] | None = None if scratch is None else scratch.get("resized")
    if kept is None or kept.shape != shape:
        kept = np.empty(shape, np.uint8)
        if scratch is not None:
            scratch["resized"] = kept
    return kept
