"""Moving pixels into slots: through the C module where it was built, else through torch, with the same bytes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

try:
    _kernels: Any = importlib.import_module("loaderkit._kernels")
except ImportError:  # no compiler when loaderkit was installed
    _kernels = None

Pixels = NDArray[np.uint8]
Factors = tuple[float, ...]


def is_compiled() -> bool:
    """Whether the C module is there."""
    return _kernels is not None


def write_image(slots: torch.Tensor, slot: int, pixels: Pixels) -> None:
    """Write uint8 [H, W, C] into `slots[slot]`, uint8 [C, H, W]."""
    if _kernels is not None and _is_packed(pixels):
        _kernels.write_planes(slots.numpy(), slot, pixels)
    else:
        slots[slot].copy_(_planes(pixels))


def write_normalized(slots: torch.Tensor, slot: int, pixels: Pixels, scale: Factors, shift: Factors) -> None:
    """Write uint8 [H, W, 3] into `slots[slot]`, float32 [3, H, W], as value * scale + shift, each rounded by itself."""
    if _kernels is not None and _is_packed(pixels) and len(scale) == 3:
        _kernels.write_normalized(slots.numpy(), slot, pixels, scale, shift)
    else:
        target = slots[slot].copy_(_planes(pixels))
        target.mul_(_column(scale)).add_(_column(shift))


def mirrored(pixels: Pixels, scratch: dict[str, Any] | None) -> Pixels:
    """The image with left and right exchanged, packed [H, W, C]; in `scratch`'s memory if there is some."""
    if _kernels is None or not _is_packed(pixels):
        # torch mirrors packed RGB in 7 us at 224 x 224; copying NumPy's view with negative strides takes 200 us.
        flipped: Pixels = torch.flip(torch.from_numpy(np.ascontiguousarray(pixels)), (1,)).numpy()
        return flipped
    target: Pixels | None = None if scratch is None else scratch.get("mirrored")
    if target is None or target.shape != pixels.shape:
        target = np.empty(pixels.shape, np.uint8)
        if scratch is not None:
            scratch["mirrored"] = target
    _kernels.mirror(target, pixels)
    return target


def _is_packed(pixels: Pixels) -> bool:
    return pixels.shape[2] == 3 and pixels.strides[1:] == (3, 1) and pixels.strides[0] > 0


def _planes(pixels: Pixels) -> torch.Tensor:
    if not pixels.flags.writeable or any(stride < 0 for stride in pixels.strides):
        pixels = pixels.copy()
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _column(values: Factors) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
