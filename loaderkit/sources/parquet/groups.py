"""Row groups of Parquet files, read through a connector and decoded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import Lock
from typing import Protocol

import numpy as np

from loaderkit._internal.system.forks import ending_forks
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo
from loaderkit.sources.arrow.columns import NullColumn
from loaderkit.sources.arrow.row_groups import Column, RowGroup
from loaderkit.sources.arrow.types import ColumnType
from loaderkit.sources.parquet.arrow import Footer, decode_group, decode_slices, parse_footer
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.slices import SlicedGroups

_NUM_FOOTERS = 32  # parsed ones that a reader keeps: up to hundreds of kB each


class Groups(Protocol):
    """What the reader asks of its source."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Field -> its column."""

    @property
    def types(self) -> Mapping[str, ColumnType]:
        """Column -> its type, in the files where it has values."""

    def file_of(self, group: int) -> tuple[ObjectInfo, int]:
        """The file of a row group, and its number there."""

    def group_ranges(self, group: int) -> list[ByteRange]:
        """The bytes that a group is decoded from; none of a slice, for which they are read on the way."""

    def slice_of(self, group: int) -> tuple[int, int] | None:
        """Of a group that is a slice of a row group its number there, and the rows of all slices but the last; None: a group is
        a row group."""

    def constants_of(self, group: int) -> Mapping[str, Column]:
        """The columns that are not in the file, but in the names of its folders."""


class GroupReader:
    """Reads and decodes the row groups of a source, or slices of them, through a connector. It keeps the last footers,
    parsed."""

    def __init__(self, source: Groups, connector: Connector) -> None:
        self._source = source
        self._read_into = ending_forks(connector.read_into)
        self._describe = connector.describe
        self._load = partial(load_footer, connector, cache_dir=default_cache_dir())
        self._footers: OrderedDict[str, Footer] = OrderedDict()
        self._lock = Lock()
        self._sliced = SlicedGroups()

    def read(self, group: int) -> RowGroup:
        """A row group, or slice. Raises FormatError, and what the connector raises."""
        info, number = self._source.file_of(group)
        where = self._describe(info.key)
        footer = self._footer_of(info, where)

        def read(start: int, length: int) -> memoryview:
            data = np.empty(length, np.uint8).data
            self._read_into(info.key, start, data, etag=info.etag)
            return data

        part = self._source.slice_of(group)
        held = [(one.start, read(one.start, one.length)) for one in self._source.group_ranges(group)]
        columns = {**self._source.constants_of(group)}
        for name, kind in self._source.types.items():
            if name not in columns and footer.columns[name].content == "null":
                columns[name] = NullColumn(kind.dtype, kind.shape)
        names = [column for column in self._source.fields.values() if column not in columns]
        num_read = sum(len(data) for _, data in held)
        if names:
            types = [footer.columns[name] for name in names]
            if part is None:
                decoded = decode_group(footer, number, types, held, where=where, size=info.size, read=read)
            else:
                place, num_rows = part

                def begin(note: Callable[[int], None]) -> Iterator[list[Column]]:
                    def noted(start: int, length: int) -> memoryview:
                        note(length)
                        return read(start, length)

                    return decode_slices(footer, number, types, num_rows, where=where, size=info.size, read=noted)

                decoded, num_read = self._sliced.take((info.key, number), place, begin)
            columns.update(zip(names, decoded, strict=True))
        fields = {field: columns[column] for field, column in self._source.fields.items()}
        memory_bytes = sum(column.num_bytes for column in fields.values())
        return RowGroup(fields, memory_bytes, num_read)

    def _footer_of(self, info: ObjectInfo, where: str) -> Footer:
        with self._lock:
            if info.key in self._footers:
                self._footers.move_to_end(info.key)
                return self._footers[info.key]
        footer = parse_footer(self._load(info), where)
        with self._lock:
            self._footers[info.key] = footer
            while len(self._footers) > _NUM_FOOTERS:
                self._footers.popitem(last=False)
        return footer
