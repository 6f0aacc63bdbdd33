"""A column of a decoded row group, from Arrow's array."""

from __future__ import annotations

from typing import Any

from loaderkit.sources.arrow.buffers import bytes_of, node_of, plain, there
from loaderkit.sources.arrow.columns import FileColumn, FixedColumn, ListColumn, NullColumn, TextColumn
from loaderkit.sources.arrow.nested import NestedColumn
from loaderkit.sources.arrow.row_groups import Column
from loaderkit.sources.arrow.types import ColumnType


def joined(pa: Any, chunks: Any) -> Any:
    """One array; of more than 2 GiB of texts or bytes pyarrow makes several."""
    if chunks.num_chunks > 1 and (
        large := {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}.get(chunks.type)
    ):
        chunks = chunks.cast(large)
    return chunks.chunk(0) if chunks.num_chunks == 1 else pa.concat_arrays(chunks.chunks or [pa.array([], chunks.type)])


def column_of(pa: Any, column: ColumnType, array: Any) -> Column:
    """The column of that type, also of an array of nulls. Raises ValueError for an array whose offsets are none."""
    if pa.types.is_null(array.type):
        return NullColumn(column.dtype, column.shape)
    if column.content == "nested":
        return NestedColumn(pa, array, column.json)
    array = plain(pa, array)
    if column.content == "number":
        node = node_of(pa, array)
        if None in column.shape:
            return ListColumn(node, there(array))
        return FixedColumn(node, len(array), tuple(length for length in column.shape if length is not None))
    if column.content == "file":
        names = [field.name for field in array.type]
        contents, paths = (plain(pa, array.flatten()[names.index(name)]) for name in ("bytes", "path"))
        return FileColumn(bytes_of(pa, contents), bytes_of(pa, paths))
    return TextColumn(bytes_of(pa, array)) if column.content == "text" else bytes_of(pa, array)
