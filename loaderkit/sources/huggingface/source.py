"""`kind: huggingface`: the rows of a data set that Hugging Face's datasets have on disk.

JSON beside the data ──locate──> files ──their messages, once──> record batches
sample ──(indices)──> row ──binary search──> record batch, and row in it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, bulk_of, traits_of
from loaderkit.errors import FormatError, LoaderkitError, SourceError
from loaderkit.samples.sample import FieldRange
from loaderkit.sources.arrow.choice import check_same, choose, filled_in, wanted_columns, without_nulls
from loaderkit.sources.arrow.features import class_names, with_json
from loaderkit.sources.arrow.reader import RowReader
from loaderkit.sources.arrow.row_groups import RowGroup
from loaderkit.sources.arrow.types import ColumnType
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import ReadContext, Source, SourceKind
from loaderkit.sources.huggingface.args import HuggingfaceArgs
from loaderkit.sources.huggingface.batches import (
    MAPPED_BYTES,
    BatchReader,
    BatchTable,
    columns_of,
    load_batches,
    load_indices,
)
from loaderkit.sources.huggingface.located import locate
from loaderkit.sources.listing import StringTable, cut_blocks

_NUM_THREADS = 4
_NUM_REMOTE_THREADS = 32  # they wait for the store, not for a CPU
_JOINED, _JOINED_ROWS = frozenset({"text", "bytes", "file"}), 1 << 16
Int64 = NDArray[np.int64]


class HuggingfaceSource(Source):
    """The rows of all files, in the order of the data set, or of its mapping of indices.

    A key is `data-00000-of-00002.arrow/123`, the row in the file. Raises what `locate` and `load` raise, SourceError for files
    that differ in their columns, and ConfigError for columns that can be no fields.
    """

    def __init__(
        self,
        connector: Connector,
        args: HuggingfaceArgs,
        load: Callable[[ObjectInfo], BatchTable],
        found_bad: BadShards | None = None,
    ) -> None:
        self._connector, self._found_bad = connector, found_bad or BadShards()
        located = locate(connector, args)
        if located.indices and self._found_bad.skips:
            self._found_bad = BadShards()  # the mapping counts the rows of all files
        self._files, tables = self._loaded(located.files, load)
        num_rows = np.concatenate([np.zeros(0, np.int64), *(table.num_rows for table in tables)])
        if located.num_rows is not None and int(num_rows.sum()) != located.num_rows and not self._found_bad.found:
            raise FormatError(
                f"the files of {args.root!r} have {num_rows.sum()} rows, and its dataset_info.json says {located.num_rows}: "
                "it is not whole, or damaged"
            )
        if not num_rows.sum():
            self._found_bad.refuse_empty()
            raise SourceError(f"the {len(self._files)} files of {args.root!r} have no row")
        wanted = wanted_columns(args.columns, args.fields) or located.columns
        self.types = self._columns(tables, wanted, args, located.features)
        self.is_typed = all(kind.json is None for kind in self.types.values())
        self.has_untyped_arrays = not self.is_typed
        renamed = {column: field for field, column in (args.fields or {}).items()}
        self.fields = {renamed.get(column, column): column for column in self.types}
        self.classes = class_names(located.features).get((args.fields or {}).get("label", "label"))
        self._schemas = [table.schema for table in tables]
        self._starts = np.concatenate([table.starts for table in tables])
        self._lengths = np.concatenate([table.lengths for table in tables])
        self._in_file = np.repeat(np.arange(len(tables)), [len(table.num_rows) for table in tables])
        self._batch_firsts = np.concatenate([[0], np.cumsum(num_rows)])  # of the record batches
        self._file_firsts = np.concatenate([[0], np.cumsum([int(table.num_rows.sum()) for table in tables])])
        self._indices = None
        total = int(self._batch_firsts[-1])
        if located.indices:
            self._indices = load_indices(connector, located.indices, load)
            if len(self._indices) and not 0 <= self._indices.min() <= self._indices.max() < total:
                raise FormatError(
                    f"{connector.describe(located.indices[0].key)} names rows beyond the {total} that there are"
                )
        num = total if self._indices is None else len(self._indices)
        if not num:
            raise SourceError(f"the mapping of indices of {args.root!r} has no row")
        self._num = num if args.limit is None else min(num, args.limit)
        is_mapped = bulk_of(connector).map_object is not None
        self._groups = self._joined(num_rows, args.memory) if is_mapped else np.arange(len(num_rows) + 1)
        self._firsts = self._batch_firsts[self._groups]
        self.group_bytes = MAPPED_BYTES * len(self.types) * np.diff(self._firsts) if is_mapped else self._lengths
        self.memory_bytes = args.memory

    def _joined(self, num_rows: Int64, memory: int) -> Int64:
        """The first record batch of every run that is held as one group, and last their number: int64 [groups + 1].

        Runs of one file of about 65,536 rows, if all of them can be held and joining copies no arrays: all rows of a
        chunk are taken from a group at once.
        """
        kinds = self.types.values()
        are_small = all(kind.content in _JOINED or (kind.content == "number" and not kind.shape) for kind in kinds)
        if not are_small or MAPPED_BYTES * len(self.types) * int(num_rows.sum()) > memory:
            return np.arange(len(num_rows) + 1)
        runs = (self._batch_firsts[:-1] - self._file_firsts[self._in_file]) // _JOINED_ROWS
        is_first = (np.diff(runs, prepend=-1) != 0) | (np.diff(self._in_file, prepend=-1) != 0)
        return np.append(np.flatnonzero(is_first), len(num_rows))

    def _loaded(
        self, infos: list[ObjectInfo], load: Callable[[ObjectInfo], BatchTable]
    ) -> tuple[list[ObjectInfo], list[BatchTable]]:
        """The files that are not bad, and their record batches."""
        files, tables = list[ObjectInfo](), list[BatchTable]()
        num_threads = _NUM_REMOTE_THREADS if traits_of(self._connector).is_remote else _NUM_THREADS
        with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-index") as pool:
            for info, table in zip(infos, pool.map(self._found_bad.tried(load), infos), strict=True):
                if isinstance(table, LoaderkitError):
                    self._found_bad.leave_out(info.key, self._connector.describe(info.key), table)
                else:
                    files.append(info)
                    tables.append(table)
        return files, tables

    def _columns(
        self, tables: list[BatchTable], wanted: list[str] | None, args: HuggingfaceArgs, features: Any
    ) -> dict[str, ColumnType]:
        """The columns that become fields, which are the same in all files that have rows."""
        key = "fields" if args.columns is None and args.fields is not None else "columns"
        has_names = args.columns is not None or args.fields is not None
        types: dict[str, ColumnType] = {}
        first = ""
        known: dict[bytes, dict[str, ColumnType]] = {}
        for info, table in zip(self._files, tables, strict=True):
            if not len(table.num_rows):
                continue
            where = self._connector.describe(info.key)
            if table.schema not in known:
                known[table.schema] = choose(with_json(columns_of(table.schema, where), features), wanted, key, where)
            these = known[table.schema]
            types, first = types or these, first or where
            check_same(these, where, types, first)
            if these is not types and any(these[name].leaves != types[name].leaves for name in types):
                raise SourceError(f"{where} has its columns in another order than {first}: save the data set anew")
            types = filled_in(types, these)
        types, self.null_columns = without_nulls(types, wanted if has_names else None, key, repr(args.root))
        return types

    def __len__(self) -> int:
        return self._num

    def _rows(self, indices: Int64) -> Int64:
        """The numbers of the samples' rows, among the rows of all files."""
        return indices if self._indices is None else self._indices[indices]

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """The group of record batches of every sample, and its row there."""
        rows = self._rows(indices)
        groups: Int64 = np.searchsorted(self._firsts, rows, "right") - 1
        return groups, rows - self._firsts[groups]

    def _places_of(self, indices: Int64) -> tuple[list[int], list[int]]:
        """The number of each sample's file, and the row in it."""
        if len(indices) and not -self._num <= indices.min() <= indices.max() < self._num:
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {self._num}")
        rows = self._rows(indices % self._num)
        files = np.searchsorted(self._file_firsts, rows, "right") - 1
        return files.tolist(), (rows - self._file_firsts[files]).tolist()

    def key(self, index: int) -> str:
        """The file's key and the row in it; behind a mapping of indices, which may name a row twice, also the place there."""
        return self.keys(np.array([index]))[0]

    def keys(self, indices: Int64) -> list[str]:
        """The keys of several samples."""
        files, rows = self._places_of(indices)
        names = [self._files[file].key for file in files]
        if self._indices is None:
            return [f"{name}/{row}" for name, row in zip(names, rows, strict=True)]
        numbers = (indices % self._num).tolist()
        return [f"{name}/{row}@{number}" for name, row, number in zip(names, rows, numbers, strict=True)]

    def origin(self, index: int) -> str:
        """The key of the file."""
        return self._files[self._places_of(np.array([index]))[0][0]].key

    def batches_of(self, group: int) -> tuple[ObjectInfo, bytes, list[int]]:
        """The file of a group of record batches, the message with its schema, and the rows of each batch."""
        first, end = self._groups[group], self._groups[group + 1]
        file = int(self._in_file[first])
        return self._files[file], self._schemas[file], np.diff(self._batch_firsts[first : end + 1]).tolist()

    def group_ranges(self, group: int) -> list[ByteRange]:
        """The bytes of each of its record batches."""
        batches = slice(self._groups[group], self._groups[group + 1])
        info = self._files[int(self._in_file[batches.start])]
        pairs = zip(self._starts[batches].tolist(), self._lengths[batches].tolist(), strict=True)
        return [ByteRange(info.key, start, length, info.etag) for start, length in pairs]

    def group_reader(self, connector: Connector) -> Callable[[int], RowGroup]:
        """A function that maps or reads a record batch, and decodes it."""
        return BatchReader(self, connector).read

    def ranges(self, index: int) -> list[FieldRange]:
        """The range of the whole record batch."""
        self._places_of(np.array([index]))  # raises IndexError
        (row,) = self._rows(np.array([index % self._num]))
        batch = int(np.searchsorted(self._batch_firsts, row, "right")) - 1
        info = self._files[int(self._in_file[batch])]
        one = ByteRange(info.key, int(self._starts[batch]), int(self._lengths[batch]), info.etag)
        return [FieldRange("record batch", "arrow", one)]

    @property
    def row_groups(self) -> HuggingfaceSource:  # type: ignore[override]
        """See `RowGroups`."""
        return self

    def reader(self, context: ReadContext) -> RowReader:
        """A reader of record batches."""
        return RowReader(self, context)

    def blocks(self, block_bytes: int) -> Int64:
        """Runs of whole record batches of about `block_bytes`, at least one each, never across a file; behind a mapping of
        indices runs of as many samples."""
        if self._indices is not None:
            row_bytes = max(1, int(self._lengths.sum() // self._batch_firsts[-1]))
            return cut_blocks(np.full(self._num, row_bytes), block_bytes)
        num_batches = int(np.searchsorted(self._batch_firsts, self._num, "left"))
        first_batches = np.flatnonzero(np.diff(self._in_file[:num_batches], prepend=-1))
        cuts = cut_blocks(self._lengths[:num_batches], block_bytes, first_batches)
        bounds: Int64 = np.minimum(self._batch_firsts[cuts], self._num)
        return bounds

    def fingerprint(self) -> str:
        """16 hexadecimal digits from the files' keys and sizes, their rows, the mapping, and the columns and their types."""
        digest = blake2b(StringTable(info.key for info in self._files).digest(), digest_size=8)
        sizes = np.array([info.size for info in self._files], np.int64)
        indices = np.zeros(0, np.int64) if self._indices is None else self._indices
        for numbers in (sizes, self._batch_firsts, indices, np.array([self._num])):
            digest.update(numbers.astype("<i8").tobytes())
        layouts = repr([(name, kind.layout) for name, kind in self.types.items()])
        digest.update(layouts.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def _open(args: HuggingfaceArgs, connector: Connector, found_bad: BadShards) -> HuggingfaceSource:
    begin_s = time.perf_counter()
    load = partial(load_batches, connector, cache_dir=default_cache_dir())
    source = HuggingfaceSource(connector, args, load, found_bad)
    source.index_s = time.perf_counter() - begin_s
    return source


HUGGINGFACE = SourceKind(HuggingfaceArgs, _open, lambda args: args.root, encoded="some", has_shards=True)
