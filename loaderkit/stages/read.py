"""`read`: bring the bytes of a chunk's samples into memory.

    source.ranges(i) ──> ByteRange ──> connector.read_many(…) ──> Encoded(view of the chunk's buffer, extension)

A source of objects has no ranges; its `item(i)` is the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from loaderkit.schema import StageArgs
from loaderkit.types import BulkConnector, ByteRange, Chunk, Connector, Encoded, FieldRange, ItemSource, Sample, Source


class ReadArgs(StageArgs):
    """Read each sample from its source."""


SampleErrors = Callable[[Chunk, int, Exception], None]


def read_ranges(source: Source, connector: Connector, failed: SampleErrors) -> Callable[[Chunk], int]:
    """A chunk stage that fills `chunk.samples`; it returns the number of bytes read.

    All fields of all samples of a chunk lie one behind another in one buffer, reused from chunk to chunk: fresh memory
    for every file costs 16 % of the read (page faults).
    """

    read_all = connector.read_many if isinstance(connector, BulkConnector) else partial(_read_singly, connector)

    def run(chunk: Chunk) -> int:
        plans: list[tuple[int, int, list[FieldRange]]] = []
        wanted: list[ByteRange] = []
        size = 0
        for place, index in enumerate(chunk.indices.tolist()):
            try:
                ranges = source.ranges(index)
            except Exception as error:
                failed(chunk, place, error)
                continue
            plans.append((place, index, ranges))
            for found in ranges:
                wanted.append(found[2])
                size += found[2][2]
        view = _buffer(chunk, size)
        errors = iter(read_all(wanted, view))
        offset = 0
        for place, index, ranges in plans:
            chunk.place = place
            sample: Sample = {}
            bad: Exception | None = None
            for field, extension, (_, _, length, _) in ranges:
                sample[field] = Encoded(view[offset : offset + length], extension)
                offset += length
                bad = next(errors) or bad
            if bad is None:
                try:
                    sample.update(source.constants(index))
                except Exception as error:
                    bad = error
            if bad is None:
                chunk.samples[place] = sample
            else:
                failed(chunk, place, bad)
        return size

    return run


def _read_singly(connector: Connector, ranges: list[ByteRange], buffer: memoryview) -> Iterator[Exception | None]:
    """`read_many` of a connector that has none. It reads as it is asked, so that reports name the sample it hangs at."""
    offset = 0
    for key, start, length, etag in ranges:
        part = buffer[offset : offset + length]
        offset += length
        error: Exception | None = None
        try:
            if length or start == 0:
                connector.read_into(key, start, part, etag=etag)
        except Exception as raised:
            error = raised
        yield error


def _buffer(chunk: Chunk, size: int) -> memoryview:
    buffer = chunk.scratch.get("read")
    if buffer is None or len(buffer) < size:
        buffer = np.empty(max(1, size + size // 4), np.uint8).data
        chunk.scratch["read"] = buffer
    return buffer[:size]


def read_items(source: ItemSource, failed: SampleErrors) -> Callable[[Chunk], int]:
    """A chunk stage that asks the source for each sample."""

    def run(chunk: Chunk) -> int:
        for place, index in enumerate(chunk.indices.tolist()):
            chunk.place = place
            try:
                chunk.samples[place] = source.item(index)
            except Exception as error:
                failed(chunk, place, error)
        return 0

    return run
