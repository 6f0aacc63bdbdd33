"""`read`: read the bytes of a chunk's samples into memory.

    source.table(indices) ──> Ranges ──> connector.read_many(…) ──> Encoded(view of the chunk's memory, extension)

If a source's samples differ in their fields, `ranges` is called per sample; without `read_many` the connector is called per
range. A source of objects has no ranges; its items are the samples. `reading` has what is read in other ways: records of one
size, large arrays, rows of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import getitem
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import Connector, Ranges, bulk_of
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.engine.work import Stage
from loaderkit.errors import STORE_FAILURES, USER_ERRORS
from loaderkit.sources.base import (
    FieldRange,
    ItemSource,
    RecordSource,
    RowSource,
    Sample,
    Sequences,
    SequenceSource,
    SerialSource,
    Source,
)
from loaderkit.sources.iterable import IterableSource, Pass, Preview
from loaderkit.stages.base import Encoded, SampleChunk, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.reading.arrays import DirectRead
from loaderkit.stages.reading.records import read_records
from loaderkit.stages.reading.rows import RowReader
from loaderkit.stages.sequence.chunk import PackedChunk


class ReadArgs(StageArgs):
    """Read each sample from its source."""


SampleErrors = Callable[[SampleChunk, int, BaseException], None]
Fetch = Callable[[SampleChunk, int, FieldRange], Any]
"""Reads one field of the sample at a row of a chunk by itself; None if it must be read with the others."""

_ALIGNMENT = 64
_Int64 = NDArray[np.int64]
_Names = tuple[tuple[str, str], ...]
_Errors = Mapping[int, Exception]
_Values = tuple[list[Any], _Errors]
"""The values read, one per range, and the errors by index of the range."""


class _Plan:
    """The ranges of samples whose fields differ: of each sample its row in the chunk, its (field, extension)s and its
    constants, and all ranges in that order."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.names: list[_Names] = []
        self.constants: list[Sample] = []
        self.ranges = Ranges([], [], [], [])
        self.num_bytes = 0  # of all samples
        self.fetched: list[tuple[int, str, Any]] = []  # (row, field, value) of the fields read by `fetch`

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


def read_ranges(
    source: Source,
    connector: Connector,
    failed: SampleErrors,
    *,
    fetch: Fetch | None = None,
    as_bytes: bool = False,
    value_of: Callable[[memoryview, str], Any] = Encoded,
    reuse: bool = True,
) -> Callable[[SampleChunk], int]:
    """A chunk stage that fills `chunk.samples`; it returns the number of bytes read.

    All fields of a chunk's samples, except those that `fetch` reads, lie in one buffer, with `reuse` the same from chunk to
    chunk. `value_of` makes a field's value of its bytes and its extension. `as_bytes`: no stage decodes them, so samples get
    copies.
    """
    bulk = bulk_of(connector)
    read_many = None if bulk.read_many is None else ending_forks(bulk.read_many)
    read_into = ending_forks(connector.read_into)

    def read_all(chunk: SampleChunk, ranges: Ranges, extensions: list[str], owners: Callable[[], list[int]]) -> _Values:
        lengths = ranges.lengths
        sizes = lengths if as_bytes else [-(-n // _ALIGNMENT) * _ALIGNMENT for n in lengths]
        offsets = list(accumulate(sizes, initial=0))
        size = offsets.pop()
        view = chunk.memory("read", size) if reuse else np.empty(size, np.uint8).data
        chunk.current = None
        if read_many is None:
            errors = _read_each(read_into, chunk, ranges, owners=owners(), offsets=offsets, view=view)
        else:
            errors = read_many(ranges, offsets, view)
        if as_bytes:
            return native.cut(view, lengths), errors
        views = [view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        return list(map(value_of, views, extensions)), errors

    def run(chunk: SampleChunk) -> int:
        table = source.table(chunk.indices) if fetch is None else None
        if table is None:
            plan = _one_by_one(source, chunk, failed, fetch)
            extensions = [extension for names in plan.names for _, extension in names]
            ranges, owners, num_bytes = plan.ranges, plan.owners, plan.num_bytes
            values, errors = read_all(chunk, ranges, extensions, owners)
            plan.fill(chunk, values)
        else:
            num_samples, num_fields = len(chunk.indices), len(table.fields)
            ranges, num_bytes = table.ranges, sum(table.ranges.lengths)
            extensions = [extension for _, extension in table.fields] * num_samples

            def owners() -> list[int]:
                return [row for row in range(num_samples) for _ in range(num_fields)]

            values, errors = read_all(chunk, ranges, extensions, owners)
            columns = {field: values[k::num_fields] for k, (field, _) in enumerate(table.fields)}
            columns.update(table.constants)
            if as_bytes and not errors and chunk.work_item.specs:
                chunk.columns = columns
            else:
                chunk.samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return num_bytes - (_mark_failed(chunk, ranges, owners(), errors, failed) if errors else 0)

    return run


def _mark_failed(
    chunk: SampleChunk, ranges: Ranges, owners: list[int], errors: Mapping[int, Exception], failed: SampleErrors
) -> int:
    """Mark the samples with failed ranges as failed; returns the number of bytes not read."""
    for number in sorted(errors):
        if owners[number] not in chunk.failures:  # a sample's first error is reported
            failed(chunk, owners[number], errors[number])
    return sum(ranges.lengths[number] for number in errors)


def _one_by_one(source: Source, chunk: SampleChunk, failed: SampleErrors, fetch: Fetch | None) -> _Plan:
    plan = _Plan()
    for row, index in enumerate(chunk.indices.tolist()):
        chunk.current = row
        try:
            field_ranges = source.ranges(index)
            fetched = [(each, fetch(chunk, row, each) if fetch is not None else None) for each in field_ranges]
        except Exception as error:
            failed(chunk, row, error)
            continue
        plan.rows.append(row)
        plan.constants.append(source.constants(index))
        plan.names.append(tuple((each.field, each.extension) for each, value in fetched if value is None))
        for each, value in fetched:
            plan.num_bytes += each.range.length
            if value is not None:
                plan.fetched.append((row, each.field, value))
                continue
            columns: tuple[list[Any], ...] = plan.ranges
            for column, item in zip(columns, each.range, strict=True):
                column.append(item)
    return plan


def _read_each(
    read_into: Callable[..., None],
    chunk: SampleChunk,
    ranges: Ranges,
    *,
    owners: list[int],
    offsets: list[int],
    view: memoryview,
) -> Mapping[int, Exception]:
    """`read_many` for a connector without it."""
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


def read_items(source: ItemSource, failed: SampleErrors, *, is_last: bool) -> Callable[[SampleChunk], int]:
    """A chunk stage that takes the source's items. `is_last`: only `batch` follows, which takes columns."""

    dataset = source.dataset
    get = ending_forks(getitem)

    def run(chunk: SampleChunk) -> int:
        chunk.current = None
        indices = chunk.indices.tolist()
        stream = chunk.work_item.stream
        items = source.items(indices) if stream is None else _next_items(stream, chunk, indices)
        if items is None:
            items = chunk.current = []
            while len(items) < len(indices):
                try:
                    for index in indices[len(items) :]:
                        items.append(get(dataset, index))
                except USER_ERRORS as error:
                    failed(chunk, len(items), error)
                    items.append(None)
            chunk.current = None
        if is_last and chunk.work_item.specs and not chunk.failures and len(items) == len(indices):
            with suppress(ValueError):  # `sample` raises it again for the item concerned
                chunk.columns = source.columns(items)
        if chunk.columns is None:
            for row, item in enumerate(items):
                if row not in chunk.failures:
                    try:
                        chunk.samples[row] = source.sample(item)
                    except Exception as error:
                        failed(chunk, row, error)
        return 0

    return run


def _next_items(stream: Pass | Preview, chunk: SampleChunk, indices: list[int]) -> list[Any]:
    """The chunk's items, fewer at the end of the stream. A batch's last chunk reads on to the batch's end on all ranks."""
    work_item = chunk.work_item
    is_last = chunk.hi == len(work_item)
    items, state = stream.take(indices, work_item.end if is_last else indices[-1] + 1)
    if is_last:
        work_item.source_state = state
    return items


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    failed, connector = context.failed(stage), context.connector
    is_last = len(context.before_batch) == 1 and context.mixed is None
    if context.gives == "items":
        source = context.source
        assert isinstance(source, ItemSource)
        run = read_items(source, failed, is_last=is_last)
        if isinstance(source, IterableSource):
            return stage.ready(
                "sample", run, interrupt=source.interrupt, waits_for=source.waits_for, in_turn=True, owner=source.owner
            )
        return stage.ready("sample", run, owner=source.owner)
    assert connector is not None
    # A reader may wait for its threads.
    interrupt = connector.stop if isinstance(connector, ReadAheadConnector) else None
    if context.gives == "rows":
        assert isinstance(context.source, RowSource)
        rows = RowReader(context.source, connector, failed, is_last=is_last)
        return stage.ready("sample", rows.run, close=rows.close, interrupt=interrupt)
    if context.gives == "sequences":
        assert isinstance(context.source, SequenceSource)
        is_packed = len(context.before_batch) > 1 and context.kind_of(context.before_batch[1]).packs
        length = context.order.length if is_packed and context.mixed is None else None
        if length is not None:
            run = read_pieces(context.source, connector, failed, length)
        else:
            value_of = partial(_numbers, context.source.sequences, as_arrays=is_last)
            run = read_ranges(context.source, connector, failed, value_of=value_of, reuse=context.may_reuse)
    elif context.gives == "serial":
        assert isinstance(context.source, SerialSource)
        run = read_serial(context.source, connector, failed)
    elif context.gives == "records":
        assert isinstance(context.source, RecordSource)
        run = read_records(context.source, connector, failed, is_last=is_last, reuse=context.may_reuse)
    else:
        direct = _direct_read(connector, context)
        fetch = direct.fetch if direct is not None else None
        run = read_ranges(context.source, connector, failed, fetch=fetch, as_bytes=is_last)
    return stage.ready("sample", run, interrupt=interrupt)


def read_values(context: CompileContext, stage: StageConfig) -> Callable[[SampleChunk], int]:
    """A chunk stage that leaves every sample's values in `chunk.samples`, encoded bytes as `Encoded`, whatever comes behind it;
    `read` itself may put them into slots. It returns the number of bytes read."""
    source, connector, failed = context.source, context.connector, context.failed(stage)
    if isinstance(source, ItemSource):
        return read_items(source, failed, is_last=False)
    assert connector is not None
    if isinstance(source, RecordSource):
        return read_records(source, connector, failed, is_last=False, reuse=context.may_reuse)
    if isinstance(source, RowSource):
        return RowReader(source, connector, failed, is_last=False).run
    if isinstance(source, SequenceSource):
        value_of = partial(_numbers, source.sequences, as_arrays=False)
        return read_ranges(source, connector, failed, value_of=value_of, reuse=context.may_reuse)
    if isinstance(source, SerialSource):
        return read_serial(source, connector, failed)
    return read_ranges(source, connector, failed, reuse=context.may_reuse)


def read_serial(source: SerialSource, connector: Connector, failed: SampleErrors) -> Callable[[SampleChunk], int]:
    """A chunk stage that reads samples and parses them; it returns the number of bytes read."""
    read = read_ranges(source, connector, failed, value_of=_bytes)

    def run(chunk: SampleChunk) -> int:
        num_bytes = read(chunk)
        for row, index in enumerate(chunk.indices.tolist()):
            sample = chunk.samples[row]
            if sample is not None:
                chunk.current = row
                (data,) = sample.values()
                try:
                    chunk.samples[row] = source.parse(index, data)
                except Exception as error:
                    failed(chunk, row, error)
        chunk.current = None
        return num_bytes

    return run


def _bytes(data: memoryview, extension: str) -> memoryview:
    return data


def _numbers(sequences: Sequences, data: memoryview, extension: str, *, as_arrays: bool) -> Any:
    """The numbers of a sequence: [numbers], an array or a tensor over its bytes."""
    array = np.frombuffer(data, sequences.dtype)
    if sequences.is_swapped:
        array.byteswap(inplace=True)
    return array if as_arrays else torch.from_numpy(array)


def read_pieces(
    source: SequenceSource, connector: Connector, failed: SampleErrors, length: int
) -> Callable[[SampleChunk], int]:
    """A chunk stage that reads the pieces of packed sequences to where they belong in their slots, by one call if the connector
    can; it returns the number of bytes read."""
    _, dtype, is_swapped, item_bytes = source.sequences
    bulk = bulk_of(connector)
    scatter = None if bulk.scatter_into is None else ending_forks(bulk.scatter_into)
    read_many = None if bulk.read_many is None else ending_forks(bulk.read_many)
    read_into = ending_forks(connector.read_into)
    key, _, etag = source.file

    def read(chunk: SampleChunk, starts: _Int64, lengths: _Int64, offsets: _Int64, view: memoryview) -> _Errors:
        if scatter is None:
            return read_singly(chunk, starts, lengths, offsets, view)
        try:
            scatter(key, starts, lengths, offsets, view, etag=etag)
        except STORE_FAILURES as error:  # the pieces one by one would take as long to fail alike
            return dict.fromkeys(range(len(starts)), error)
        except Exception:  # one by one they show which of them are bad
            return read_singly(chunk, starts, lengths, offsets, view)
        return {}

    def read_singly(chunk: SampleChunk, starts: _Int64, lengths: _Int64, offsets: _Int64, view: memoryview) -> _Errors:
        num, places = len(starts), offsets.tolist()
        ranges = Ranges([key] * num, starts.tolist(), lengths.tolist(), [etag] * num)
        if read_many is not None:
            return read_many(ranges, places, view)
        return _read_each(read_into, chunk, ranges, owners=list(range(num)), offsets=places, view=view)

    def run(chunk: SampleChunk) -> int:
        assert isinstance(chunk, PackedChunk)
        pieces, slots = chunk.pieces, chunk.work_item.fields.get("input_ids")
        if slots is None:
            tokens = np.zeros((len(chunk), length), dtype)
        else:
            assert slots.array is not None
            tokens = slots.array[chunk.lo : chunk.hi]
        chunk.current, chunk.tokens = None, tokens
        lengths = pieces.lengths * item_bytes
        starts = source.starts.take(pieces.samples) + pieces.firsts * item_bytes
        errors = read(chunk, starts, lengths, pieces.places * item_bytes, tokens.data.cast("B"))
        if is_swapped:
            tokens.byteswap(inplace=True)
        for row in sorted(errors):
            failed(chunk, row, errors[row])
        return int(lengths.sum()) - sum(int(lengths[row]) for row in errors)

    return run


def _direct_read(connector: Connector, context: CompileContext) -> DirectRead | None:
    """The direct read of arrays into their slots; None unless there is a `decode` and all other stages before `batch` name
    their fields."""
    between = context.before_batch[1:]
    decode = next((stage.args for stage in between if context.kind_of(stage).decodes), None)
    others = [stage for stage in between if not context.kind_of(stage).decodes]
    named = [getattr(stage.args, "fields", None) for stage in others]
    if decode is None or not context.may_reuse or None in named or context.mixed is not None:
        return None
    decoded = getattr(decode, "fields", None)
    touched = context.annotations.names.union(*(names or () for names in named))
    return DirectRead(connector, None if decoded is None else frozenset(decoded), touched)


READ = StageKind(ReadArgs, "sample", compile=_compile, is_single=True, takes_tensors=True)
