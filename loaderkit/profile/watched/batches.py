"""Measures how much a batch holds, whatever made the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_DEPTH = 4
_MOST_FIELDS = 16


class Size(NamedTuple):
    """What is in a batch, as far as it can be seen: tensors, arrays and texts, in mappings, lists and tuples."""

    num_samples: int
    num_bytes: int = 0
    num_tensors: int = 0  # and arrays
    array_bytes: int = 0  # of num_bytes, in NumPy's arrays, which processes pickle
    gpu_bytes: int = 0  # of num_bytes, in memory of a GPU


def num_samples_of(batch: Any, batch_size: int | None = None, depth: int = _DEPTH) -> int:
    """The length of the first field. For a list of samples (dicts, tuples, or `batch_size` tensors that cannot be
    fields) the length of the list. A value without a length is one sample."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.shape[0] if len(batch.shape) else 1
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return _num_in_list(batch, batch_size, depth)
    fields = batch.values() if isinstance(batch, Mapping) else getattr(batch, "__dict__", {}).values()
    if isinstance(batch, tuple):
        fields = batch
    for field in fields if depth else ():
        if isinstance(field, (torch.Tensor, np.ndarray, list, tuple, Mapping)):
            return num_samples_of(field, batch_size, depth - 1)
    return 1


def _num_in_list(batch: Sequence[Any], batch_size: int | None, depth: int) -> int:
    """A list may hold fields, or samples."""
    if len(batch) == 1 and batch_size is None and isinstance(batch[0], Mapping) and depth:  # as DALI gives it
        return num_samples_of(batch[0], None, depth - 1)
    if not batch or not depth or isinstance(batch[0], (str, bytes, int, float, tuple, Mapping)):
        return len(batch)
    first = num_samples_of(batch[0], None, depth - 1)
    if batch_size is None or first == batch_size or len(batch) > batch_size:
        return first
    is_of_samples = first > batch_size or _length(batch[0]) != _length(batch[-1]) or len(batch) > _MOST_FIELDS
    return len(batch) if is_of_samples else first


def _length(value: Any) -> Any:
    return value.shape[:1] if isinstance(value, (torch.Tensor, np.ndarray)) else None


def size_of(batch: Any, batch_size: int | None = None) -> Size:
    """The size of a batch; takes microseconds for each of its fields."""
    totals = [0, 0, 0, 0]
    _add(batch, totals, _DEPTH)
    return Size(num_samples_of(batch, batch_size), *totals)


def _add(value: Any, totals: list[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        totals[0] += value.nbytes
        totals[1] += 1
        totals[3] += 0 if value.device.type == "cpu" else value.nbytes
    elif isinstance(value, np.ndarray):
        totals[0] += value.nbytes
        totals[1] += 1
        totals[2] += value.nbytes
    elif isinstance(value, (str, bytes)):
        totals[0] += len(value)
    elif depth:
        if isinstance(value, Mapping):
            inside: Any = value.values()
        else:
            inside = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).values()
        for one in inside:
            _add(one, totals, depth - 1)
