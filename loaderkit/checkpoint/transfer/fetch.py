"""Reads of several byte ranges at once, into memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.checkpoint.transfer.plan import PreparedRead, ReadRequest
from loaderkit.checkpoint.transfer.session import TransferSession, num_workers_of
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo

_FEW = 4  # ranges, for which an engine is not worth its start
_LEAST_MEMORY = 128 * 2**10  # bytes of a worker that reads descriptions
_LABEL = "its description"


def fetch_ranges(
    connector: Connector,
    objects: Mapping[str, ObjectInfo],
    ranges: Sequence[ByteRange],
    *,
    memory_bytes: int,
    num_parts: int = 1,
) -> list[bytes]:
    """The bytes of `ranges`, read by an engine where there are more than a few. Memory: see `TransferSession`."""
    if not ranges:
        return []
    buffers = [bytearray(item.length) for item in ranges]
    if len(ranges) <= _FEW:
        for item, data in zip(ranges, buffers, strict=True):
            connector.read_into(item.key, item.start, memoryview(data), etag=item.etag)
        return [bytes(data) for data in buffers]
    requests = [
        ReadRequest(_LABEL, (item.key, item.start), item.length, 0, _into(item, memoryview(data)))
        for item, data in zip(ranges, buffers, strict=True)
    ]
    workers = max(1, min(num_workers_of(connector, "auto"), memory_bytes // num_parts // _LEAST_MEMORY))
    objects = {**objects, **{item.key: ObjectInfo(item.key, 0, item.etag) for item in ranges if item.etag is not None}}
    with TransferSession(
        requests, connector, objects, memory_bytes=memory_bytes, num_parts=num_parts, num_workers=workers
    ) as session:
        for _ in session:
            pass
    return [bytes(data) for data in buffers]


def fetch_of(connector: Connector, memory_bytes: int = 2**28) -> Callable[[Sequence[ByteRange]], list[bytes]]:
    """`fetch_ranges` for one connector, to read the descriptions of a checkpoint."""
    return partial(fetch_ranges, connector, {}, memory_bytes=memory_bytes)


def _into(item: ByteRange, target: memoryview) -> Callable[[ReadLimits], PreparedRead]:
    def prepare(limits: ReadLimits) -> PreparedRead:
        spans = [
            ByteSpan(_LABEL, item.key, item.start + lo, min(limits.most_bytes, item.length - lo), part, None)
            for lo in range(0, item.length, limits.most_bytes)
            for part in (target[lo : lo + limits.most_bytes],)
        ]
        return spans, list

    return prepare
