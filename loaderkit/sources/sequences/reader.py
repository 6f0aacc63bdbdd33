"""Sources of sequences of numbers in objects, and their readers: of whole sequences, or of the pieces that `pack` puts
together."""

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
    """Samples of numbers of one type: the field they become, and the type (torch's name) of a number.

    `is_swapped` is True if its byte order is not this machine's.
    """

    field: str
    dtype: str
    is_swapped: bool
    item_bytes: int


class SequenceSource(RangeSource):
    """A source whose samples are `Sequences` in some objects. Each sample is one range, and they differ in length."""

    sequences: Sequences
    files: tuple[ObjectInfo, ...]  # the objects that hold them, as they were when the source was opened
    firsts: Int64  # the first sample of every object and, last, the number of samples: int64 [objects + 1]
    starts: Int64  # the first byte of every sample: int64 [samples]
    lengths: Int64  # the numbers in every sample: int64 [samples]

    @property
    def length_field(self) -> str:  # type: ignore[override]
        """The field that they become."""
        return self.sequences.field

    def table(self, indices: Int64) -> Table:
        """The ranges of several sequences."""
        lengths = self.lengths[indices] * self.sequences.item_bytes
        return Table(((self.sequences.field, "raw"),), self.ranges_at(indices, self.starts[indices], lengths))

    def piece_ranges(self, samples: Int64, firsts: Int64, lengths: Int64) -> Ranges:
        """The bytes of pieces of sequences."""
        item_bytes = self.sequences.item_bytes
        return self.ranges_at(samples, self.starts[samples] + firsts * item_bytes, lengths * item_bytes)

    def file_numbers(self, samples: Int64) -> Int64:
        """Which of `files` each sample lies in."""
        numbers: Int64 = np.searchsorted(self.firsts, samples, "right") - 1
        return numbers

    def ranges_at(self, samples: Int64, starts: Int64, lengths: Int64) -> Ranges:
        """Ranges of the files that the samples lie in."""
        if len(self.files) == 1:
            files = [self.files[0]] * len(starts)
        else:
            files = [self.files[number] for number in self.file_numbers(samples).tolist()]
        keys, etags = [file.key for file in files], [file.etag for file in files]
        return Ranges(keys, starts.tolist(), lengths.tolist(), [*etags])

    def reader(self, context: ReadContext) -> Reader:
        """A reader of pieces if `pack` follows. Otherwise a sample is {field: tensor}, or {field: array} if only
        `batch` follows."""
        if context.packed_length is not None:
            return PieceReader(self, context, context.packed_length)
        value_of = partial(_numbers, self.sequences, as_arrays=context.is_last)
        return RangeReader(self, context, value_of=value_of, reuse=context.may_reuse)


class PieceReader(Reader):
    """Reads the pieces of packed sequences to their places in the slots, by one call if the connector can."""

    def __init__(self, source: SequenceSource, context: ReadContext, length: int) -> None:
        self._source, self._failed, self._length = source, context.failed, length
        scatter = bulk_of(context.store).scatter_into
        # Of several files one call for all ranges beats one call a file, which opens it for a few.
        self._scatter = None if scatter is None or len(source.files) > 1 else ending_forks(scatter)
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

    def _read(self, chunk: PackedChunk, starts: Int64, lengths: Int64, offsets: Int64, view: memoryview) -> Errors:
        if self._scatter is None:
            return self._read_singly(chunk, starts, lengths, offsets, view)
        key, _, etag = self._source.files[0]
        try:
            self._scatter(key, starts, lengths, offsets, view, etag=etag)
        except STORE_FAILURES as error:  # the pieces one by one would take as long to fail alike
            return dict.fromkeys(range(len(starts)), error)
        except Exception:  # one by one they show which of them are bad
            return self._read_singly(chunk, starts, lengths, offsets, view)
        return {}

    def _read_singly(
        self, chunk: PackedChunk, starts: Int64, lengths: Int64, offsets: Int64, view: memoryview
    ) -> Errors:
        num, places = len(starts), offsets.tolist()
        ranges = self._source.ranges_at(chunk.pieces.samples, starts, lengths)
        if self._read_many is not None:
            return self._read_many(ranges, places, view)
        return read_each(self._read_into, chunk, ranges, owners=list(range(num)), offsets=places, view=view)


def _numbers(sequences: Sequences, data: memoryview, extension: str, *, as_arrays: bool) -> Any:
    """The numbers of a sequence: [numbers], an array or a tensor over its bytes."""
    array = np.frombuffer(data, sequences.dtype)
    if sequences.is_swapped:
        array.byteswap(inplace=True)
    return array if as_arrays else torch.from_numpy(array)
