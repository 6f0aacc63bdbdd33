"""The memory that stages write into: the slots of a batch, and tensors that differ in shape."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.dtypes import Bytes, tensor_over

_UINT8 = np.dtype(np.uint8)  # creating it from the type takes 0.3 us


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without gaps."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Slots:
    """One field of a batch, [B, ...], in preallocated memory. `dtype` is torch's name.

    Stages write into its array; the tensor over the same memory is created on first use.
    """

    __slots__ = ("_base", "_tensor", "array", "dtype", "shape")

    def __init__(self, base: NDArray[Any], shape: tuple[int, ...], dtype: str) -> None:
        """`base` has that shape and dtype, or is uint8 [bytes] if NumPy lacks the dtype; then `array` is None."""
        self._base = base
        self._tensor: torch.Tensor | None = None
        self.array = base if dtype == "uint8" or base.dtype != _UINT8 else None
        self.shape = shape
        self.dtype = dtype

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of all slots: uint8 [bytes]."""
        return self._base.reshape(-1).view(_UINT8)

    @property
    def tensor(self) -> torch.Tensor:
        """[B, ...], over the same memory."""
        tensor = self._tensor
        if tensor is None:
            tensor = torch.from_numpy(self._base)
            if self.array is None:
                tensor = tensor_over(tensor, self.dtype, self.shape, _packed_strides(self.shape))
            self._tensor = tensor
        return tensor

    def part(self, slots: slice | NDArray[np.int64]) -> Slots:
        """Some of the slots: a view for a slice, a copy for an array of indices."""
        if self.array is not None:
            rows = self._base[slots]
            return Slots(rows, rows.shape, self.dtype)
        rows = self._base.reshape(self.shape[0], -1)[slots]
        return Slots(rows.reshape(-1), (len(rows), *self.shape[1:]), self.dtype)


TakeBytes = Callable[[int], Bytes]
"""Gives uninitialised memory of a size, which is kept as long as anything over it lives."""

LEAST_LENT = 512 * 1024


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, take_bytes: TakeBytes | None) -> torch.Tensor:
    """An uninitialised tensor on the CPU, in leased memory if it is large: small memory costs no page faults."""
    num_bytes = prod(shape) * dtype.itemsize
    if take_bytes is None or num_bytes < LEAST_LENT:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = torch.from_numpy(take_bytes(num_bytes))
    return tensor_over(memory, str(dtype).removeprefix("torch."), shape, _packed_strides(shape))
