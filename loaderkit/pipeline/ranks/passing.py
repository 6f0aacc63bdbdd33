"""Sends batches as messages between ranks: a head of fixed size, which holds a short body, and the memory of large tensors.

The bytes are a pickle, as in torch's `broadcast_object_list`: the ranks of a job trust one another. Bytes from data
are never unpickled.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from loaderkit._internal import packing
from loaderkit.engine.base import Engine
from loaderkit.engine.contracts import Executor
from loaderkit.engine.remote import error_transport
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.work import Delivery, WorkItem
from loaderkit.errors import StageError
from loaderkit.ranks.channel import PeerChannel

_HEAD_BYTES = 4096
_LENGTH = struct.Struct("<Q")


class Passed(NamedTuple):
    """A batch, or the error in its place. `generation` is the number of seeks before it, `begin` the (epoch, position)
    where it begins."""

    generation: int
    begin: tuple[int, int]
    batch: Delivered | None
    failure: BaseException | None = None  # of the executor that reads, or of the thread that passes batches on
    num_bytes: int = 0  # of the large tensors


def send(channel: PeerChannel, passed: Passed) -> Passed:
    """Pass a batch on to the other ranks. Returns it, or, if it cannot be sent, an error in its place. Raises PeerError."""
    try:
        parts = _packed(passed)
    except Exception as error:
        assert passed.batch is not None
        failed = _unsendable(passed.batch, error)
        passed = passed._replace(batch=replace(passed.batch, result=None, error=failed))
        parts = _packed(passed)
    channel.send(parts)
    return passed._replace(num_bytes=sum(part.nbytes for part in parts[1:]))


def receive(channel: PeerChannel, make: Callable[[int], torch.Tensor], began: Callable[[], None]) -> Passed:
    """The next batch, once it has been passed on; `make(num_bytes)` gives the memory of a large tensor. `began` is
    called when it begins to arrive. Raises PeerError."""
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
    channel.receive([head])
    began()
    (length,) = _LENGTH.unpack(head[: _LENGTH.size].numpy().data)
    parts = [head]
    if length > _HEAD_BYTES - _LENGTH.size:
        parts.append(torch.empty(length, dtype=torch.uint8))
        channel.receive(parts[1:], 1)
        body = parts[1].numpy().data
    else:
        body = head[_LENGTH.size : _LENGTH.size + length].numpy().data
    sizes, stream = pickle.loads(body)  # noqa: S301 - of a rank of our own job
    buffers = [make(size) for size in sizes]
    channel.receive(buffers, len(parts))
    channel.send([*parts, *buffers])
    where = f"rank {channel.reader}, which reads for this rank"
    generation, begin, sealed, failure = packing.unpack(stream, [buffer.numpy() for buffer in buffers])
    num_bytes = sum(sizes)
    if failure is not None:
        return Passed(generation, begin, None, _told(error_transport.unpack_error(failure, where), channel.reader))
    batch = sealed.unsealed(where)
    if batch.error is not None:
        batch = replace(batch, error=_told(batch.error, channel.reader))
    return Passed(generation, begin, batch, None, num_bytes)


def delivered(inner: Executor, item: Delivery) -> Delivered:
    """A batch of the executor, with its context for later stages."""
    if isinstance(item, Delivered):
        return item
    assert isinstance(item, WorkItem)
    assert isinstance(inner, Engine)
    has_result = item.error is None and not item.is_empty
    return Delivered(
        epoch=item.epoch,
        end=item.end,
        num_items=len(item),
        name=str(item),
        result=item.result if has_result else None,
        context=inner.plan.context(item) if has_result else None,
        failures=item.failures,
        num_dropped=item.num_dropped,
        num_skipped=item.num_skipped,
        by_source=item.by_source,
        is_empty=item.is_empty,
        is_end=item.is_end,
        source_state=item.source_state,
        error=item.error,
        done_s=item.done_s,
        segments=(),
    )


def _packed(passed: Passed) -> list[torch.Tensor]:
    """The head, the body if it is long, and the large tensors, as uint8 tensors over their memory."""
    batch, failure = passed.batch, passed.failure
    for name, value in (batch.result or {}).items() if batch is not None else ():
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise TypeError(f"{name} lies on {value.device}")
    value = (
        passed.generation,
        passed.begin,
        None if batch is None else replace(batch, segments=()).sealed(),
        None if failure is None else error_transport.pack_error(failure),
    )
    stream, buffers = packing.pack(value, is_same_main=True)
    body = pickle.dumps(([buffer.nbytes for buffer in buffers], stream), 5)
    is_short = len(body) <= _HEAD_BYTES - _LENGTH.size
    head = np.zeros(_HEAD_BYTES, np.uint8)
    text = _LENGTH.pack(len(body)) + (body if is_short else b"")
    head[: len(text)] = np.frombuffer(text, np.uint8)
    parts = [torch.from_numpy(head)]
    if not is_short:
        parts.append(torch.from_numpy(np.frombuffer(body, np.uint8).copy()))
    for buffer in buffers:
        array = np.frombuffer(buffer, np.uint8)
        parts.append(torch.from_numpy(array if array.flags.writeable else array.copy()))
    return parts


def _told(error: BaseException, reader: int) -> BaseException:
    error.add_note(f"This is the error of rank {reader}, which reads the batches that this rank needs.")
    return error


def _unsendable(batch: Delivered, error: Exception) -> StageError:
    """The error for a batch that cannot be packed; it names the field."""
    result: dict[str, Any] = batch.result or {}
    name = next((name for name, value in result.items() if not _can_pack(value)), None)
    what = "it" if name is None else f"its field {name!r}, a {type(result[name]).__name__},"
    failed = StageError(
        f"{batch.name} cannot be passed on to other ranks: {what} cannot be sent ({type(error).__name__}: {error}); let "
        "batches hold plain data and tensors on the CPU, or set ranks: {share: read}",
        stage="batch",
        epoch=batch.epoch,
    )
    failed.__cause__ = error
    return failed


def _can_pack(value: Any) -> bool:
    try:
        packing.pack(value, is_same_main=True)
    except Exception:
        return False
    return not (isinstance(value, torch.Tensor) and value.device.type != "cpu")
