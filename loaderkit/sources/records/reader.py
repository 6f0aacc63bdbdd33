"""Sources of records of one size in one object. A chunk is read by one call, straight into the slots if `batch` comes next.

source.starts(indices) ──> gather_into(…) ──> slots[lo:hi]                  read, batch: no Python per sample
                                          ──> memory of the chunk ──> a tensor per sample     with stages in between
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.dtypes import type_in_numpy
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import ObjectInfo, Ranges, bulk_of
from loaderkit.connectors.ranges import gather_into
from loaderkit.errors import STORE_FAILURES
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Table
from loaderkit.samples.slots import LEAST_LENT
from loaderkit.sources.base import ReadContext, Reader, Source


class Records(NamedTuple):
    """Samples of one size in one object: the field they become, and the type and shape of one of them.

    `dtype` is torch's name; `is_swapped` is True if its byte order is not this machine's.
    """

    field: str
    dtype: str
    shape: tuple[int, ...]
    is_swapped: bool
    num_bytes: int


class RecordSource(Source):
    """A source whose samples are `Records` of one object, so that a chunk of them is read at once."""

    has_ranges = True
    records: Records
    file: ObjectInfo  # the object that holds them, as it was when the source was opened

    @abstractmethod
    def starts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first byte of every sample: int64 [n]."""

    def reader(self, context: ReadContext) -> Reader:
        """A reader of records: fields are tensors, or arrays where only `batch` follows."""
        return RecordReader(self, context)

    def table(self, indices: NDArray[np.int64]) -> Table:
        """The ranges of several records."""
        num, file = len(indices), self.file
        lengths = [self.records.num_bytes] * num
        ranges = Ranges([file.key] * num, self.starts(indices).tolist(), lengths, [file.etag] * num)
        return Table(((self.records.field, "raw"),), ranges)

    @property
    def length_field(self) -> str | None:  # type: ignore[override]
        """The records' field, if they are rows of numbers."""
        return self.records.field if len(self.records.shape) == 1 else None

    @property
    def lengths(self) -> NDArray[np.int64] | None:  # type: ignore[override]
        """All are of one length."""
        return np.full(len(self), self.records.shape[0], np.int64) if len(self.records.shape) == 1 else None


class RecordReader(Reader):
    """Reads a chunk by one call.

    Where only `batch` follows, records go into their slots and `chunk.samples` stays empty; without slots samples are
    {field: array}. Otherwise every sample is {field: tensor}; with `may_reuse` the next chunk overwrites them.
    """

    def __init__(self, source: RecordSource, context: ReadContext) -> None:
        connector = context.store
        self._source, self._records, self._failed = source, source.records, context.failed
        self._is_last, self._reuse = context.is_last, context.may_reuse
        self._gather = ending_forks(bulk_of(connector).gather_into or partial(gather_into, connector))
        self._read_into = ending_forks(connector.read_into)

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        records, is_last = self._records, self._is_last
        num = len(chunk.source_indices)
        if is_last and records.field in chunk.work_item.fields:
            memory = chunk.work_item.fields[records.field].memory
            return self._fill(memory[chunk.lo * records.num_bytes : chunk.hi * records.num_bytes], chunk)
        size = num * records.num_bytes
        memory = np.frombuffer(chunk.memory("read", size), np.uint8) if self._reuse else np.empty(size, np.uint8)
        # The first sample is not delivered.
        is_layout = is_last and not chunk.work_item.specs and size >= LEAST_LENT
        num_bytes = 0 if is_layout else self._fill(memory, chunk)
        values = _numbers_in(memory, records, num, as_arrays=is_last)
        for row in range(num):
            if row not in chunk.failures:
                chunk.samples[row] = {records.field: values[row, ...]}
        return num_bytes

    def _fill(self, memory: NDArray[np.uint8], chunk: SampleChunk) -> int:
        records = self._records
        starts = self._source.starts(chunk.source_indices)
        key, _, etag = self._source.file
        num_bad = 0
        chunk.current = None
        try:
            self._gather(key, starts, records.num_bytes, memory.data, etag=etag)
        except STORE_FAILURES as error:  # a retry per record would take as long to fail alike
            num_bad = len(starts)
            for row in range(num_bad):
                self._failed(chunk, row, error)
        except Exception:
            num_bad = self._fill_singly(memory.data, chunk)
        if records.is_swapped:
            memory.view(_swappable(records.dtype)).byteswap(inplace=True)
        return (len(starts) - num_bad) * records.num_bytes

    def _fill_singly(self, memory: memoryview, chunk: SampleChunk) -> int:
        """After an error: read record by record to find the bad ones; returns their number."""
        key, _, etag = self._source.file
        num_bytes, num_bad = self._records.num_bytes, 0
        for row, start in enumerate(self._source.starts(chunk.source_indices).tolist()):
            chunk.current = row
            try:
                self._read_into(key, start, memory[row * num_bytes : (row + 1) * num_bytes], etag=etag)
            except Exception as error:
                self._failed(chunk, row, error)
                num_bad += 1
        return num_bad


def _numbers_in(memory: NDArray[np.uint8], records: Records, num: int, *, as_arrays: bool) -> Any:
    """[num, ...] over the memory: with `as_arrays` an array if NumPy has the dtype, else a tensor."""
    numpy_dtype = type_in_numpy(records.dtype) if as_arrays else None
    shape = (num, *records.shape)
    if numpy_dtype is not None:
        return memory.view(numpy_dtype).reshape(shape)
    return torch.from_numpy(memory).view(getattr(torch, records.dtype)).view(shape)


def _swappable(dtype: str) -> np.dtype[Any]:
    """A NumPy dtype for swapping bytes; uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)
