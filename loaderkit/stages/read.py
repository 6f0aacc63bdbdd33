"""`read`: bring the bytes of a chunk's samples into memory.

    source.ranges(i) ──> ByteRange ──> connector.read_into(…) ──> Encoded(view of the chunk's buffer, extension)

A source of objects has no ranges; its `item(i)` is the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loaderkit.schema import StageArgs
from loaderkit.types import Chunk, Connector, Encoded, FieldRange, ItemSource, Sample, Source


class ReadArgs(StageArgs):
    """Read each sample from its source."""


SampleErrors = Callable[[Chunk, int, Exception], None]


Fetch = Callable[[Chunk, int, FieldRange], Any]
"""Reads one field of the sample at a place of a chunk on a way of its own; None if it has to go the ordinary one."""


def read_ranges(
    source: Source, connector: Connector, failed: SampleErrors, fetch: Fetch | None = None
) -> Callable[[Chunk], int]:
    """A chunk stage that fills `chunk.samples`; it returns the number of bytes read.

    All fields of all samples of a chunk, but for those that `fetch` takes upon itself, lie one behind another in one buffer,
    reused from chunk to chunk. Each begins at a multiple of 64, as arrays like it.
    """

    def plan(chunk: Chunk) -> tuple[list[_Planned], int]:
        plans = []
        size = 0
        for place, index in enumerate(chunk.indices.tolist()):
            chunk.place = place
            try:
                ranges = source.ranges(index)
                fetched = [fetch(chunk, place, found) if fetch is not None else None for found in ranges]
            except Exception as error:
                failed(chunk, place, error)
                continue
            plans.append((place, index, ranges, fetched))
            size += sum(_room(found) for found, value in zip(ranges, fetched, strict=True) if value is None)
        return plans, size

    def run(chunk: Chunk) -> int:
        plans, size = plan(chunk)
        view = chunk.memory("read", size)
        offset = 0
        num_bytes = 0
        for place, index, ranges, fetched in plans:
            chunk.place = place
            try:
                sample: Sample = {}
                for found, value in zip(ranges, fetched, strict=True):
                    field, extension, (key, start, length, etag) = found
                    num_bytes += length
                    if value is not None:
                        sample[field] = value
                        continue
                    part = view[offset : offset + length]
                    offset += _room(found)
                    if length or start == 0:
                        connector.read_into(key, start, part, etag=etag)
                    sample[field] = Encoded(part, extension)
                sample.update(source.constants(index))
                chunk.samples[place] = sample
            except Exception as error:
                failed(chunk, place, error)
        return num_bytes

    return run


_Planned = tuple[int, int, list[FieldRange], list[Any]]


def _room(found: FieldRange) -> int:
    return -(-found.range.length // 64) * 64


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
