"""`read`: bring the bytes of a chunk's samples into memory.

    source.ranges(i) ──> ByteRange ──> connector.read_many(…) ──> Encoded(view of the chunk's buffer, extension)

A source of objects has no ranges; its `item(i)` is the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np

from loaderkit.native import kernels
from loaderkit.schema import StageArgs
from loaderkit.types import BulkConnector, Chunk, Connector, Encoded, ItemSource, Ranges, Sample, Source, Table


class ReadArgs(StageArgs):
    """Read each sample from its source."""


SampleErrors = Callable[[Chunk, int, Exception], None]


def read_ranges(
    source: Source, connector: Connector, failed: SampleErrors, *, as_bytes: bool = False
) -> Callable[[Chunk], int]:
    """A chunk stage that fills `chunk.samples`; it returns the number of bytes read.

    All fields of all samples of a chunk lie one behind another in one buffer, reused from chunk to chunk: fresh memory
    for every file costs 16 % of the read (page faults). `as_bytes`: nobody decodes them, so copies are handed on.
    """

    table_of = getattr(source, "table", None)
    read_many = connector.read_many if isinstance(connector, BulkConnector) else None

    def run(chunk: Chunk) -> int:
        table: Table | None = None if table_of is None else table_of(chunk.indices)
        if table is None:
            places, fields, ranges = _one_by_one(source, chunk, failed)
        else:
            places, fields, ranges = list(range(len(chunk))), [table.fields] * len(chunk), table.ranges
        ends = list(accumulate(ranges.lengths))
        offsets = [0, *ends[:-1]]
        size = ends[-1] if ends else 0
        view = _buffer(chunk, size)
        if read_many is None:
            owners = [place for place, names in zip(places, fields, strict=True) for _ in names]
            parts = [view[begin:end] for begin, end in zip(offsets, ends, strict=False)]
            errors = _read_each(connector, ranges, parts, chunk, owners)
        else:
            errors = read_many(ranges, offsets, view)
        indices = chunk.indices.tolist()
        pieces = iter(
            _cut(view, ranges.lengths, offsets) if as_bytes else _views(view, ranges.lengths, offsets, fields)
        )
        for place, names in zip(places, fields, strict=True):
            sample: Sample = {field: next(pieces) for field, _ in names}
            sample.update(source.constants(indices[place]))
            chunk.samples[place] = sample
        if errors:
            owners = [place for place, names in zip(places, fields, strict=True) for _ in names]
            for number, error in errors.items():
                failed(chunk, owners[number], error)
        return size

    return run


def _cut(view: memoryview, lengths: list[int], offsets: list[int]) -> list[bytes]:
    if kernels is not None:
        found: list[bytes] = kernels.cut(view, lengths)
        return found
    return [bytes(view[offset : offset + length]) for offset, length in zip(offsets, lengths, strict=False)]


def _views(view: memoryview, lengths: list[int], offsets: list[int], fields: list[_Names]) -> list[Encoded]:
    extensions = [extension for names in fields for _, extension in names]
    return [
        Encoded(view[offset : offset + length], extension)
        for offset, length, extension in zip(offsets, lengths, extensions, strict=False)
    ]


_Names = tuple[tuple[str, str], ...]


def _one_by_one(source: Source, chunk: Chunk, failed: SampleErrors) -> tuple[list[int], list[_Names], Ranges]:
    """The places of the samples that have ranges, their fields with extensions, and the ranges."""
    places: list[int] = []
    fields: list[_Names] = []
    ranges = Ranges([], [], [], [])
    for place, index in enumerate(chunk.indices.tolist()):
        try:
            found = source.ranges(index)
        except Exception as error:
            failed(chunk, place, error)
            continue
        places.append(place)
        fields.append(tuple((field, extension) for field, extension, _ in found))
        for _, _, (key, start, length, etag) in found:
            ranges.keys.append(key)
            ranges.starts.append(start)
            ranges.lengths.append(length)
            ranges.etags.append(etag)
    return places, fields, ranges


def _read_each(
    connector: Connector, ranges: Ranges, parts: list[memoryview], chunk: Chunk, owners: list[int]
) -> Mapping[int, Exception]:
    """`read_many` of a connector that has none."""
    errors: dict[int, Exception] = {}
    for number, (key, start, length, etag) in enumerate(zip(*ranges, strict=True)):
        chunk.place = owners[number]
        try:
            if length or start == 0:
                connector.read_into(key, start, parts[number], etag=etag)
        except Exception as error:
            errors[number] = error
    return errors


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
