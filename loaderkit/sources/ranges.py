"""Sources whose samples are byte ranges of objects, and the reader for them.

source.table(indices) ──> Ranges ──> connector.read_many(…) ──> Encoded(view of the chunk's memory, extension)

If a source's samples differ in their fields, `ranges` is called per sample; without `read_many` the connector is called per
range. Large arrays go straight into their slots: see `arrays_in_place`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from time import perf_counter
from typing import Any

import numpy as np

from loaderkit import native
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import Connector, Ranges, bulk_of
from loaderkit.errors import STORE_FAILURES
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import FieldRange, Sample
from loaderkit.samples.values import Encoded
from loaderkit.sources.arrays_in_place import InPlaceReads
from loaderkit.sources.base import ReadContext, Reader, Source

_ALIGNMENT = 64
Errors = Mapping[int, Exception]
"""Errors by the index of the range."""
_Values = tuple[list[Any], Errors]
"""The values read, one per range, and the errors."""


class RangeSource(Source):
    """A source whose samples are byte ranges, one for each field. It has `table`, or `ranges` if samples differ in
    their fields."""

    has_ranges = True

    def reader(self, context: ReadContext) -> Reader:
        """A reader of ranges. Fields are `Encoded`, or bytes where only `batch` follows."""
        fetch = None if context.in_place is None else InPlaceReads(context.store, *context.in_place).fetch
        return RangeReader(self, context, as_bytes=context.is_last, fetch=fetch)


class RangeReader(Reader):
    """Fills `chunk.samples`. All fields of a chunk's samples lie in one buffer, except the fields that `fetch` reads."""

    def __init__(
        self,
        source: Source,
        context: ReadContext,
        *,
        value_of: Callable[[memoryview, str], Any] = Encoded,
        as_bytes: bool = False,
        fetch: Callable[[SampleChunk, int, FieldRange], Any] | None = None,
        reuse: bool = True,
    ) -> None:
        """`value_of` makes a field's value of its bytes and its extension. `as_bytes`: no stage decodes the bytes, so
        samples get copies. `fetch` reads one field of the sample at a row of a chunk by itself; None if it must be read
        with the others. With `reuse` the buffer is the same from chunk to chunk."""
        self._source, self._failed, self._fetch = source, context.failed, fetch
        self._value_of, self._as_bytes, self._reuse = value_of, as_bytes, reuse
        self._read_many, self._read_into = bulk_calls(context.store)

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        table = self._source.table(chunk.source_indices) if self._fetch is None else None
        if table is None:
            plan = self._one_by_one(chunk)
            extensions = [extension for names in plan.names for _, extension in names]
            ranges, owners, num_bytes = plan.ranges, plan.owners, plan.num_bytes
            values, errors = self._read_all(chunk, ranges, extensions, owners)
            plan.fill(chunk, values)
        else:
            num_samples, num_fields = len(chunk.source_indices), len(table.fields)
            ranges, num_bytes = table.ranges, sum(table.ranges.lengths)
            extensions = [extension for _, extension in table.fields] * num_samples

            def owners() -> list[int]:
                return [row for row in range(num_samples) for _ in range(num_fields)]

            values, errors = self._read_all(chunk, ranges, extensions, owners)
            columns = {field: values[k::num_fields] for k, (field, _) in enumerate(table.fields)}
            columns.update(table.constants)
            if self._as_bytes and not errors and chunk.work_item.specs:
                chunk.columns = columns
            else:
                chunk.samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return num_bytes - (self._mark_failed(chunk, ranges, owners(), errors) if errors else 0)

    def _read_all(
        self, chunk: SampleChunk, ranges: Ranges, extensions: list[str], owners: Callable[[], list[int]]
    ) -> _Values:
        lengths = ranges.lengths
        sizes = lengths if self._as_bytes else [-(-n // _ALIGNMENT) * _ALIGNMENT for n in lengths]
        offsets = list(accumulate(sizes, initial=0))
        size = offsets.pop()
        view = chunk.memory("read", size) if self._reuse else np.empty(size, np.uint8).data
        chunk.current = None
        if self._read_many is None:
            errors = read_each(self._read_into, chunk, ranges, owners=owners(), offsets=offsets, view=view)
        else:
            errors = self._read_many(ranges, offsets, view)
        if self._as_bytes:
            return native.cut(view, lengths), errors
        views = [view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        return list(map(self._value_of, views, extensions)), errors

    def _one_by_one(self, chunk: SampleChunk) -> _Plan:
        plan, source, fetch = _Plan(), self._source, self._fetch
        for row, index in enumerate(chunk.source_indices.tolist()):
            chunk.current = row
            try:
                field_ranges = source.ranges(index)
                fetched = [(each, fetch(chunk, row, each) if fetch is not None else None) for each in field_ranges]
            except Exception as error:
                self._failed(chunk, row, error)
                continue
            plan.add(row, fetched, source.constants(index))
        return plan

    def _mark_failed(self, chunk: SampleChunk, ranges: Ranges, owners: list[int], errors: Errors) -> int:
        """Mark the samples with failed ranges as failed; returns the number of bytes not read."""
        for number in sorted(errors):
            if owners[number] not in chunk.failures:  # a sample's first error is reported
                self._failed(chunk, owners[number], errors[number])
        return sum(ranges.lengths[number] for number in errors)


class _Plan:
    """The ranges of samples whose fields differ: for each sample its row in the chunk, its (field, extension)s and its
    constants, and all ranges in that order."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.names: list[tuple[tuple[str, str], ...]] = []
        self.constants: list[Sample] = []
        self.ranges = Ranges([], [], [], [])
        self.num_bytes = 0  # of all samples
        self.fetched: list[tuple[int, str, Any]] = []  # (row, field, value) of the fields read by `fetch`

    def add(self, row: int, fetched: list[tuple[FieldRange, Any]], constants: Sample) -> None:
        """The sample at a row: its fields, each with the value that `fetch` has read, or None."""
        self.rows.append(row)
        self.constants.append(constants)
        self.names.append(tuple((each.field, each.extension) for each, value in fetched if value is None))
        for each, value in fetched:
            self.num_bytes += each.range.length
            if value is not None:
                self.fetched.append((row, each.field, value))
                continue
            columns: tuple[list[Any], ...] = self.ranges
            for column, item in zip(columns, each.range, strict=True):
                column.append(item)

    def owners(self) -> list[int]:
        """The row of each range's sample."""
        return [row for row, names in zip(self.rows, self.names, strict=True) for _ in names]

    def fill(self, chunk: SampleChunk, values: Iterable[Any]) -> None:
        """Build the samples from the values, which are in the order of the ranges."""
        remaining = iter(values)
        for row, names, constants in zip(self.rows, self.names, self.constants, strict=True):
            chunk.samples[row] = {field: next(remaining) for field, _ in names} | constants
        for row, field, value in self.fetched:
            sample = chunk.samples[row]
            if sample is not None:
                sample[field] = value


def bulk_calls(connector: Connector) -> tuple[Callable[..., Errors] | None, Callable[..., None]]:
    """`read_many` of a connector, if it has that, and `read_into`."""
    read_many = bulk_of(connector).read_many
    return None if read_many is None else ending_forks(read_many), ending_forks(connector.read_into)


def read_each(
    read_into: Callable[..., None],
    chunk: SampleChunk,
    ranges: Ranges,
    *,
    owners: list[int],
    offsets: list[int],
    view: memoryview,
) -> Errors:
    """`read_many` for a connector without it. `owners` are the rows of the ranges."""
    errors: dict[int, Exception] = {}
    bad: set[int] = set()
    slowest = (0.0, 0)
    for number, (key, start, length, etag) in enumerate(zip(*ranges, strict=True)):
        chunk.current = owners[number]
        if chunk.current in bad:  # each further range of a bad sample could take a timeout
            continue
        begin_s = perf_counter()
        try:
            if length or start == 0:
                read_into(key, start, view[offsets[number] : offsets[number] + length], etag=etag)
        except Exception as error:
            errors[number] = error
            bad.add(owners[number])
            if isinstance(error, STORE_FAILURES):  # the other ranges would take as long to fail alike
                return errors | dict.fromkeys(range(number + 1, len(owners)), error)
        slowest = max(slowest, (perf_counter() - begin_s, chunk.current))
    chunk.slowest = slowest
    return errors
