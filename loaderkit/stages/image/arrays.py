"""Pictures, masks and instance masks that are given as arrays: in `.npy` and `.npz` files, or by a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.samples.values import Image
from loaderkit.stages.image.levels import Depth, deepened
from loaderkit.stages.values import describe

_MOST = {8: 255, 16: 65535}
_MOST_BYTES = 4 << 30


def picture_of(value: Any, num_channels: int, depth: Depth, *, is_named: bool) -> Image | None:
    """An array or tensor of uint8, or with `depth` 16 also of uint16, as a picture; None if it is none.

    [H, W, C] or [C, H, W]: the channels are the end that is `num_channels` long, and of a tensor the first one, if both are.
    One that `is_named` as a picture may also be [H, W], if that is one channel. Raises ValueError for an array both
    ends of which have this length, and for uint16 with `depth` 8.
    """
    array = _array_of(value)
    if array is None or array.dtype not in (np.uint8, np.uint16):
        return None
    pixels: NDArray[Any] | None = None
    if array.ndim == 2 and num_channels == 1 and is_named:
        pixels = array[:, :, None]
    elif array.ndim == 3:
        is_first, is_last = array.shape[0] == num_channels, array.shape[2] == num_channels
        if is_first and is_last and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"its {describe(value)} may be [C, H, W] or [H, W, C]: give it as a tensor, which is [C, H, W], or name the "
                "images in `fields` if it is none"
            )
        if is_first or is_last:
            pixels = array.transpose(1, 2, 0) if is_first else array
    if pixels is None:
        return None
    if depth == 8 and pixels.dtype == np.uint16:
        raise ValueError(f"its {describe(value)} has 16 bits: `decode: {{depth: 16}}` keeps them")
    return Image(deepened(pixels) if depth == 16 and pixels.dtype == np.uint8 else pixels)


def mask_of(value: Any, depth: Depth) -> Image:
    """Class numbers [H, W], [1, H, W] or [H, W, 1] of any integer type, or bool, as a mask. Raises ValueError."""
    array = _array_of(value)
    if array is None or array.dtype.kind not in "bui":
        raise ValueError(f"a mask is an array [H, W] of class numbers, this one is {describe(value)}")
    if array.ndim == 3 and 1 in (array.shape[0], array.shape[2]):
        array = array[0] if array.shape[0] == 1 else array[:, :, 0]
    if array.ndim != 2 or not array.size:
        raise ValueError(f"a mask has one channel of class numbers, this one is {describe(value)}")
    if array.dtype != np.uint8 and not 0 <= int(array.min()) <= int(array.max()) <= _MOST[depth]:
        remedy = ": `decode: {depth: 16}` keeps them" if depth == 8 and array.min() >= 0 else ""
        raise ValueError(
            f"a mask has class numbers from 0 to {_MOST[depth]}, this one has {array.min()} to {array.max()}{remedy}"
        )
    return Image(array.astype(np.uint8 if depth == 8 else np.uint16)[:, :, None], mask=True)


def instances_of(value: Any) -> torch.Tensor:
    """Masks of instances as a tensor of bool [N, H, W].

    They are bool, or integers that are 0 and 1, or 0 and 255; or one mask [H, W] of whole numbers, of which each but 0 is an
    instance, in ascending order. Raises ValueError for anything else.
    """
    array = value.pixels[:, :, 0] if type(value) is Image else _array_of(value)
    if array is None and isinstance(value, (list, tuple)):
        array = np.zeros((0, 0, 0), np.bool_) if not value else _stacked(value)
    if array is None or array.dtype.kind not in "bui" or array.ndim not in (2, 3):
        raise ValueError(
            f"{describe(value)}, not masks of instances, bool or uint8 [N, H, W], nor [H, W] with a number for each"
        )
    if array.ndim == 2:
        numbers = np.unique(array)
        if len(numbers) * array.size > _MOST_BYTES:
            raise ValueError(
                f"{describe(value)} of {len(numbers)} different numbers, whose masks would be more than 4 GiB: is it one of "
                "instances?"
            )
        return torch.from_numpy(array == numbers[numbers != 0][:, None, None])
    if array.dtype.kind != "b" and array.size:
        most = array.max()
        if most not in (0, 1, 255) or not ((array == 0) | (array == most)).all():
            raise ValueError(
                f"{describe(value)} with other numbers than 0 and 1, or 0 and 255: a mask with a number for each instance is "
                "[H, W]"
            )
    return torch.from_numpy(np.not_equal(array, 0))


def _array_of(value: Any) -> NDArray[Any] | None:
    if isinstance(value, torch.Tensor):
        is_readable = value.device.type == "cpu" and value.layout is torch.strided and value.dtype is not torch.bfloat16
        return value.detach().numpy() if is_readable else None
    return value if isinstance(value, np.ndarray) else None


def _stacked(values: list[Any] | tuple[Any, ...]) -> NDArray[Any] | None:
    arrays = [_array_of(value) for value in values]
    if (
        any(array is None or array.ndim != 2 for array in arrays)
        or len({array.shape for array in arrays if array is not None}) > 1
    ):
        return None
    return np.stack([array for array in arrays if array is not None])
