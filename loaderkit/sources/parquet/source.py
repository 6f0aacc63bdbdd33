"""`kind: parquet`: the rows of Parquet files. What is read at a time is a row group.

files (listing) -> their footers (a few at a time) -> arrays: rows and column chunks of all row groups
sample -> row group (binary search) -> file, and row in the group; a group -> the byte ranges of the chosen columns
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from loaderkit._internal.config.settings import ByteSize, as_tuple
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, traits_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import LoaderkitError, SourceError
from loaderkit.samples.sample import FieldRange
from loaderkit.sources.arrow.choice import check_names, check_same, choose, filled_in, wanted_columns, without_nulls
from loaderkit.sources.arrow.columns import ConstantColumn
from loaderkit.sources.arrow.reader import RowReader
from loaderkit.sources.arrow.row_groups import Column, RowGroup
from loaderkit.sources.arrow.types import ColumnType
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import ReadContext, Source, SourceKind
from loaderkit.sources.fields import Include
from loaderkit.sources.listing import StringTable, cut_blocks, extension_of, list_matching
from loaderkit.sources.parquet.arrow import ChunkTable, Footer, chunk_table, parse_footer
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.groups import GroupReader
from loaderkit.sources.parquet.partitions import Partitions
from loaderkit.sources.patterns import Patterns

_MOST_AT_ONCE = (
    2 << 30
)  # what a row group may take when it is decoded: Arrow has 2 GiB of bytes, texts or items in an array
_SLICE_BYTES = 384 << 20  # of larger ones, which are decoded in slices
_NUM_THREADS = 4
_NUM_REMOTE_THREADS = 32  # they wait for the store, not for a CPU
Int64 = NDArray[np.int64]


class ParquetArgs(StoreArgs):
    """The rows of the Parquet files below `url`."""

    kind: Literal["parquet"] = "parquet"
    url: Annotated[
        str, Field(min_length=1, description="the folder of the files, or one .parquet file (also with braces)")
    ]
    include: Include = Field(
        "*.parquet",
        description='which files: globs (`**/*.parquet` for folders in folders), and braces, as "part-{00..99}.parquet"',
    )
    columns: Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | None, BeforeValidator(as_tuple)] = Field(
        None, description="read only these columns; default: those of `fields`, or all"
    )
    fields: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        None,
        description="field -> its column, as in {image: jpg, label: fine_label}; a column that is not named keeps its name",
    )
    memory: ByteSize = Field(
        2 * 2**30,
        description="bound on the decoded row groups that each loading process holds; one is held whatever its size",
    )

    @model_validator(mode="after")
    def _names_fit(self) -> ParquetArgs:
        if self.names_files and "include" in self.model_fields_set:
            raise ValueError("`url` names the files already; leave `include` out, or let `url` name their folder")
        check_names(self.columns, self.fields)
        return self

    @property
    def names_files(self) -> bool:
        """True if `url` names files, not their folder."""
        return self.url.endswith(".parquet")

    @property
    def root(self) -> str:
        """The connector's root: `url`, or its directory if it names files."""
        return (self.url[: self.url.rfind("/") + 1] or ".") if self.names_files else self.url

    @property
    def files(self) -> str | tuple[str, ...]:
        """The patterns of files below `root`."""
        return self.url[self.url.rfind("/") + 1 :] if self.names_files else self.include


_Opened = tuple[dict[str, ColumnType], Footer, ChunkTable]


class _Groups(NamedTuple):
    """Row groups that have rows, and slices of large ones, as arrays [groups] and [groups, leaves]."""

    files: Int64  # the number of the file
    numbers: Int64  # of the row group, in the file
    first_rows: Int64  # in the file
    num_rows: Int64
    starts: Int64  # of the column chunks of the chosen leaves
    lengths: Int64
    sizes: Int64


class _Sliced(NamedTuple):
    """Groups, and of each that is a slice its number in its row group, and the rows of all slices but the last: int64 [groups].
    Those that are whole have 0 rows so. `sizes`: the bytes that each takes when it is decoded."""

    groups: _Groups
    numbers: Int64
    num_rows: Int64
    sizes: Int64

    @classmethod
    def of(cls, whole: _Groups, row_bytes: int) -> _Sliced:
        """Row groups, of which those above `_MOST_AT_ONCE` are cut into slices."""
        sizes = np.maximum(whole.sizes.sum(axis=1), row_bytes * whole.num_rows)
        is_large = sizes > _MOST_AT_ONCE
        wanted = np.where(is_large, np.minimum(whole.num_rows, -(-sizes // _SLICE_BYTES)), 1)
        num_rows = -(-whole.num_rows // wanted)
        num_slices = -(-whole.num_rows // num_rows)
        owners = np.repeat(np.arange(len(sizes)), num_slices)
        numbers = np.arange(len(owners)) - np.repeat(np.cumsum(num_slices) - num_slices, num_slices)
        firsts = numbers * num_rows[owners]
        groups = _Groups(*(column[owners] for column in whole))
        in_slice = np.minimum(num_rows[owners], groups.num_rows - firsts)
        of_slices = (sizes[owners] * (in_slice / groups.num_rows)).astype(np.int64)
        groups = groups._replace(first_rows=groups.first_rows + firsts, num_rows=in_slice)
        return cls(groups, numbers, np.where(is_large, num_rows, 0)[owners], of_slices)


class ParquetSource(Source):
    """The rows of all matching files: files by the UTF-8 bytes of their keys, rows in their order.

    `connector` reads below `args.root`; `load` returns the footer of one file, and is called from several threads. A key is
    the file's and the number of the row in it: "train-0.parquet/123". Raises `ConfigError` for a column that is not there or
    can be no field, `SourceError` if nothing matches, there is no row or files differ in their columns, `FormatError` for a
    file that is damaged or none, and what `load` raises. With `found_bad`, files that are damaged or missing are
    reported to it.
    """

    def __init__(
        self,
        connector: Connector,
        args: ParquetArgs,
        load: Callable[[ObjectInfo], bytes],
        found_bad: BadShards | None = None,
    ) -> None:
        self._connector = connector
        self._found_bad = found_bad or BadShards()
        self._args = args
        self._wanted = wanted_columns(args.columns, args.fields)
        patterns = Patterns(args.files, underscored="")
        self._num_threads = _NUM_REMOTE_THREADS if traits_of(connector).is_remote else _NUM_THREADS
        self.left_out: Counter[str] = Counter()
        self._files = list_matching(
            connector, patterns, args.root, self._num_threads, leave_out=self._leave_out, bad_shards=self._found_bad
        )
        self.types: dict[str, ColumnType] = {}  # column -> its type in the first file that has values of it
        self.null_columns: list[str] = []
        self._partitions = Partitions([info.key for info in self._files])
        whole = self._collect(load)
        self.is_typed = all(kind.json is None for kind in self.types.values())
        self.has_untyped_arrays = not self.is_typed
        renamed = {column: field for field, column in (args.fields or {}).items()}
        self.fields = {renamed.get(column, column): column for column in self.types}
        sliced = _Sliced.of(whole, sum(kind.row_bytes for kind in self.types.values()))
        ends = np.cumsum(sliced.groups.num_rows)
        self._num = int(ends[-1]) if args.limit is None else min(int(ends[-1]), args.limit)
        num_groups = int(np.searchsorted(ends, self._num)) + 1
        self._groups = _Groups(*(column[:num_groups] for column in sliced.groups))
        self._slices, self._slice_rows = sliced.numbers[:num_groups], sliced.num_rows[:num_groups]
        self._firsts = np.concatenate([[0], np.minimum(ends[:num_groups], self._num)])
        self.group_bytes = sliced.sizes[:num_groups]
        self.memory_bytes = args.memory

    def _leave_out(self, key: str) -> None:
        if not self._args.names_files:
            self.left_out[extension_of(key)] += 1

    def __len__(self) -> int:
        return self._num

    def key(self, index: int) -> str:
        """The file's key and the number of the row in it."""
        self._place_of(index)  # raises IndexError
        return self.keys(np.array([index % self._num]))[0]

    def keys(self, indices: Int64) -> list[str]:
        """The keys of several samples."""
        groups, rows = self.locate(indices)
        files, rows = self._groups.files[groups].tolist(), rows + self._groups.first_rows[groups]
        return [f"{self._files[file].key}/{row}" for file, row in zip(files, rows.tolist(), strict=True)]

    def origin(self, index: int) -> str:
        """The key of the file."""
        return self._files[int(self._groups.files[self._place_of(index)[0]])].key

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """The row group of every sample, and its row there."""
        groups: Int64 = np.searchsorted(self._firsts, indices, "right") - 1
        return groups, indices - self._firsts[groups]

    def file_of(self, group: int) -> tuple[ObjectInfo, int]:
        """The file of a row group, and its number there."""
        return self._files[int(self._groups.files[group])], int(self._groups.numbers[group])

    def slice_of(self, group: int) -> tuple[int, int] | None:
        """Of a slice of a row group its number there, and the rows of all slices but the last."""
        num_rows = int(self._slice_rows[group])
        return (int(self._slices[group]), num_rows) if num_rows else None

    def constants_of(self, group: int) -> dict[str, Column]:
        """The columns of a row group that the folders of its file name."""
        named = [name for name, kind in self.types.items() if not kind.leaves]
        values = self._partitions.values_in(self.file_of(group)[0].key) if named else {}
        return {name: ConstantColumn(values[name], is_number=self.types[name].content == "number") for name in named}

    def group_reader(self, connector: Connector) -> Callable[[int], RowGroup]:
        """What reads and decodes a row group."""
        return GroupReader(self, connector).read

    def group_ranges(self, group: int) -> list[ByteRange]:
        """The column chunks of the fields, those that are adjacent as one. None of a slice: they are read on the way."""
        return [] if self._slice_rows[group] else self._chunk_ranges(group)

    def _chunk_ranges(self, group: int) -> list[ByteRange]:
        info, _ = self.file_of(group)
        chunks = sorted(zip(self._groups.starts[group].tolist(), self._groups.lengths[group].tolist(), strict=True))
        ranges: list[ByteRange] = []
        for start, length in chunks:
            if not length:
                continue  # this file has fewer leaves
            if ranges and start <= ranges[-1].start + ranges[-1].length:
                end = max(ranges[-1].start + ranges[-1].length, start + length)
                ranges[-1] = ranges[-1]._replace(length=end - ranges[-1].start)
            else:
                ranges.append(ByteRange(info.key, start, length, info.etag))
        return ranges

    def ranges(self, index: int) -> list[FieldRange]:
        """The ranges of the whole row group, from which the row is decoded."""
        group, _ = self._place_of(index)
        return [FieldRange("row group", "parquet", one) for one in self._chunk_ranges(group)]

    @property
    def row_groups(self) -> ParquetSource:  # type: ignore[override]
        """See `RowGroups`."""
        return self

    def reader(self, context: ReadContext) -> RowReader:
        """A reader of row groups."""
        return RowReader(self, context)

    def blocks(self, block_bytes: int) -> Int64:
        """Runs of whole row groups, or slices, of about `block_bytes` when decoded, at least one each, never across a file."""
        files = self._groups.files
        first_groups = np.flatnonzero(np.diff(files, prepend=-1))
        return self._firsts[cut_blocks(self.group_bytes, block_bytes, first_groups)]

    def fingerprint(self) -> str:
        """16 hexadecimal digits from the files' keys and sizes, the rows of the row groups, and the columns and their types."""
        digest = blake2b(StringTable(info.key for info in self._files).digest(), digest_size=8)
        sizes = np.array([info.size for info in self._files], "<i8")
        is_first = self._slices == 0  # however they are sliced
        firsts = np.append(self._firsts[:-1][is_first], self._firsts[-1])
        for numbers in (sizes, self._groups.files[is_first], firsts):
            digest.update(numbers.astype("<i8").tobytes())
        digest.update(
            repr([(name, kind.layout) for name, kind in self.types.items()]).encode("utf-8", "surrogateescape")
        )
        return digest.hexdigest()

    # ------------------------------------------------------------------------------------------------- building

    def _place_of(self, index: int) -> tuple[int, int]:
        if not -self._num <= index < self._num:
            raise IndexError(f"sample {index} of {self._num}")
        group = int(np.searchsorted(self._firsts, index % self._num, "right")) - 1
        return group, index % self._num - int(self._firsts[group])

    def _opened(self, load: Callable[[ObjectInfo], bytes]) -> Iterator[tuple[ObjectInfo, str, _Opened]]:
        """Every file that is not bad, its name, the columns that become fields (none if there are no rows), the footer, and
        where their chunks are; a few are loaded ahead."""

        def open_one(info: ObjectInfo) -> _Opened:
            where = self._connector.describe(info.key)
            data = load(info)
            footer = parse_footer(data, where)
            types = self._chosen(footer, where) if footer.metadata.num_rows else {}
            leaves = [leaf for kind in types.values() if kind.content != "null" for leaf in kind.leaves]
            return types, footer, chunk_table(footer, leaves, where, info.size - len(data))

        infos, num_ahead = self._files, 4 * self._num_threads
        tried = self._found_bad.tried(open_one)
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="loaderkit-index") as pool:
            for first in range(0, len(infos), num_ahead):
                some = infos[first : first + num_ahead]
                for info, opened in zip(some, pool.map(tried, some), strict=True):
                    where = self._connector.describe(info.key)
                    if isinstance(opened, LoaderkitError):
                        self._found_bad.leave_out(info.key, where, opened)
                    else:
                        yield info, where, opened

    def _collect(self, load: Callable[[ObjectInfo], bytes]) -> _Groups:
        """The row groups of all files, up to `limit` rows."""
        parts: list[tuple[Int64, ...]] = []
        num, limit, first = 0, self._args.limit, ""
        files: list[ObjectInfo] = []
        for file, (info, where, (types, footer, table)) in enumerate(self._opened(load)):
            files.append(info)
            if not types:
                continue
            if not self.types:
                self.types = types
                self.classes = footer.classes.get((self._args.fields or {}).get("label", "label"))
                first = where
            check_same(types, where, self.types, first)
            self.types = filled_in(self.types, types)
            has_rows = table.num_rows > 0
            numbers = np.flatnonzero(has_rows)
            first_rows = np.cumsum(table.num_rows) - table.num_rows
            of_chunks = (one[has_rows] for one in (table.starts, table.lengths, table.sizes))
            parts.append(
                (np.full(len(numbers), file), numbers, first_rows[has_rows], table.num_rows[has_rows], *of_chunks)
            )
            num += int(table.num_rows.sum())
            if limit is not None and num >= limit:
                break
        self._files = files
        if not num:
            self._found_bad.refuse_empty()
            raise SourceError(f"the {len(self._files)} files below {self._args.root!r} have no row")
        self.types, self.null_columns = without_nulls(self.types, self._wanted, self._key, repr(self._args.root))
        return _Groups(*(_stacked(columns) for columns in zip(*parts, strict=True)))

    @property
    def _key(self) -> str:
        """The argument that names the columns."""
        return "fields" if self._args.columns is None and self._args.fields is not None else "columns"

    def _chosen(self, footer: Footer, where: str) -> dict[str, ColumnType]:
        """The columns that become fields. Raises ConfigError."""
        columns = {**self._partitions.types, **footer.columns}  # a column of the file's own is what it says
        return choose(columns, self._wanted, self._key, where)


def _stacked(parts: tuple[Int64, ...]) -> Int64:
    """Arrays [row groups] or [row groups, leaves] of several files as one. A file has fewer leaves where it has only nulls."""
    if parts[0].ndim == 1:
        return np.concatenate(parts).astype(np.int64)
    most = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts]).astype(np.int64)


def _open(args: ParquetArgs, connector: Connector, found_bad: BadShards) -> ParquetSource:
    begin_s = time.perf_counter()
    load = partial(load_footer, connector, cache_dir=default_cache_dir(), checks_begin=found_bad.skips)
    source = ParquetSource(connector, args, load, found_bad)
    source.index_s = time.perf_counter() - begin_s
    return source


PARQUET = SourceKind(ParquetArgs, _open, lambda args: args.root, encoded="some", has_shards=True)
