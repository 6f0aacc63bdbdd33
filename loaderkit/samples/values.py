"""The values of samples between stages."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.dtypes import type_of_all
from loaderkit.errors import FormatError

_DTYPES = {int: np.int64, float: np.float64, bool: np.bool_}


class Encoded(NamedTuple):
    """The bytes of one field before `decode`, and the extension that names their format ("jpg", "cls", "seg.png")."""

    data: memoryview
    extension: str


class Image(NamedTuple):
    """A decoded image: uint8 [H, W, C], C = 3, or 1 when `mask` (labels: resized by nearest, never normalised); with
    `decode: {depth: 16}` uint16.

    With `whole` = (height, width) it was not decoded in full. With `reduction` = N > 1 a pixel stands for N x N. A partial
    image begins at `origin` = (row, column) of the (reduced) whole, and covers `box` = (top, left, height, width) of the
    whole, which is all that the next stage needs.
    """

    pixels: NDArray[Any]
    mask: bool = False
    reduction: int = 1
    whole: tuple[int, int] | None = None
    origin: tuple[int, int] = (0, 0)
    box: tuple[int, int, int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the whole image."""
        return self.whole or (self.pixels.shape[0], self.pixels.shape[1])


class Clip(NamedTuple):
    """A decoded clip of a video: its frames, of one size, as images."""

    frames: tuple[Image, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(T, C, H, W)."""
        height, width, channels = self.frames[0].pixels.shape
        return len(self.frames), channels, height, width


class Pictures(NamedTuple):
    """Several pictures of one sample, as a chat has them: any number, of any sizes. A batch has lists of tensors [C, H, W]."""

    images: tuple[Image, ...]


class InPlace(NamedTuple):
    """A field of `num_bytes` that `read` has written already, into its slot, or as `tensor` into memory leased to the
    batch. For the first sample, which only shows the layout, nothing is written."""

    num_bytes: int
    tensor: torch.Tensor | None = None


class GpuDecoded(NamedTuple):
    """An image that is a row of a tensor [n, C, H, W], usually of its whole chunk."""

    tensor: torch.Tensor
    row: int


class CutWindow(NamedTuple):
    """The window of an array that the stage after `read` would cut, of which nothing else was read."""

    array: NDArray[Any]


class FieldGroup(NamedTuple):
    """Several fields from the bytes of one (an .npz file): name -> `Encoded`, `InPlace` or value. `decode` unpacks it."""

    fields: dict[str, Any]


_PLAIN = (int, float, str, bool, bytes)


def owned(value: Any) -> Any:
    """A value of a data set's in memory of its own, with the tensors, arrays, lists, tuples and dicts in it. Other objects are
    the same ones."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (np.ndarray, bytearray)):
        return value.copy()
    if isinstance(value, (list, dict)):
        copied: Any = copy(value)
        if isinstance(value, dict):
            copied.update({key: owned(item) for key, item in value.items()})
        elif type_of_all(value) not in _PLAIN:
            copied[:] = map(owned, value)
        return copied
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):  # a named one
        make = getattr(value, "_make", tuple)
        return make(map(owned, value))
    return value


_MOST_WHOLE = 1 << 53
_TOO_LARGE = "it has a whole number beyond 2^53 beside fractions in a list: float64 would round it"


def as_array(values: list[Any]) -> Any:
    """A list of numbers, or of such lists of one length, as an array: int64, float64 (also where some are whole) or
    bool; any other list, and an empty one, as it is. Raises FormatError for whole numbers beyond int64, and beside fractions
    for those that float64 does not hold."""
    kind = type_of_all(values)
    if kind is None and {*map(type, values)} == {int, float}:
        kind = float
        if any(type(value) is int and abs(value) > _MOST_WHOLE for value in values):
            raise FormatError(_TOO_LARGE)
    if kind is list:
        arrays = list(map(as_array, values))
        is_array = all(type(array) is np.ndarray and array.dtype.kind in "biuf" for array in arrays)
        if not is_array or len({array.shape for array in arrays}) > 1:
            return values
        dtypes = {array.dtype for array in arrays}
        if len(dtypes) > 1:
            if np.dtype(np.bool_) in dtypes:
                return values
            if any(array.dtype.kind == "i" and (np.abs(array) > _MOST_WHOLE).any() for array in arrays):
                raise FormatError(_TOO_LARGE)
        return np.stack(arrays)
    dtype = _DTYPES.get(kind) if kind is not None else None
    if dtype is None:
        return values
    try:
        return np.array(values, dtype)
    except OverflowError:
        raise FormatError("it has a whole number beyond 64 bits in a list") from None
