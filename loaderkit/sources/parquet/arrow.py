"""The parts of `kind: parquet` that use pyarrow: it reads footers, and decodes the column chunks of a row group.

It never opens a file: a footer and the bytes of column chunks come through the connector, by ranges, and pyarrow gets them as
if from a file that has nothing else. It runs in the thread that calls, and starts none.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError, LoaderkitError
from loaderkit.sources.arrow.convert import column_of, joined
from loaderkit.sources.arrow.features import class_names, with_json
from loaderkit.sources.arrow.row_groups import Column
from loaderkit.sources.arrow.types import ColumnType, arrow_errors, column_type, import_pyarrow, stored_type

_MOST_BYTES = 1 << 40  # of a column chunk: sums of what damage makes of it are to fit as well
ReadRange = Callable[[int, int], memoryview]
"""(start, length) -> bytes of the file."""
_MAGIC = b"PAR1"
_BUFFER_BYTES = 8 << 20  # read at a time of each column of a row group that is decoded in slices
_INT96_UNIT = "us"  # of Spark's times: pyarrow's nanoseconds overflow beyond the years 1677 to 2262, without a word


class Footer(NamedTuple):
    """What a footer says: the columns by name, the names of classes by column, where Hugging Face's datasets wrote them, and
    pyarrow's FileMetaData."""

    columns: dict[str, ColumnType]
    classes: dict[str, list[str]]
    metadata: Any


class ChunkTable(NamedTuple):
    """The number of rows of each row group, and for some leaves the first byte of the column chunk, its bytes in the
    file, and about how many bytes it has when decoded: int64 [row groups, leaves]."""

    num_rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


def parse_footer(data: bytes, where: str) -> Footer:
    """Raises FormatError naming the file as `where`, MissingExtraError."""
    pa, pq = _import()
    try:
        file = pq.ParquetFile(pa.BufferReader(_MAGIC + data), coerce_int96_timestamp_unit=_INT96_UNIT)
        metadata, schema = file.metadata, file.schema_arrow
        features = _features_of(schema.metadata or {})
        columns = with_json(_columns_of(pa, schema, metadata), features)
        return Footer(columns, class_names(features), metadata)
    except arrow_errors() as error:
        raise FormatError(f"{where}: its footer is damaged: {error}") from error


def chunk_table(footer: Footer, leaves: Sequence[int], where: str, end: int) -> ChunkTable:
    """Where the column chunks of some leaves lie in a file whose footer begins at `end`. Raises FormatError."""
    metadata = footer.metadata
    starts, lengths, sizes = (np.zeros((metadata.num_row_groups, len(leaves)), np.int64) for _ in range(3))
    num_rows = np.zeros(metadata.num_row_groups, np.int64)
    try:
        _refuse_bad_chunks(metadata, leaves)
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            num_rows[group] = row_group.num_rows
            for place, leaf in enumerate(leaves):
                chunk = row_group.column(leaf)
                begins = (chunk.data_page_offset, chunk.dictionary_page_offset)
                starts[group, place] = min(begin for begin in begins if begin)  # some writers say 0 for "no dictionary"
                lengths[group, place] = chunk.total_compressed_size
                sizes[group, place] = min(chunk.total_uncompressed_size, _MOST_BYTES)
    except arrow_errors() as error:
        raise FormatError(f"{where}: its footer is damaged: {error}") from error
    is_inside = (starts >= len(_MAGIC)) & (lengths > 0) & (starts <= end - lengths) & (sizes >= 0)
    if not is_inside[num_rows > 0].all() or (num_rows < 0).any():
        raise FormatError(f"{where}: its footer is damaged: it names column chunks that cannot be there")
    if int(num_rows.sum()) != metadata.num_rows:
        raise FormatError(f"{where}: its footer is damaged: {metadata.num_rows} rows, {num_rows.sum()} in row groups")
    return ChunkTable(num_rows, starts, lengths, sizes)


def _import() -> tuple[Any, Any]:
    pa = import_pyarrow("parquet")
    from pyarrow import parquet as pq

    return pa, pq


# ------------------------------------------------------------------------------------------------------------- types


def _columns_of(pa: Any, schema: Any, metadata: Any) -> dict[str, ColumnType]:
    columns: dict[str, ColumnType] = {}
    first = 0
    for field in schema:
        end = first + _count_leaves(pa, field.type)
        column = column_type(pa, field.type, tuple(range(first, end)))
        if field.name in columns:
            column = column._replace(content="", reason="a second column of this name")
        columns[field.name] = column
        first = end
    if first != metadata.num_columns:
        raise ValueError(f"{metadata.num_columns} leaves, and the types of its columns have {first}")
    return columns


def _count_leaves(pa: Any, kind: Any) -> int:
    """The columns of numbers, texts or bytes that a type is stored as."""
    kind = stored_type(pa, kind)
    if pa.types.is_dictionary(kind):
        return 1
    return sum(_count_leaves(pa, kind.field(number).type) for number in range(kind.num_fields)) or 1


def _features_of(metadata: dict[bytes, bytes]) -> Any:
    """The features that Hugging Face's datasets write into a file, or None."""
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):  # another program's
        return None


# ------------------------------------------------------------------------------------------------------------- decoding


class _ChunkFile:
    """The file as pyarrow sees it: the bytes of the column chunks that were read. Other bytes are read when it asks for
    them."""

    closed = False

    def __init__(self, size: int, held: Sequence[tuple[int, memoryview]], read: ReadRange) -> None:
        self._size, self._held, self._read = size, held, read
        self._starts = [start for start, _ in held]
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, num_bytes: int = -1) -> memoryview:
        start = self._position
        end = self._size if num_bytes < 0 else min(start + num_bytes, self._size)
        self._position = max(start, end)
        number = bisect_right(self._starts, start) - 1
        if number >= 0:
            begin, data = self._held[number]
            if end <= begin + len(data):
                return data[start - begin : end - begin]
        return self._read(start, max(0, end - start))  # headers of old writers begin before or end behind their chunk

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class _NothingRead(Exception):  # noqa: N818 - no error
    """Stands for the bytes that are not wanted."""


class _NoFile(_ChunkFile):
    def read(self, num_bytes: int = -1) -> memoryview:
        raise _NothingRead


def _refuse_bad_chunks(metadata: Any, leaves: Sequence[int]) -> None:
    """Let pyarrow check all column chunks by a call that catches its C++ exceptions. `row_group.column` does not (26),
    so a damaged footer would end the process. All are checked before the first is read."""
    pa, pq = _import()
    if not metadata.num_row_groups or not leaves:
        return
    source = pa.PythonFile(_NoFile(1 << 62, [], _nothing), mode="r")
    try:
        with pq.ParquetFile(source, metadata=metadata, pre_buffer=True) as file:
            groups = list(range(metadata.num_row_groups))
            file.reader.read_row_groups(groups, column_indices=list(leaves), use_threads=False)
    except _NothingRead as nothing:
        # Arrow's reader keeps the exception. Its traceback would hold this frame, which holds the reader and the footer: a
        # circle through C++, which Python's collector cannot see.
        nothing.__traceback__ = None


def _nothing(start: int, length: int) -> memoryview:
    raise _NothingRead


def decode_group(
    footer: Footer,
    group: int,
    columns: Sequence[ColumnType],
    held: Sequence[tuple[int, memoryview]],
    *,
    where: str,
    size: int,
    read: ReadRange,
) -> list[Column]:
    """Some columns of a row group of a file of `size` bytes. `held` is what was read of the file, in order: (start, bytes).
    Raises FormatError naming the file as `where`, and what `read` raises."""
    pa, _ = _import()
    try:
        with _opened(footer, _ChunkFile(size, held, read)) as file:
            table = file.reader.read_row_group(group, column_indices=_leaves_of(columns), use_threads=False)
        return _columns_in(pa, columns, table, footer.metadata.row_group(group).num_rows)
    except LoaderkitError:
        raise
    except arrow_errors() as error:
        raise FormatError(f"{where}: row group {group} cannot be decoded: {error}") from error


def decode_slices(
    footer: Footer, group: int, columns: Sequence[ColumnType], num_rows: int, *, where: str, size: int, read: ReadRange
) -> Iterator[list[Column]]:
    """The same columns of `num_rows` rows after another, the last time of those that are left. The file is read on the way, by
    pieces of `_BUFFER_BYTES`. Raises FormatError, and what `read` raises."""
    pa, _ = _import()
    left: int = footer.metadata.row_group(group).num_rows
    try:
        with _opened(footer, _ChunkFile(size, [], read), buffer_size=_BUFFER_BYTES) as file:
            batches = file.reader.iter_batches(
                num_rows, row_groups=[group], column_indices=_leaves_of(columns), use_threads=False
            )
            parts: list[Any] = []
            wanted = min(num_rows, left)
            for batch in batches:  # of fewer rows, where they have more than 2 GiB of texts
                rest = batch
                while rest.num_rows:
                    part = rest.slice(0, wanted)
                    rest, wanted, left = rest.slice(len(part)), wanted - len(part), left - len(part)
                    parts.append(part)
                    if not wanted:
                        table = pa.Table.from_batches(parts)
                        parts, wanted = [], min(num_rows, left)
                        yield _columns_in(pa, columns, table, len(table))
        if left:
            raise ValueError(f"{left} of its rows are not there")
    except LoaderkitError:
        raise
    except arrow_errors() as error:
        raise FormatError(f"{where}: row group {group} cannot be decoded: {error}") from error


def _opened(footer: Footer, chunks: _ChunkFile, **how: Any) -> Any:
    """The file to pyarrow."""
    pa, pq = _import()
    return pq.ParquetFile(
        pa.PythonFile(chunks, mode="r"),
        metadata=footer.metadata,
        pre_buffer=False,
        page_checksum_verification=True,
        coerce_int96_timestamp_unit=_INT96_UNIT,
        **how,
    )


def _leaves_of(columns: Sequence[ColumnType]) -> list[int]:
    return sorted({leaf for column in columns for leaf in column.leaves})


def _columns_in(pa: Any, columns: Sequence[ColumnType], table: Any, num_rows: int) -> list[Column]:
    """The columns of a table, whose order is that of the file. Raises ValueError."""
    arrays = sorted(zip(columns, range(len(columns)), strict=True), key=lambda pair: pair[0].leaves)
    made: list[Column | None] = [None] * len(columns)
    for (column, place), array in zip(arrays, table.columns, strict=True):
        if len(array) != num_rows:
            raise ValueError(f"a column has {len(array)} values, and there are {num_rows} rows")
        made[place] = column_of(pa, column, joined(pa, array))
    return [column for column in made if column is not None]
