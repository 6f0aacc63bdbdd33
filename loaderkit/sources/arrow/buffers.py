"""The contents of the buffers of Arrow's arrays, as NumPy arrays over the same memory.

In a file, the arrays of record batches say themselves where their items begin, so this is compared with the actual sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.sources.arrow.columns import BytesColumn, FixedListNode, ListNode, Node, NumberNode
from loaderkit.sources.arrow.decimals import decimal_numbers
from loaderkit.sources.arrow.types import ColumnType, column_type

_OF_DECIMALS = {
    "float64": ", or a decimal of more than the 15 digits that float64 holds: write it as text, or cast it",
    "int64": ", or a decimal beyond 64 bits: write it as text, or cast it",
}


def plain(pa: Any, array: Any) -> Any:
    """An array without extensions, dictionaries and views."""
    array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
    if pa.types.is_null(array.type):
        array = array.cast(pa.string())
    return array


def node_of(pa: Any, array: Any) -> Node:
    """Numbers, or lists of them. Raises ValueError for invalid offsets."""
    array, types = plain(pa, array), pa.types
    if types.is_fixed_size_list(array.type):
        size = array.type.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        return FixedListNode(len(array), size, node_of(pa, items), there(array))
    if types.is_list(array.type) or types.is_large_list(array.type):
        bounds = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return ListNode(_checked(bounds, len(array.values)), node_of(pa, array.values), there(array))
    data = array.buffers()[1]
    if types.is_boolean(array.type):
        return NumberNode(_bits(data, array.offset, len(array)), there(array))
    if types.is_decimal(array.type):
        return _decimals(array, column_type(pa, array.type))
    if not (types.is_integer(array.type) or types.is_floating(array.type)):
        days_or_times = np.dtype(f"i{array.type.bit_width // 8}")
        return NumberNode(_numbers(data, days_or_times, array).astype(np.int64, copy=False), there(array))
    return NumberNode(_numbers(data, np.dtype(array.type.to_pandas_dtype()), array), there(array))


def _numbers(data: Any, dtype: np.dtype[Any], array: Any) -> NDArray[Any]:
    whole = np.empty(0, dtype) if data is None else np.frombuffer(data, dtype, array.offset + len(array))
    return whole[array.offset :]


def _decimals(array: Any, kind: ColumnType) -> NumberNode:
    width = array.type.byte_width
    word = np.dtype(f"i{min(width, 8)}")
    data = array.buffers()[1]
    num = (array.offset + len(array)) * width // word.itemsize
    words = np.empty(0, word) if data is None else np.frombuffer(data, word, num)
    numbers, is_held = decimal_numbers(words.reshape(-1, width // word.itemsize)[array.offset :], array.type.scale)
    valid = there(array)
    if is_held is None:
        return NumberNode(numbers, valid)
    return NumberNode(numbers, is_held if valid is None else is_held & valid, _OF_DECIMALS[kind.dtype])


def bytes_of(pa: Any, array: Any) -> BytesColumn:
    """Bytes or encoded texts, of a `plain` array. Raises ValueError for invalid offsets."""
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
    return BytesColumn(data, _checked(bounds, len(data)), there(array))


def _checked(bounds: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > num or (bounds[1:] < bounds[:-1]).any()):
        raise ValueError(f"offsets of values that do not ascend from 0 to {num}")
    return bounds


def there(array: Any) -> NDArray[np.bool_] | None:
    """True for items that are not null; None if no item is null."""
    return _bits(array.buffers()[0], array.offset, len(array)) if array.null_count else None


def _bits(data: Any, offset: int, num: int) -> NDArray[np.bool_]:
    if data is None:
        return np.zeros(num, np.bool_)
    first = offset // 8
    packed = np.frombuffer(data, np.uint8, -(-(offset + num) // 8))[first:]
    return np.unpackbits(packed, bitorder="little")[offset - 8 * first :][:num].view(np.bool_)
