"""The messages from a worker process to the trainer, over shared memory.

A message says where each buffer of a packed value lies: in a slab, or in a block it was copied to.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.packing import pack, unpack
from loaderkit.engine.process.shared_memory import Allocator, Block, SharedArena
from loaderkit.engine.remote import error_transport

_INLINE_BODY = 8192  # a longer body is sent through the arena: a socket holds only about 200 kB
_ALIGNMENT = 64


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

    Returns the packed value and the blocks allocated for it, to be given back when the other side has released it.
    Raises the errors of pickle, and OSError when shared memory is short.
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
