"""`read`: bring the bytes of a chunk's samples into memory.

    source.ranges(i) ──> ByteRange ──> connector.read_into(…) ──> Encoded(view of the chunk's buffer, extension)

A source of objects has no ranges; its `item(i)` is the sample.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loaderkit.schema import StageArgs
from loaderkit.types import Chunk, Connector, Encoded, ItemSource, Sample, Source


class ReadArgs(StageArgs):
    """Read each sample from its source."""


SampleErrors = Callable[[Chunk, int, Exception], None]


def read_ranges(source: Source, connector: Connector, failed: SampleErrors) -> Callable[[Chunk], int]:
    """A chunk stage that fills `chunk.samples`; it returns the number of bytes read.

    All fields of all samples of a chunk lie one behind another in one buffer, reused from chunk to chunk: fresh memory
    for every file costs 16 % of the read (page faults).
    """

    def run(chunk: Chunk) -> int:
        plans = []
        size = 0
        for place, index in enumerate(chunk.indices.tolist()):
            try:
                ranges = source.ranges(index)
            except Exception as error:
                failed(chunk, place, error)
                continue
            plans.append((place, index, ranges))
            size += sum(found.range.length for found in ranges)
        view = _buffer(chunk, size)
        offset = 0
        num_bytes = 0
        for place, index, ranges in plans:
            chunk.place = place
            try:
                sample: Sample = {}
                for field, extension, (key, start, length, etag) in ranges:
                    part = view[offset : offset + length]
                    offset += length
                    if length or start == 0:
                        connector.read_into(key, start, part, etag=etag)
                    sample[field] = Encoded(part, extension)
                    num_bytes += length
                sample.update(source.constants(index))
                chunk.samples[place] = sample
            except Exception as error:
                failed(chunk, place, error)
        return num_bytes

    return run


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
