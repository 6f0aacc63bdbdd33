"""Writes pixels into slots and resizes them: by the C module if it was built, else by torch.

Written bytes are equal in both, resized ones within one level.
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
"""(top, left, height, width) in pixels, also fractions."""


def write_image(slots: NDArray[np.uint8], slot: int, pixels: Pixels) -> None:
    """Write uint8 [H, W, C] into `slots[slot]`, uint8 [C, H, W]."""
    write_planes = native.write_planes if _is_writable(pixels) else fallback.write_planes
    write_planes(slots, slot, pixels)


def write_normalized(
    slots: NDArray[np.float32], first: int, images: list[Pixels | None], scale: Factors, shift: Factors
) -> None:
    """Write images, uint8 [H, W, C], into the slots from `slots[first]` on, float32 [C, H, W], as value * scale + shift, each
    operation rounded. None leaves its slot unchanged."""
    takes_all = all(pixels is None or _is_writable(pixels) for pixels in images)
    (native if takes_all else fallback).write_normalized(slots, first, images, scale, shift)


def resampled_from(pixels: Pixels) -> Pixels | None:
    """The pixels with packed rows, as `resample` needs them; None unless they are RGB and the CPU and the C module allow it."""
    if not native.CAN_RESAMPLE or pixels.shape[2] != 3:
        return None
    if _is_packed(pixels):
        return pixels
    forwards = packed(pixels)
    return forwards if _is_packed(forwards) else None


def resample(jobs: list[tuple[Pixels, Pixels, Part | None, bool]]) -> None:
    """Resize each (target, pixels, part, antialias), uint8 [H, W, 3], by the bilinear filter, in one call.

    Within one level of Pillow (antialiased) and torch at usual sizes, in half the time of torch's kernel (100 us from
    300 x 300 to 224 x 224).
    """
    native.resample(jobs)


def _is_packed(pixels: Pixels) -> bool:
    return pixels.shape[2] == 3 and pixels.strides[1:] == (3, 1) and pixels.strides[0] > 0


def _is_writable(pixels: Pixels) -> bool:
    """True if the C module takes the pixels: packed rows, mirrored or not."""
    return pixels.shape[2] == 3 and pixels.strides[1:] in ((3, 1), (-3, 1))
