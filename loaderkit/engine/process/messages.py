"""The messages from a worker process to the trainer, and how their values are packed.

A value is one pickle stream and a list of buffers: the memory of tensors and arrays, which is not copied into the stream.
A message says where each buffer lies: in a slab, or in a block it was copied to. Both ends are our own processes; bytes from
data are never unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from loaderkit._internal.dtypes import Bytes, tensor_over
from loaderkit.engine.metrics.stalls import WaitSegment
from loaderkit.engine.process import error_transport
from loaderkit.engine.process.shared_memory import Allocator, Block, SharedArena
from loaderkit.engine.work import SourceCounts
from loaderkit.errors import StageError

_INLINE_BYTES = 4096  # smaller buffers are cheaper in the stream than in pages of their own
_INLINE_BODY = 8192  # a longer body is sent through the arena: a socket holds only about 200 kB
_ALIGNMENT = 64

# ------------------------------------------------------------------------------------------------- values


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
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        # Only the span of the tensor, not its whole storage: a view of a large tensor is sent alone.
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        memory = (value.data_ptr(), span * value.itemsize)
        if memory not in self._storages:
            flat = torch.empty(0, dtype=value.dtype, device="cpu").set_(
                value.untyped_storage(), value.storage_offset(), (span,), (1,)
            )
            self._storages[memory] = _Storage(flat.view(torch.uint8).numpy())
        dtype = str(value.dtype).removeprefix("torch.")
        return tensor_over, (self._storages[memory], dtype, tuple(value.shape), value.stride())


def _is_plain(value: torch.Tensor) -> bool:
    has_memory = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    return has_memory and value.numel() > 0 and not (value.requires_grad or value.is_conj() or value.is_neg())


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


class PackedValue(NamedTuple):
    """A packed value. `body` is the pickled (stream, spans of the buffers), or the block that holds it; `blocks` are all
    blocks that the value needs."""

    body: bytes | Block
    blocks: tuple[Block, ...]

    def open(self, memory: Bytes) -> Any:
        """The value, over the arena's `memory`."""
        body: Any = self.body
        if isinstance(body, Block):
            body = memory[body.start : body.start + body.size]
        stream, spans = unpack(body, ())
        return unpack(stream, [memory[start : start + size] for start, size in spans])


def post(value: Any, arena: SharedArena, allocator: Allocator) -> tuple[PackedValue, list[Block]]:
    """Pack a value into the arena: buffers that lie there are named by their span, the others are copied into one block.

    Returns the packed value and the blocks borrowed for it, to be given back when the other side has released it. Raises the
    errors of pickle, and OSError when shared memory is short.
    """

    def locate(buffer: memoryview) -> tuple[Block, Block] | None:
        address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] if buffer.nbytes else 0
        return allocator.block_of(address, buffer.nbytes)

    stream, buffers = pack(value, lambda buffer: locate(buffer) is not None)
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    located = [locate(buffer) for buffer in buffers]
    loose = [array for array, span_and_block in zip(arrays, located, strict=True) if span_and_block is None]
    borrowed: list[Block] = []
    try:
        copies = iter(_copy(loose, arena, allocator, borrowed))
        spans = [tuple(span_and_block[0] if span_and_block is not None else next(copies)) for span_and_block in located]
        body = pickle.dumps((stream, spans), 5)
        kept: bytes | Block = body
        if len(body) > _INLINE_BODY:
            (kept,) = _copy([np.frombuffer(body, np.uint8)], arena, allocator, borrowed)
    except BaseException:
        for block in borrowed:
            allocator.free(block)
        raise
    blocks = {span_and_block[1] for span_and_block in located if span_and_block is not None}
    return PackedValue(kept, (*blocks, *borrowed)), borrowed


def _copy(arrays: Sequence[Bytes], arena: SharedArena, allocator: Allocator, borrowed: list[Block]) -> list[Block]:
    """Copy arrays into one block, which is added to `borrowed`; returns where each lies."""
    starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
    if not arrays:
        return []
    block = allocator.borrow(starts[-1])
    borrowed.append(block)
    copies = [Block(block.start + start, array.nbytes) for start, array in zip(starts, arrays, strict=False)]
    for copy, array in zip(copies, arrays, strict=True):
        arena.view(copy)[:] = array
    return copies


# ------------------------------------------------------------------------------------------------ messages


@dataclass
class Delivered:
    """A finished work item that a worker process sends. `failures` and `error` are packed in the message."""

    epoch: int
    end: int
    num_items: int
    name: str  # in messages
    result: Any
    context: Any  # of the result, for stages in the trainer's process
    failures: Sequence[Any]  # tuples with a field `error`
    num_dropped: int
    is_empty: bool
    is_end: bool
    source_state: Any
    error: BaseException | None
    done_s: float
    segments: Sequence[WaitSegment]
    num_skipped: int = 0
    by_source: SourceCounts | None = None

    def __len__(self) -> int:
        return self.num_items

    def sealed(self) -> Delivered:
        """A copy with packed errors."""
        failures: Any = [failure._replace(error=error_transport.pack_error(failure.error)) for failure in self.failures]
        error: Any = None if self.error is None else error_transport.pack_error(self.error)
        return Delivered(**{**self.__dict__, "failures": failures, "error": error})

    def unsealed(self, where: str = "the process that loads") -> Delivered:
        """The inverse of `sealed`; `where` it was made, for the tracebacks of errors."""
        failures = []
        for failure in self.failures:
            error = error_transport.unpack_error(failure.error, where)
            assert isinstance(error, StageError)
            failures.append(failure._replace(error=error))
        sealed: Any = self.error
        raised = None if sealed is None else error_transport.unpack_error(sealed, where)
        return Delivered(**{**self.__dict__, "failures": failures, "error": raised})


class BatchMessage(NamedTuple):
    """A finished batch. `generation` is the number of seeks before it; the trainer releases its memory by `number`."""

    generation: int
    number: int
    packed: PackedValue


class FailureMessage(NamedTuple):
    """The engine has stopped for good."""

    error: error_transport.PackedError


class ReadyMessage(NamedTuple):
    """The engine exists: the process answers questions from now on."""


class LogMessage(NamedTuple):
    """A log record of a worker process, as a dict for `logging.makeLogRecord`."""

    record: dict[str, Any]
