"""The values of MDS: how each encoding of a column stores one, after the format's description in mosaicml-streaming 0.13.

Not read are `pkl`, because reading it would run code, `pil` (raw pixels) and `str_decimal`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from loaderkit.errors import FormatError
from loaderkit.samples.values import as_array

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_ARRAYS = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}


class Encoding(NamedTuple):
    """How a column's values are stored: `decode` makes one of its bytes, of which there are `size`, or any number if
    that is None."""

    decode: Callable[[memoryview], Any]
    size: int | None = None


def encoding_of(text: str) -> Encoding | None:
    """The encoding with this name in an index, or None if there is none."""
    name, _, details = text.partition(":")
    if name == "ndarray":
        return _array_encoding(details)
    if text in ("int", *_SCALARS):
        dtype = np.dtype("int64" if text == "int" else text)
        return Encoding(partial(_scalar, dtype), dtype.itemsize)
    has_quality = name == "jpeg" and (details.isdecimal() or not details)  # of which only its writer knows
    decode = _OTHERS.get(name if has_quality else text)
    return None if decode is None else Encoding(decode)


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    value = np.frombuffer(data, dtype)[0]
    return value.item() if dtype.name in ("int64", "float64") else value  # Python has these types


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _number(make: Callable[[str], Any], data: memoryview) -> Any:
    return make(_text(data))


def _json(data: memoryview) -> Any:
    value = json.loads(_text(data))
    return as_array(value) if type(value) is list else value


def _array_encoding(details: str) -> Encoding | None:
    name, _, dimensions = details.partition(":")
    sizes = dimensions.split(",") if dimensions else []
    if name not in ("", *_SCALARS) or not all(size.isdigit() and len(size) < 12 for size in sizes):
        return None
    dtype, shape = np.dtype(name) if name else None, tuple(map(int, sizes)) or None
    size = None if dtype is None or shape is None else dtype.itemsize * prod(shape)
    return Encoding(partial(_array, dtype, shape), size)


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: memoryview) -> Any:
    at = 0
    if dtype is None:
        dtype, at = np.dtype(_ARRAYS[data[0]]), 1
    if shape is None:
        num_dimensions, size = data[at] >> 2, 1 << (data[at] & 3)
        at += 1
        shape = tuple(np.frombuffer(data[at : at + num_dimensions * size], f"<u{size}").tolist())
        at += num_dimensions * size
    if dtype.itemsize * prod(shape) != len(data) - at:
        raise FormatError(f"an array {dtype.name} {list(shape)} does not have the {len(data) - at} bytes that follow")
    return np.frombuffer(data[at:], dtype).reshape(shape).copy()


def _several(first: int, data: memoryview) -> list[bytes]:
    """A list of pictures: behind `first` bytes their number, their sizes, and the pictures."""
    (num,) = np.frombuffer(data[first : first + 4], "<u4").tolist()
    at = first + 4 + 4 * num
    items = []
    for size in np.frombuffer(data[first + 4 : at], "<u4").tolist():
        items.append(bytes(data[at : at + size]))
        at += size
    if len(items) != num or at != len(data):
        raise FormatError(f"a list of {num} items does not end where its {len(data)} bytes do")
    return items


_OTHERS: dict[str, Callable[[memoryview], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": _text,
    "str_int": partial(_number, int),
    "str_float": partial(_number, float),
    "json": _json,
    **dict.fromkeys(("jpeg_array", "jpegarray"), partial(_several, 0)),
    **dict.fromkeys(("list[jpeg]", "list[png]"), partial(_several, 4)),
}
