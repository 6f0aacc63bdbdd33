"""Packs values for another process: one pickle stream and a list of buffers.

The buffers are the memory of tensors and arrays, which is not copied into the stream. Both ends are our own processes; bytes
from data are never unpickled.

Functions and classes are sent by name. Those that the other process cannot find by name (of a script or a notebook,
lambdas, closures) are sent by value, by cloudpickle. It recognises a class that comes back, so both sides have one
class.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from loaderkit._internal.dtypes import Bytes, tensor_over
from loaderkit.errors import ConfigError

_INLINE_BYTES = 4096  # smaller buffers are cheaper in the stream than in pages of their own


class _SharedStorage:
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
    """The storage that torch's own functions take for a tensor whose dtype has no typed storage."""
    storage = memory.untyped_storage()
    return torch.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]


_MAIN = ("__main__", "__mp_main__")
"""The names of the main module, which another process does not run again; the second is its name in a child of
multiprocessing."""


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class _Tensors:
    """Pickles tensors by their memory instead of in torch's file format."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], _SharedStorage] = {}
        self.generators: set[str] = set()  # the types of those that were met

    def reduce(self, value: Any) -> Any:
        """NotImplemented for an object that is pickled in the usual way."""
        if isinstance(value, _GENERATORS):
            self.generators.add(f"{type(value).__module__}.{type(value).__qualname__}")
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

    def _storage_of(self, memory: torch.Tensor) -> _SharedStorage:
        place = (memory.data_ptr(), memory.numel())
        if place not in self._storages:
            self._storages[place] = _SharedStorage(memory.numpy())
        return self._storages[place]


class _ByName(pickle.Pickler):
    """Refuses functions and classes of the main module, unless the other process has the same one."""

    def __init__(
        self, file: Any, callback: Callable[[pickle.PickleBuffer], Any], *, is_same_main: bool = False
    ) -> None:
        super().__init__(file, 5, buffer_callback=callback)
        self._refused = () if is_same_main else _MAIN
        self.tensors = _Tensors()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)):
            if value.__module__ in self._refused:
                raise pickle.PicklingError(f"{value.__qualname__} is defined in {value.__module__}")
            return NotImplemented
        return self.tensors.reduce(value)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: Any, callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, 5, buffer_callback=callback)
        self.tensors = _Tensors()
        if (main := sys.modules.get("__mp_main__")) is not None:
            cloudpickle.register_pickle_by_value(main)

    def reducer_override(self, value: Any) -> Any:
        # cloudpickle sends modules that a function may mean along: torch.classes for `self.classes` beside `torch`. It knows
        # only those of the plain type.
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return import_module, (value.__name__,)
        reduced = self.tensors.reduce(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _is_plain(value: torch.Tensor) -> bool:
    has_memory = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    return has_memory and not (value.is_conj() or value.is_neg())


def check_packs(where: str, value: Any, receiver: str, otherwise: str) -> None:
    """Raise ConfigError if a value of the config, at `where`, cannot be sent to the process `receiver`."""
    try:
        pack(value)
    except Exception as error:
        raise ConfigError(
            f"{where}: {value!r} cannot be sent to {receiver}: {error}. Let it open files, locks and connections when it is "
            f"first used; or {otherwise}"
        ) from error


def pack(
    value: Any, is_shared: Callable[[memoryview], bool] = lambda buffer: False, *, is_same_main: bool = False
) -> tuple[bytes, list[memoryview]]:
    """The stream and the buffers of a value. Small buffers go into the stream, unless they lie in shared memory already.
    `is_same_main`: the other process runs the same script. Raises the errors of pickle."""
    try:
        return _pack(partial(_ByName, is_same_main=is_same_main), value, is_shared)
    except Exception:
        return _pack(_ByValue, value, is_shared)


def _pack(
    pickler: Callable[[io.BytesIO, Callable[[pickle.PickleBuffer], Any]], pickle.Pickler],
    value: Any,
    is_shared: Callable[[memoryview], bool],
) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def is_inlined(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _INLINE_BYTES and not is_shared(raw):
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    pickler(file, is_inlined).dump(value)
    return file.getvalue(), buffers


class Packed(NamedTuple):
    """The size of a value when it is packed, a digest of its bytes, and the types of the random generators in it."""

    num_bytes: int
    digest: bytes
    generators: frozenset[str]


def measured(value: Any, most: int) -> Packed | None:
    """The stream and the buffers that `pack` would make, without making them, or None if they have more than `most`
    bytes. Raises the errors of pickle."""
    try:
        return _measured(_ByName, value, most)
    except _TooManyError:
        return None
    except Exception:
        try:
            return _measured(_ByValue, value, most)
        except _TooManyError:
            return None


class _TooManyError(Exception):
    pass


def _measured(make: Callable[..., _ByName | _ByValue], value: Any, most: int) -> Packed:
    num_bytes, digest = 0, blake2b(digest_size=16)

    def add(data: memoryview) -> int:
        nonlocal num_bytes
        num_bytes += data.nbytes
        if num_bytes > most:
            raise _TooManyError
        digest.update(data)
        return data.nbytes

    class File:
        @staticmethod
        def write(data: Any) -> int:
            return add(memoryview(data))

    def leave_out(buffer: pickle.PickleBuffer) -> None:
        add(buffer.raw())

    pickler = make(File, leave_out)
    pickler.dump(value)
    return Packed(num_bytes, digest.digest(), frozenset(pickler.tensors.generators))


def unpack(stream: bytes | memoryview, buffers: Iterable[Any]) -> Any:
    """The value again, over the memory given as `buffers`."""
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - of our own process


class PackedOnce:
    """A value as it is now, with copies of its buffers: each process that is sent this, now or later, gets that value.
    Raises the errors of pickle."""

    def __init__(self, value: Any) -> None:
        stream, buffers = pack(value)
        self._stream, self._buffers = stream, [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self._stream, self._buffers)
