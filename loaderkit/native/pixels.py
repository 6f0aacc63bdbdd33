"""Pixels into slots: packed RGB by the C kernels, any other layout or number of channels by torch, to the same bytes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_kernels: Any = importlib.import_module("loaderkit.native._kernels")
Pixels = NDArray[np.uint8]
_PACKED = frozenset({(3, 1), (-3, 1)})  # strides of RGB in rows that run forwards or backwards


def write_planes(slots: Pixels, slot: int, pixels: Pixels) -> None:
    """Write uint8 [H, W, C] into `slots[slot]`, uint8 [C, H, W]."""
    if pixels.shape[2] == 3 and pixels.strides[1:] in _PACKED:
        _kernels.write_planes(slots, slot, pixels)
    else:
        torch.from_numpy(slots)[slot].copy_(_planes(pixels))


def write_normalized(
    slots: NDArray[np.float32],
    first: int,
    images: list[Pixels | None],
    scale: tuple[float, ...],
    shift: tuple[float, ...],
) -> None:
    """Write images, uint8 [H, W, C], into the slots from `slots[first]` on, float32 [C, H, W], as value * scale + shift, each
    operation rounded. None leaves its slot unchanged. Raises ValueError for images of another size."""
    if slots.shape[1] == 3 and {pixels.strides[1:] for pixels in images if pixels is not None} <= _PACKED:
        _kernels.write_normalized(slots, first, images, scale, shift)
        return
    tensor = torch.from_numpy(slots)
    if any(pixels is not None and pixels.shape[:2] != slots.shape[2:] for pixels in images):
        raise ValueError("the slots must have the pixels' size")
    for slot, pixels in enumerate(images, first):
        if pixels is not None:
            tensor[slot].copy_(_planes(pixels)).mul_(_column(scale)).add_(_column(shift))


def packed(pixels: Pixels) -> Pixels:
    """The image with packed rows that run forwards; a copy unless it has them."""
    if pixels.shape[2] != 3 or pixels.strides[1:] != (-3, 1):
        return np.ascontiguousarray(pixels) if any(stride < 0 for stride in pixels.strides) else pixels
    # NumPy copies negative strides in 200 us at 224 x 224, torch mirrors in 7.
    flipped: Pixels = torch.flip(torch.from_numpy(np.ascontiguousarray(pixels[:, ::-1])), (1,)).numpy()
    return flipped


def _planes(pixels: Pixels) -> torch.Tensor:
    pixels = packed(pixels)
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def _column(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").reshape(-1, 1, 1)
