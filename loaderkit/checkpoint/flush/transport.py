"""A copied state as a pickle stream that names its tensors' places in shared memory instead of holding them.

Both ends are processes of one rank. Wrappers of tensors, such as DTensor, travel as what they consist of.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from loaderkit._internal.dtypes import Bytes
from loaderkit.checkpoint.flush.shared_pages import MappedPages, SharedPages
from loaderkit.checkpoint.names import flatten
from loaderkit.checkpoint.save.staging import HostCopies, inner_of, is_wrapper
from loaderkit.checkpoint.save.tensor_bytes import plain_tensor
from loaderkit.errors import CheckpointError

_MAX_LEAVES = 100_000_000
_NUM_LISTED = 8


class _SharingPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: SharedPages) -> None:
        super().__init__(file, 5)
        self._memory = memory
        self.areas: set[int] = set()  # that the stream names

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or plain_tensor(value) is None or value.device.type != "cpu":
            return None
        kind = value.dtype, tuple(value.shape)
        if not value.numel():
            return None, *kind  # torch does not pickle empty tensors of every type
        place = self._memory.place_of(value.data_ptr(), value.numel() * value.itemsize)
        if place is None or not value.is_contiguous():
            return None
        self.areas.add(place.area)
        return place, *kind

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or plain_tensor(value) is not None or not is_wrapper(value):
            return NotImplemented
        inner, context = inner_of(value)
        return _rewrapped, (type(value), inner, context, value.size(), value.stride())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: MappedPages) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: Any) -> torch.Tensor:
        place, dtype, shape = pid
        if place is None:
            return torch.empty(shape, dtype=dtype)
        memory: Bytes = self._memory.at(place, prod(shape) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).view(shape)


def _rewrapped(kind: Any, inner: Mapping[str, Any], context: Any, size: torch.Size, stride: Any) -> torch.Tensor:
    wrapper: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
    return wrapper


def pack_state(state: Any, memory: SharedPages) -> tuple[bytes, set[int]]:
    """The stream of a state whose tensors were copied to `memory`, and the areas that it names.

    Raises CheckpointError that names what cannot be sent.
    """
    try:
        return _packed(state, memory)
    except Exception as error:
        failed = _failing(state, memory)
        listed = ", ".join(map(repr, failed[:_NUM_LISTED])) + (" ..." if len(failed) > _NUM_LISTED else "")
        raise CheckpointError(
            f"{listed or 'the state'} cannot be sent to the process that writes checkpoints ({type(error).__name__}: {error}): "
            "define classes at the top level of a module that can be imported, or use flush: thread"
        ) from error


def _packed(state: Any, memory: SharedPages) -> tuple[bytes, set[int]]:
    file = io.BytesIO()
    pickler = _SharingPickler(file, memory)
    pickler.dump(state)
    return file.getvalue(), pickler.areas


def _failing(state: Any, memory: SharedPages) -> list[str]:
    failed = []
    for name, leaf in flatten(state, lambda value: isinstance(value, torch.Tensor), _MAX_LEAVES).items():
        try:
            _packed(leaf.value, memory)
        except Exception:
            failed.append(name)
    return failed


def unpack_state(stream: bytes, memory: MappedPages) -> Any:
    """The state again, over `memory`."""
    return _Unpickler(io.BytesIO(stream), memory).load()


class ReceivedCopies(HostCopies):
    """Knows copies that another process has made in `memory`."""

    def __init__(self, memory: MappedPages) -> None:
        super().__init__()
        self._memory = memory

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._memory.owns(tensor) or super().owns(tensor)
