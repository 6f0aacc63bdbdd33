"""`read` for a source of records: a chunk in one call, directly into the slots if `batch` comes next.

source.starts(indices) ──> gather_into(…) ──> slots[lo:hi]                  read, batch: no Python per sample
                                          ──> memory of the chunk ──> a tensor per sample     with stages in between
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from loaderkit._internal.dtypes import type_in_numpy
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import Connector, bulk_of
from loaderkit.connectors.ranges import gather_into
from loaderkit.errors import STORE_FAILURES
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.slots import LEAST_LENT
from loaderkit.sources.base import Records, RecordSource


def read_records(
    source: RecordSource,
    connector: Connector,
    failed: Callable[[SampleChunk, int, Exception], None],
    *,
    is_last: bool,
    reuse: bool,
) -> Callable[[SampleChunk], int]:
    """A chunk stage that returns the number of bytes read.

    `is_last`: only `batch` follows, so records go into their slots and `chunk.samples` stays empty; without slots samples are
    {field: array}. Otherwise every sample is {field: tensor}; with `reuse` the next chunk overwrites them.
    """
    records = source.records
    gather = ending_forks(bulk_of(connector).gather_into or partial(gather_into, connector))
    read_into = ending_forks(connector.read_into)

    def run(chunk: SampleChunk) -> int:
        if is_last and records.field in chunk.work_item.fields:
            num_bytes = records.num_bytes
            memory = chunk.work_item.fields[records.field].memory
            return _fill(memory[chunk.lo * num_bytes : chunk.hi * num_bytes], chunk)
        size = len(chunk.indices) * records.num_bytes
        memory = np.frombuffer(chunk.memory("read", size), np.uint8) if reuse else np.empty(size, np.uint8)
        is_layout = (
            is_last and not chunk.work_item.specs and size >= LEAST_LENT
        )  # the first sample, which is not delivered
        num_bytes = 0 if is_layout else _fill(memory, chunk)
        values = _numbers_in(memory, records, len(chunk.indices), as_arrays=is_last)
        for row in range(len(chunk.indices)):
            if row not in chunk.failures:
                chunk.samples[row] = {records.field: values[row, ...]}
        return num_bytes

    def _fill(memory: np.ndarray[Any, np.dtype[np.uint8]], chunk: SampleChunk) -> int:
        starts = source.starts(chunk.indices)
        key, _, etag = source.file
        num_bad = 0
        chunk.current = None
        try:
            gather(key, starts, records.num_bytes, memory.data, etag=etag)
        except STORE_FAILURES as error:  # a retry per record would take as long to fail alike
            num_bad = _fail_all(chunk, error, failed)
        except Exception:
            num_bad = _fill_singly(memory.data, chunk)
        if records.is_swapped:
            memory.view(_swappable(records.dtype)).byteswap(inplace=True)
        return (len(chunk.indices) - num_bad) * records.num_bytes

    def _fill_singly(memory: memoryview, chunk: SampleChunk) -> int:
        """After an error: read record by record to find the bad ones; returns their number."""
        key, _, etag = source.file
        num_bad = 0
        for row, start in enumerate(source.starts(chunk.indices).tolist()):
            chunk.current = row
            part = memory[row * records.num_bytes : (row + 1) * records.num_bytes]
            try:
                read_into(key, start, part, etag=etag)
            except Exception as error:
                failed(chunk, row, error)
                num_bad += 1
        return num_bad

    return run


def _numbers_in(memory: np.ndarray[Any, np.dtype[np.uint8]], records: Records, num: int, *, as_arrays: bool) -> Any:
    """[num, ...] over the memory: with `as_arrays` an array if NumPy has the dtype, else a tensor."""
    numpy_dtype = type_in_numpy(records.dtype) if as_arrays else None
    shape = (num, *records.shape)
    if numpy_dtype is not None:
        return memory.view(numpy_dtype).reshape(shape)
    return torch.from_numpy(memory).view(getattr(torch, records.dtype)).view(shape)


def _fail_all(chunk: SampleChunk, error: Exception, failed: Callable[[SampleChunk, int, Exception], None]) -> int:
    for row in range(len(chunk.indices)):
        failed(chunk, row, error)
    return len(chunk.indices)


def _swappable(dtype: str) -> np.dtype[Any]:
    """A NumPy dtype for swapping bytes; uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)
