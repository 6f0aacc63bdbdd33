"""Compares two values: whether what a user's functions made twice is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def differ(first: Any, second: Any) -> bool:
    """True if the values are known to differ. False also for objects that compare by identity, of which nothing is known."""
    if type(first) is not type(second):
        return True
    compare = next((compare for kind, compare in _BY_KIND if isinstance(first, kind)), _are_unequal)
    return compare(first, second)


def _tensors_differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape, first.layout) != (second.dtype, second.shape, second.layout):
        return True
    return first.layout == torch.strided and not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _arrays_differ(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype.hasobject:
        return differ(first.tolist(), second.tolist())
    return (first.dtype, first.shape) != (second.dtype, second.shape) or first.tobytes() != second.tobytes()


def _dicts_differ(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    return first.keys() != second.keys() or any(differ(value, second[key]) for key, value in first.items())


def _lists_differ(first: list[Any] | tuple[Any, ...], second: list[Any] | tuple[Any, ...]) -> bool:
    return len(first) != len(second) or any(map(differ, first, second))


def _are_unequal(first: Any, second: Any) -> bool:
    if getattr(type(first), "__eq__", None) is object.__eq__ or (first != first and second != second):  # noqa: PLR0124 - two NaNs are alike
        return False
    return bool(first != second)


_BY_KIND: tuple[tuple[Any, Callable[[Any, Any], bool]], ...] = (
    (torch.Tensor, _tensors_differ),
    (np.ndarray, _arrays_differ),
    (dict, _dicts_differ),
    ((list, tuple), _lists_differ),
)
