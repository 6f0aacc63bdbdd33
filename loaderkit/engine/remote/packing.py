"""Packs values for another process: one pickle stream and a list of buffers.

The buffers are the memory of tensors and arrays, which is not copied into the stream. Both ends are our own processes; bytes
from data are never unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import numpy as np
import torch

from loaderkit._internal.dtypes import Bytes, tensor_over

_INLINE_BYTES = 4096  # smaller buffers are cheaper in the stream than in pages of their own


class _Storage:
    """The memory of a tensor, pickled once even if several tensors share it."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_storage, (pickle.PickleBuffer(self.memory.data),)


def _open_storage(memory: Any) -> torch.Tensor:
    array = np.frombuffer(memory, np.uint8)
    # A buffer inside the stream is read-only; the user may write to a batch.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _open_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _open_untyped(memory: torch.Tensor) -> torch.TypedStorage:
    """What torch's own functions take for the storage of a tensor whose dtype has no typed one."""
    storage = memory.untyped_storage()
    return torch.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    """Pickles tensors by their memory instead of in torch's file format. `refuses_main`: objects that are defined in `__main__`
    are refused."""

    def __init__(self, file: io.BytesIO, callback: Callable[[pickle.PickleBuffer], Any], *, refuses_main: bool) -> None:
        super().__init__(file, 5, buffer_callback=callback)
        self._refuses_main = refuses_main
        self._storages: dict[tuple[int, int], _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)):
            if self._refuses_main and value.__module__ == "__main__":
                raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__, which is not run again there")
            return NotImplemented
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            # Of a subclass of Tensor, say. torch's own way fails to read back what it wrote.
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value)
            return _open_untyped, (self._storage_of(whole),)
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        if value.requires_grad:
            return torch.Tensor.requires_grad_, (value.detach(),)
        if not value.numel():
            return _open_empty, (tuple(value.shape), value.stride(), value.dtype)
        # Only the span of the tensor, not its whole storage: a view of a large tensor is sent alone.
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        flat = torch.empty(0, dtype=value.dtype, device="cpu").set_(
            value.untyped_storage(), value.storage_offset(), (span,), (1,)
        )
        dtype = str(value.dtype).removeprefix("torch.")
        return tensor_over, (self._storage_of(flat.view(torch.uint8)), dtype, tuple(value.shape), value.stride())

    def _storage_of(self, memory: torch.Tensor) -> _Storage:
        place = (memory.data_ptr(), memory.numel())
        if place not in self._storages:
            self._storages[place] = _Storage(memory.numpy())
        return self._storages[place]


def _is_plain(value: torch.Tensor) -> bool:
    has_memory = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    return has_memory and not (value.is_conj() or value.is_neg())


def pack(
    value: Any, is_shared: Callable[[memoryview], bool] = lambda buffer: False, *, refuses_main: bool = True
) -> tuple[bytes, list[memoryview]]:
    """The stream and the buffers of a value. Small buffers go into the stream, unless they lie in shared memory already.
    `refuses_main`: the other process does not run `__main__` again, so nothing may be defined there. Raises the errors of
    pickle."""
    buffers: list[memoryview] = []

    def is_inlined(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _INLINE_BYTES and not is_shared(raw):
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, is_inlined, refuses_main=refuses_main).dump(value)
    return file.getvalue(), buffers


def unpack(stream: bytes | memoryview, buffers: Iterable[Any]) -> Any:
    """The value again, over the memory given as `buffers`."""
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - of our own process
