"""Moving values and pixels into slots: through the C module where it was built, else through torch.

Written bytes are the same on both ways, resized ones within a level.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.native import kernels

Pixels = NDArray[np.uint8]
Factors = tuple[float, ...]
Part = tuple[float, float, float, float]
"""(top, left, height, width) in pixels, which need not be whole."""

_HAS_AVX2 = kernels is not None and kernels.resample([])


def write_image(slots: NDArray[np.uint8], slot: int, pixels: Pixels) -> None:
    """Write uint8 [H, W, C] into `slots[slot]`, uint8 [C, H, W]."""
    if kernels is not None and _is_writable(pixels):
        kernels.write_planes(slots, slot, pixels)
    else:
        torch.from_numpy(slots)[slot].copy_(_planes(pixels))


def write_normalized(
    slots: NDArray[np.float32], first: int, images: list[Pixels | None], scale: Factors, shift: Factors
) -> None:
    """Write images, uint8 [H, W, C], into `slots[first]` and those behind it, float32 [C, H, W], as value * scale + shift,
    each rounded by itself. None leaves its slot alone."""
    if kernels is not None:
        try:
            kernels.write_normalized(slots, first, images, scale, shift)
            return
        except ValueError:  # then none is written; the others are for pixels of another layout, and not of another size
            if all(pixels is None or _is_writable(pixels) for pixels in images):
                raise
    tensor = torch.from_numpy(slots)
    for slot, pixels in enumerate(images, first):
        if pixels is not None:
            tensor[slot].copy_(_planes(pixels)).mul_(_column(scale)).add_(_column(shift))


def packed(pixels: Pixels) -> Pixels:
    """The image with packed rows that run forwards: itself if it is so, else a copy."""
    if pixels.shape[2] != 3 or pixels.strides[1:] != (-3, 1):
        return np.ascontiguousarray(pixels) if any(stride < 0 for stride in pixels.strides) else pixels
    # NumPy copies negative strides in 200 us at 224 x 224, torch mirrors in 7.
    flipped: Pixels = torch.flip(torch.from_numpy(np.ascontiguousarray(pixels[:, ::-1])), (1,)).numpy()
    return flipped


def can_resample() -> bool:
    """Whether `resample` works here: with the C module, on a CPU with AVX2."""
    return kernels is not None and _HAS_AVX2


def resampled_from(pixels: Pixels) -> Pixels | None:
    """The pixels as `resample` takes them, with packed rows; None if it cannot: RGB, with the C module, on a CPU with AVX2."""
    if not can_resample() or pixels.shape[2] != 3:
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
    kernels.resample(jobs)


def _is_packed(pixels: Pixels) -> bool:
    return pixels.shape[2] == 3 and pixels.strides[1:] == (3, 1) and pixels.strides[0] > 0


def _is_writable(pixels: Pixels) -> bool:
    """Whether the C module takes the pixels: packed rows, mirrored or not."""
    return pixels.shape[2] == 3 and pixels.strides[1:] in ((3, 1), (-3, 1))


def _planes(pixels: Pixels) -> torch.Tensor:
    pixels = packed(pixels)
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def _column(values: Factors) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").reshape(-1, 1, 1)
