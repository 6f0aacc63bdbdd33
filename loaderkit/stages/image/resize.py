"""Crops and resizes images.

Bilinear resizes, the usual case, become jobs that run in one call per chunk, as every call that releases the GIL may have to
wait for it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from loaderkit import native
from loaderkit.samples.values import Image
from loaderkit.stages.values import to_tensor

Interpolation = Literal["bilinear", "bicubic", "nearest"]
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels of the whole image."""
Part = tuple[float, float, float, float]
"""(top, left, height, width) in pixels, also fractions."""
ResampleJob = tuple[NDArray[np.uint8], NDArray[np.uint8], Part | None, bool]
"""(target, pixels, part, antialias): resize a part of the pixels (None means all) into the target, uint8 [H, W, 3];
without `antialias` the filter does not widen when shrinking."""


def resized(
    image: Image,
    box: Box | None,
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: bool,
    jobs: list[ResampleJob],
    scratch: dict[str, Any] | None = None,
    field: str = "",
) -> Image:
    """Resize `box` of an image to (height, width), rounding as Pillow does. Masks take the nearest pixel.

    Remaining work is appended to `jobs`. With `scratch` the result lies in its memory for `field`, which the next image resized
    with both overwrites.
    """
    pixels, part = cut(image, box)
    if part is None and pixels.shape[:2] == size:
        return Image(pixels, image.mask)
    if pixels.dtype != np.uint8:
        return Image(_of_16_bits(pixels, size, "nearest-exact" if image.mask else interpolation, antialias), image.mask)
    if not image.mask and interpolation == "bilinear":
        source = _packed_rgb(pixels)
        if source is not None:
            target = _memory((*size, 3), scratch, field)
            jobs.append((target, source, part, antialias))
            return Image(target)
    if part is not None:
        return Image(_with_pillow(pixels, part, size))
    mode = "nearest-exact" if image.mask or interpolation == "nearest" else interpolation
    planes = torch.nn.functional.interpolate(
        to_tensor(Image(pixels)).unsqueeze(0), size=size, mode=mode, antialias=antialias and mode != "nearest-exact"
    )
    return Image(planes[0].permute(1, 2, 0).contiguous().numpy(), image.mask)


def cut(image: Image, box: Box | None) -> tuple[NDArray[Any], Part | None]:
    """The pixels that cover a box (None means the whole image). In a reduced image the box may begin between two
    pixels: then also its part of these pixels, or None if it is all of them."""
    if image.reduction == 1 and (box is None or box == image.box):
        return image.pixels, None  # the whole image, or a partial image of this box
    top, left, height, width = box or (0, 0, *image.size)
    row, column, num_rows, num_columns = reduced_box((top, left, height, width), image.reduction)
    first_row, first_column = row - image.origin[0], column - image.origin[1]
    pixels = image.pixels[first_row : first_row + num_rows, first_column : first_column + num_columns]
    step = image.reduction
    return pixels, None if step == 1 else (top / step - row, left / step - column, height / step, width / step)


def reduced_box(box: Box, step: int) -> Box:
    """The box in the image decoded at 1/step, widened to whole pixels."""
    top, left, height, width = box
    row, column = top // step, left // step
    return row, column, -(-(top + height) // step) - row, -(-(left + width) // step) - column


def _of_16_bits(pixels: NDArray[np.uint16], size: tuple[int, int], mode: str, antialias: bool) -> NDArray[np.uint16]:
    """uint16 [H, W, C] resized in float32, which holds all its levels, and rounded."""
    mode = "nearest-exact" if mode == "nearest" else mode
    planes = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1).unsqueeze(0)
    resized = torch.nn.functional.interpolate(
        planes, size=size, mode=mode, antialias=antialias and mode != "nearest-exact"
    )
    return resized[0].permute(1, 2, 0).round_().clamp_(0, 65535).numpy().astype(np.uint16)


def _with_pillow(pixels: NDArray[np.uint8], part: Part, size: tuple[int, int]) -> NDArray[np.uint8]:
    top, left, height, width = part
    image = Pillow.fromarray(pixels).resize(
        size[::-1], Pillow.Resampling.BILINEAR, box=(left, top, left + width, top + height)
    )
    return np.array(image)


def _packed_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The pixels with packed rows that run forwards, as `native.resample` needs them; None unless they are RGB and the CPU
    has AVX2.

    It resizes within one level of Pillow (antialiased) and of torch at usual sizes, in half the time of torch's kernel (100 us
    from 300 x 300 to 224 x 224).
    """
    if not native.CAN_RESAMPLE or pixels.shape[2] != 3:
        return None
    if pixels.strides[1:] != (3, 1) or pixels.strides[0] < 0:
        pixels = native.packed(pixels)
    return pixels if pixels.strides[1:] == (3, 1) else None


def _memory(shape: tuple[int, ...], scratch: dict[str, Any] | None, field: str) -> NDArray[np.uint8]:
    target: NDArray[np.uint8] | None = None if scratch is None else scratch.get(field)
    if target is None or target.shape != shape:
        target = np.empty(shape, np.uint8)
        if scratch is not None:
            scratch[field] = target
    return target
