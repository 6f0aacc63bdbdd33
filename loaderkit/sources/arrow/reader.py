"""The reader of rows: decodes each row group of a chunk's samples once, holds it, and takes the rows from it.

chunk ──locate──> row groups and rows ──> HeldGroups.get ──> a column's values of all rows at once ──> columns, or samples

Values are copied out of a row group, so its memory is bounded by what is held, however long batches live.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.units import say_bytes
from loaderkit.connectors.base import Connector
from loaderkit.errors import STORE_FAILURES
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.pictures import picture_extension
from loaderkit.samples.values import Encoded
from loaderkit.sources.arrow.row_groups import RowGroup, StoredBytes, Taken
from loaderkit.sources.base import ReadContext, Reader, RowGroups
from loaderkit.sources.held_groups import HeldGroups

logger = logging.getLogger("loaderkit")
_MUCH_DECODED = 4  # times the rows that were needed
_PYTHONS = frozenset({"int64", "float64", "bool"})  # Python has these types


class Rows(RowGroups, Protocol):
    """What the reader asks of its source."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Field -> its column."""

    def __len__(self) -> int: ...

    def group_reader(self, connector: Connector) -> Callable[[int], RowGroup]:
        """A function that reads and decodes a row group; from any thread. It raises FormatError, and what the connector
        raises."""


class RowReader(Reader):
    """Reads rows. Where only `batch` follows it gets columns. Otherwise bytes are `Encoded`; a number of a type that Python has
    is Python's, others are NumPy's."""

    def __init__(self, source: Rows, context: ReadContext) -> None:
        self._source, self._failed, self._is_last = source, context.failed, context.is_last
        self._groups = HeldGroups(source.group_reader(context.store), source.group_bytes, source.memory_bytes)
        self._num_decoded = self._num_rows = 0  # row groups; rows that were taken
        self._has_warned = False

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        groups, rows = self._source.locate(chunk.source_indices)
        columns: dict[str, Any] = {}
        num_bytes = 0
        error: Exception | None = None
        slowest, checked = (0.0, 0), set[Callable[[], None]]()
        for group, places in _by_group(groups):
            chunk.current = int(places[0])
            begin_s = perf_counter()
            try:
                if error is None:
                    found, num_read = self._groups.get(group)
                    if found.check not in checked:
                        found.check()
                        checked.add(found.check)
                    num_bytes += num_read
                    self._num_decoded += num_read > 0
            except Exception as raised:
                error = raised
            if error is not None:
                self._fail_all(chunk, places, error)
                # The other row groups would take as long to fail alike.
                error = error if isinstance(error, STORE_FAILURES) else None
                continue
            for field, column in found.columns.items():
                taken = column.take(rows[places])
                self._put(columns, field, taken, places, len(chunk.source_indices))
                for number, reason in taken.bad.items():
                    self._fail(chunk, int(places[number]), field, reason)
            slowest = max(slowest, (perf_counter() - begin_s, int(places[0])))
        chunk.current, chunk.slowest = None, slowest
        self._num_rows += len(chunk.source_indices)
        if not self._has_warned and self._num_decoded > 2 * len(self._source.group_bytes):
            self._warn_of_decoding()
        if self._is_last and chunk.work_item.specs and not chunk.failures:
            chunk.columns = columns
        elif columns:
            self._fill(chunk, columns)
        return num_bytes

    def close(self) -> None:
        """Drop all row groups."""
        self._groups.clear()

    def _warn_of_decoding(self) -> None:
        """Warn, once, if row groups are decoded for few rows each."""
        times = self._num_decoded * len(self._source) / len(self._source.group_bytes) / self._num_rows
        if times > _MUCH_DECODED:
            self._has_warned = True
            logger.warning(
                "%.0f rows are read and decoded for each that is needed: samples of more row groups, or record batches, are "
                "mixed than `source.memory` (%s) holds. `loaderkit check` says what to do",
                times,
                say_bytes(self._source.memory_bytes),
            )

    def _put(self, columns: dict[str, Any], field: str, taken: Taken, places: NDArray[np.int64], num: int) -> None:
        """Put the values of some places of a chunk into the column of all."""
        values = taken.values
        if isinstance(values, np.ndarray):
            if len(places) == num:
                columns[field] = values
                return
            if field not in columns:
                columns[field] = np.empty((num, *values.shape[1:]), values.dtype)
            columns[field][places] = values
            return
        column = columns.setdefault(field, [None] * num)
        for place, value in zip(places.tolist(), values, strict=True):
            column[place] = self._owned(value) if type(value) is StoredBytes else value

    def _owned(self, stored: StoredBytes) -> bytes | Encoded:
        data = bytes(stored.data)
        if self._is_last:
            return data
        view = memoryview(data)
        return Encoded(view, stored.extension or picture_extension(view) or "bin")

    def _fill(self, chunk: SampleChunk, columns: dict[str, Any]) -> None:
        listed = [_listed(values) for values in columns.values()]
        for row, values in enumerate(zip(*listed, strict=True)):
            if row not in chunk.failures:
                chunk.samples[row] = dict(zip(columns, values, strict=True))

    def _fail(self, chunk: SampleChunk, row: int, field: str, reason: str) -> None:
        if row not in chunk.failures:  # a sample's first error is reported
            self._failed(chunk, row, ValueError(f"its column {self._source.fields[field]!r} {reason}"))

    def _fail_all(self, chunk: SampleChunk, places: NDArray[np.int64], error: Exception) -> None:
        for row in places.tolist():
            self._failed(chunk, row, error)


def _by_group(groups: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """(row group, its places in the array) of the groups in an array."""
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    return [(int(groups[places[0]]), places) for places in np.split(order, firsts[1:])]


def _listed(values: Any) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.name in _PYTHONS:
        listed: list[Any] = values.tolist()
        return listed
    return list(values)
