"""What pyarrow does for `kind: parquet`: it reads footers, and decodes the column chunks of a row group.

It never opens a file: a footer and the bytes of column chunks come through the connector, by ranges, and pyarrow gets them as
if from a file that has nothing else. It runs in the thread that calls, and starts none.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError, LoaderkitError, MissingExtraError
from loaderkit.sources.parquet.columns import (
    BytesColumn,
    FileColumn,
    FixedColumn,
    FixedListNode,
    ListColumn,
    ListNode,
    Node,
    NumberNode,
    TextColumn,
)
from loaderkit.sources.parquet.row_groups import Column

_BYTES = ("binary", "large_binary", "fixed_size_binary", "binary_view")
_TEXTS = ("string", "large_string", "string_view")
_LISTS = ("list", "large_list", "fixed_size_list")
_MOST_BYTES = 1 << 40  # of a column chunk: sums of what damage makes of it are to fit as well
_FILE = {"bytes": "bytes", "path": "text"}
ReadRange = Callable[[int, int], memoryview]
"""(start, length) -> bytes of the file."""
_MAGIC = b"PAR1"


class ColumnType(NamedTuple):
    """What a column holds, and which of the file's leaves it is made of. `content`: number, text, bytes or file; "" with
    `reason` if it can be no field. Numbers have NumPy's `dtype` and a `shape`, where None stands for any length."""

    content: str
    leaves: tuple[int, ...]
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        shape = ", ".join("any" if length is None else str(length) for length in self.shape)
        return self.reason or (f"{self.dtype} [{shape}]" if self.content == "number" else self.content)

    @property
    def row_bytes(self) -> int:
        """The least memory that a row takes when it is decoded; runs of equal values take less in the file."""
        if self.content != "number":
            return 8  # its bounds
        return np.dtype(self.dtype).itemsize * prod(1 if length is None else length for length in self.shape)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What has to be equal in all files."""
        return self.content, self.dtype, self.shape


class Footer(NamedTuple):
    """What a footer says: the columns by name, the names of classes by column, where Hugging Face's datasets wrote them, and
    pyarrow's FileMetaData."""

    columns: dict[str, ColumnType]
    classes: dict[str, list[str]]
    metadata: Any


class ChunkTable(NamedTuple):
    """The rows of each row group, and of some leaves [row groups, leaves] the first byte of the column chunk, its bytes in the
    file, and about how many it has when it is decoded; int64."""

    num_rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


def parse_footer(data: bytes, where: str) -> Footer:
    """Raises FormatError naming the file as `where`, MissingExtraError."""
    pa, pq = _import()
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + data))
        schema = metadata.schema.to_arrow_schema()
        columns = _columns_of(pa, schema, metadata.num_columns)
        return Footer(columns, _class_names(schema.metadata or {}), metadata)
    except _errors() as error:
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
    except _errors() as error:
        raise FormatError(f"{where}: its footer is damaged: {error}") from error
    is_inside = (starts >= len(_MAGIC)) & (lengths > 0) & (starts <= end - lengths) & (sizes >= 0)
    if not is_inside[num_rows > 0].all() or (num_rows < 0).any():
        raise FormatError(f"{where}: its footer is damaged: it names column chunks that cannot be there")
    if int(num_rows.sum()) != metadata.num_rows:
        raise FormatError(f"{where}: its footer is damaged: {metadata.num_rows} rows, {num_rows.sum()} in row groups")
    return ChunkTable(num_rows, starts, lengths, sizes)


def _import() -> tuple[Any, Any]:
    try:
        import pyarrow as pa  # late, as all that is heavy and not always needed
        from pyarrow import parquet as pq
    except ImportError as error:
        raise MissingExtraError(
            "kind: parquet needs pyarrow, which is not installed: pip install 'loaderkit[parquet]'"
        ) from error
    return pa, pq


def _errors() -> tuple[type[Exception], ...]:
    """What damaged bytes make pyarrow raise, or the code around it."""
    pa, _ = _import()
    return (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError)


# ------------------------------------------------------------------------------------------------------------- types


def _columns_of(pa: Any, schema: Any, num_leaves: int) -> dict[str, ColumnType]:
    columns: dict[str, ColumnType] = {}
    first = 0
    for field in schema:
        end = first + _count_leaves(pa, field.type)
        column = _type_of(pa, field.type, tuple(range(first, end)))
        if field.name in columns:
            column = column._replace(content="", reason="a second column of this name")
        columns[field.name] = column
        first = end
    if first != num_leaves:
        raise ValueError(f"{num_leaves} leaves, and the types of its columns have {first}")
    return columns


def _count_leaves(pa: Any, kind: Any) -> int:
    """The columns of numbers, texts or bytes that a type is stored as."""
    kind = _stored(pa, kind)
    if pa.types.is_dictionary(kind):
        return 1
    return sum(_count_leaves(pa, kind.field(number).type) for number in range(kind.num_fields)) or 1


def _stored(pa: Any, kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _type_of(pa: Any, kind: Any, leaves: tuple[int, ...]) -> ColumnType:
    types = pa.types
    plain = _stored(pa, kind)
    plain = plain.value_type if types.is_dictionary(plain) else plain
    if types.is_boolean(plain) or types.is_integer(plain) or types.is_floating(plain):
        return ColumnType(
            "number", leaves, "bool" if types.is_boolean(plain) else np.dtype(plain.to_pandas_dtype()).name
        )
    if any(getattr(types, f"is_{name}")(plain) for name in _BYTES):
        return ColumnType("bytes", leaves)
    if any(getattr(types, f"is_{name}")(plain) for name in _TEXTS):
        return ColumnType("text", leaves)
    if any(getattr(types, f"is_{name}")(plain) for name in _LISTS):
        items = _type_of(pa, plain.value_type, leaves)
        shape = (plain.list_size if types.is_fixed_size_list(plain) else None, *items.shape)
        is_tensor = isinstance(kind, pa.FixedShapeTensorType)
        if items.content == "number" and not (
            is_tensor and list(kind.permutation or ()) != sorted(kind.permutation or ())
        ):
            return items._replace(shape=tuple(kind.shape) if is_tensor else shape)
    elif types.is_struct(plain) and {one.name: _type_of(pa, one.type, ()).content for one in plain} == _FILE:
        return ColumnType("file", leaves)
    return ColumnType("", leaves, reason=str(kind))


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The names of classes by column, from the features that Hugging Face's datasets write into a file."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            name: [str(one) for one in feature["names"]]
            for name, feature in features.items()
            if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
        }
    except (KeyError, TypeError, ValueError, AttributeError):  # another program's
        return {}


# ------------------------------------------------------------------------------------------------------------- decoding


class _ChunkFile:
    """The file as pyarrow sees it: the bytes of the column chunks that were read; what else it asks for is read then."""

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
    """Let pyarrow look at all column chunks where it catches what its own code throws. In `row_group.column` it does not (26),
    and a damaged footer would end the process. All are looked at before the first is read."""
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
    pa, pq = _import()
    metadata = footer.metadata
    leaves = sorted({leaf for column in columns for leaf in column.leaves})
    try:
        source = pa.PythonFile(_ChunkFile(size, held, read), mode="r")
        with pq.ParquetFile(source, metadata=metadata, pre_buffer=False, page_checksum_verification=True) as file:
            table = file.reader.read_row_group(group, column_indices=leaves, use_threads=False)
        num_rows = metadata.row_group(group).num_rows
        arrays = sorted(zip(columns, range(len(columns)), strict=True), key=lambda pair: pair[0].leaves)
        made: list[Column | None] = [None] * len(columns)
        for (column, place), array in zip(arrays, table.columns, strict=True):
            if len(array) != num_rows:
                raise ValueError(f"a column has {len(array)} values, and there are {num_rows} rows")
            made[place] = _column(pa, column, _joined(pa, array))
    except LoaderkitError:
        raise
    except _errors() as error:
        raise FormatError(f"{where}: row group {group} cannot be decoded: {error}") from error
    return [column for column in made if column is not None]


def _joined(pa: Any, chunks: Any) -> Any:
    """One array; of more than 2 GiB of texts or bytes pyarrow makes several."""
    if chunks.num_chunks > 1 and (
        large := {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}.get(chunks.type)
    ):
        chunks = chunks.cast(large)
    return chunks.chunk(0) if chunks.num_chunks == 1 else pa.concat_arrays(chunks.chunks or [pa.array([], chunks.type)])


def _column(pa: Any, column: ColumnType, array: Any) -> Column:
    array = _plain(pa, array)
    if column.content == "number":
        node = _node(pa, array)
        if None in column.shape:
            return ListColumn(node, _there(array))
        return FixedColumn(node, len(array), tuple(length for length in column.shape if length is not None))
    if column.content == "file":
        names = [field.name for field in array.type]
        contents, paths = (_plain(pa, array.flatten()[names.index(name)]) for name in ("bytes", "path"))
        return FileColumn(_bytes(pa, contents), _bytes(pa, paths))
    return TextColumn(_bytes(pa, array)) if column.content == "text" else _bytes(pa, array)


def _plain(pa: Any, array: Any) -> Any:
    array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
    return array


def _node(pa: Any, array: Any) -> Node:
    array, types = _plain(pa, array), pa.types
    if types.is_fixed_size_list(array.type):
        size = array.type.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        return FixedListNode(len(array), size, _node(pa, items), _there(array))
    if types.is_list(array.type) or types.is_large_list(array.type):
        bounds = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return ListNode(bounds, _node(pa, array.values), _there(array))
    data = array.buffers()[1]
    if types.is_boolean(array.type):
        return NumberNode(_bits(data, array.offset, len(array)), _there(array))
    dtype = np.dtype(array.type.to_pandas_dtype())
    whole = np.empty(0, dtype) if data is None else np.frombuffer(data, dtype, array.offset + len(array))
    return NumberNode(whole[array.offset :], _there(array))


def _bytes(pa: Any, array: Any) -> BytesColumn:
    _, *parts = array.buffers()
    begin, end = array.offset, array.offset + len(array)
    data = memoryview(parts[-1] if parts[-1] is not None else b"").cast("B")
    if pa.types.is_fixed_size_binary(array.type):
        bounds = np.arange(begin, end + 1, dtype=np.int64) * array.type.byte_width
    else:
        is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        dtype = np.dtype(np.int64 if is_large else np.int32)
        bounds = np.zeros(1, np.int64)
        if len(array):
            bounds = np.frombuffer(parts[0], dtype, end + 1)[begin:].astype(np.int64)
    return BytesColumn(data, bounds, _there(array))


def _there(array: Any) -> NDArray[np.bool_] | None:
    """True for what is not null; None: all is there."""
    return _bits(array.buffers()[0], array.offset, len(array)) if array.null_count else None


def _bits(data: Any, offset: int, num: int) -> NDArray[np.bool_]:
    if data is None:
        return np.zeros(num, np.bool_)
    first = offset // 8
    packed = np.frombuffer(data, np.uint8)[first : -(-(offset + num) // 8)]
    return np.unpackbits(packed, bitorder="little")[offset - 8 * first :][:num].view(np.bool_)
