"""Moving values and pixels into slots: through the C module where it was built, else through torch.

Written bytes are the same on both ways, resized ones within a level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.native import fallback
from loaderkit.native.fallback import packed

Pixels = NDArray[np.uint8]
Factors = tuple[float, ...]
Part = tuple[float, float, float, float]
"""(top, left, height, width) in pixels, which need not be whole."""


def write_image(slots: NDArray[np.uint8], slot: int, pixels: Pixels) -> None:
    """Write uint8 [H, W, C] into `slots[slot]`, uint8 [C, H, W]."""
    write_planes = native.write_planes if _is_writable(pixels) else fallback.write_planes
    write_planes(slots, slot, pixels)


def write_normalized(
    slots: NDArray[np.float32], first: int, images: list[Pixels | None], scale: Factors, shift: Factors
) -> None:
    """Write images, uint8 [H, W, C], into `slots[first]` and those behind it, float32 [C, H, W], as value * scale + shift,
    each rounded by itself. None leaves its slot alone."""
    is_fit = all(pixels is None or _is_writable(pixels) for pixels in images)
    (native if is_fit else fallback).write_normalized(slots, first, images, scale, shift)


def resampled_from(pixels: Pixels) -> Pixels | None:
    """The pixels as `resample` takes them, with packed rows; None if it cannot: RGB, with the C module, on a CPU with AVX2."""
    if not native.CAN_RESAMPLE or pixels.shape[2] != 3:
        return None
    if _is_packed(pixels):
        return pixels
    forwards = packed(pixels)
    return forwards if _is_packed(forwards) else None


def resample(jobs: list[tuple[Pixels, Pixels, Part | None, bool]]) -> None:
    """Resize each (target, pixels, part of them, whether to antialias), uint8 [H, W, 3], by the bilinear filter, in one call.

    Within one level of Pillow (antialiased) and torch at usual sizes, in half the time of torch's kernel (100 us from
    300 x 300 to 224 x 224).
    """
    native.resample(jobs)


def _is_packed(pixels: Pixels) -> bool:
    return pixels.shape[2] == 3 and pixels.strides[1:] == (3, 1) and pixels.strides[0] > 0


def _is_writable(pixels: Pixels) -> bool:
    """Whether the C module takes the pixels: packed rows, mirrored or not."""
    return pixels.shape[2] == 3 and pixels.strides[1:] in ((3, 1), (-3, 1))
