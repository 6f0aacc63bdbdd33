"""Sources of sequences of numbers in one object, and how these are read: whole, or as the pieces that `pack` puts together."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import ObjectInfo, Ranges, bulk_of
from loaderkit.errors import STORE_FAILURES
from loaderkit.samples.chunk import PackedChunk, SampleChunk
from loaderkit.samples.sample import Table
from loaderkit.sources.base import ReadContext, Reader
from loaderkit.sources.ranges import Errors, RangeReader, RangeSource, bulk_calls, read_each

Int64 = NDArray[np.int64]


class Sequences(NamedTuple):
    """Samples of numbers of one type in one object: the field they become, and the type (torch's name) of a number.

    `is_swapped` is True if its byte order is not this machine's.
    """

    field: str
    dtype: str
    is_swapped: bool
    item_bytes: int


class SequenceSource(RangeSource):
    """A source whose samples are `Sequences` of one object: each one range, and as long as it is."""

    sequences: Sequences
    file: ObjectInfo  # the object that holds them, as it was when the source was opened
    starts: Int64  # the first byte of every sample: int64 [samples]
    lengths: Int64  # the numbers in every sample: int64 [samples]

    @property
    def length_field(self) -> str:  # type: ignore[override]
        """The field that they become."""
        return self.sequences.field

    def table(self, indices: Int64) -> Table:
        """The ranges of several sequences."""
        lengths = self.lengths[indices] * self.sequences.item_bytes
        return Table(((self.sequences.field, "raw"),), self._ranges_at(self.starts[indices], lengths))

    def piece_ranges(self, samples: Int64, firsts: Int64, lengths: Int64) -> Ranges:
        """The bytes of pieces of sequences."""
        item_bytes = self.sequences.item_bytes
        return self._ranges_at(self.starts[samples] + firsts * item_bytes, lengths * item_bytes)

    def _ranges_at(self, starts: Int64, lengths: Int64) -> Ranges:
        num, file = len(starts), self.file
        return Ranges([file.key] * num, starts.tolist(), lengths.tolist(), [file.etag] * num)

    def reader(self, context: ReadContext) -> Reader:
        """A reader of pieces where `pack` follows; else a sample is {field: tensor}, or an array where only `batch` does."""
        if context.packed_length is not None:
            return PieceReader(self, context, context.packed_length)
        value_of = partial(_numbers, self.sequences, as_arrays=context.is_last)
        return RangeReader(self, context, value_of=value_of, reuse=context.may_reuse)


class PieceReader(Reader):
    """Reads the pieces of packed sequences to where they belong in their slots, by one call if the connector can."""

    def __init__(self, source: SequenceSource, context: ReadContext, length: int) -> None:
        self._source, self._failed, self._length = source, context.failed, length
        scatter = bulk_of(context.store).scatter_into
        self._scatter = None if scatter is None else ending_forks(scatter)
        self._read_many, self._read_into = bulk_calls(context.store)

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        assert isinstance(chunk, PackedChunk)
        source, pieces, slots = self._source, chunk.pieces, chunk.work_item.fields.get("input_ids")
        _, dtype, is_swapped, item_bytes = source.sequences
        if slots is None:
            tokens = np.zeros((len(chunk), self._length), dtype)
        else:
            assert slots.array is not None
            tokens = slots.array[chunk.lo : chunk.hi]
        chunk.current, chunk.tokens = None, tokens
        lengths = pieces.lengths * item_bytes
        starts = source.starts.take(pieces.samples) + pieces.firsts * item_bytes
        errors = self._read(chunk, starts, lengths, pieces.places * item_bytes, tokens.data.cast("B"))
        if is_swapped:
            tokens.byteswap(inplace=True)
        for row in sorted(errors):
            self._failed(chunk, row, errors[row])
        return int(lengths.sum()) - sum(int(lengths[row]) for row in errors)

    def _read(self, chunk: SampleChunk, starts: Int64, lengths: Int64, offsets: Int64, view: memoryview) -> Errors:
        if self._scatter is None:
            return self._read_singly(chunk, starts, lengths, offsets, view)
        key, _, etag = self._source.file
        try:
            self._scatter(key, starts, lengths, offsets, view, etag=etag)
        except STORE_FAILURES as error:  # the pieces one by one would take as long to fail alike
            return dict.fromkeys(range(len(starts)), error)
        except Exception:  # one by one they show which of them are bad
            return self._read_singly(chunk, starts, lengths, offsets, view)
        return {}

    def _read_singly(
        self, chunk: SampleChunk, starts: Int64, lengths: Int64, offsets: Int64, view: memoryview
    ) -> Errors:
        num, places = len(starts), offsets.tolist()
        key, _, etag = self._source.file
        ranges = Ranges([key] * num, starts.tolist(), lengths.tolist(), [etag] * num)
        if self._read_many is not None:
            return self._read_many(ranges, places, view)
        return read_each(self._read_into, chunk, ranges, owners=list(range(num)), offsets=places, view=view)


def _numbers(sequences: Sequences, data: memoryview, extension: str, *, as_arrays: bool) -> Any:
    """The numbers of a sequence: [numbers], an array or a tensor over its bytes."""
    array = np.frombuffer(data, sequences.dtype)
    if sequences.is_swapped:
        array.byteswap(inplace=True)
    return array if as_arrays else torch.from_numpy(array)
