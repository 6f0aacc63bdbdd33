"""Maps torch's dtype names to NumPy, and tells the dtype that values share."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


_SHARED_DTYPES = frozenset(("bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"))


def type_in_numpy(dtype: str) -> np.dtype[Any] | None:
    """NumPy's dtype of the same name; None for a dtype that only torch has."""
    return np.dtype(dtype) if dtype in _SHARED_DTYPES else None


def tensor_over(memory: torch.Tensor, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor from the first byte of `memory` on. To autograd it is no view, so it may be changed in place."""
    tensor = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
    return tensor.set_(memory.untyped_storage(), 0, shape, strides)


def num_bytes_of(dtype: str) -> int:
    """The item size in bytes of a dtype, by torch's name."""
    numpy_dtype = type_in_numpy(dtype)
    size: int = getattr(torch, dtype).itemsize if numpy_dtype is None else numpy_dtype.itemsize
    return size


def type_of_all(values: list[Any]) -> type | None:
    """The common type of all values; None if there are several types or no values."""
    types = {*map(type, values)}
    return types.pop() if len(types) == 1 else None


def all_have_dtype(values: list[Any], dtype: Any) -> bool:
    """True if there are values and all are tensors, or arrays, of this dtype."""
    return {*map(attrgetter("dtype"), values)} == {dtype}
