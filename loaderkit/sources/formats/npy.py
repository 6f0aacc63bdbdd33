"""NumPy's `.npy`: an array's type, shape and place from one small range, without running code.

    magic, version, header (a dict as text) ──> NpyHeader ──> the array, row after row

The format is NumPy's (numpy.lib.format). Every error is a `FormatError` that names the offset; the caller adds the file.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError

Read = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes from an offset on, or raises."""

_MAGIC = b"\x93NUMPY"
USUAL_HEADER = 256  # NumPy pads to a multiple of 64: usually 128 bytes
MAX_HEADER = 65536  # structured types may have long headers; a longer one is damaged
_MAX_DIMENSIONS = 64
_ESCAPED = re.compile(r"""(?:[^\\]|\\[\\'"abfnrtvxuUN0-7\n])*""", re.DOTALL)  # Python warns about other backslashes


class NpyHeader(NamedTuple):
    """An array's type and shape, its order, and the offset of its data in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    data_start: int

    @property
    def num_bytes(self) -> int:
        """The size of the data, without the header."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_c_order(self) -> bool:
        """True if the last index runs fastest, as it does in either order if only one dimension is longer than 1."""
        return not self.fortran_order or sum(length != 1 for length in self.shape) <= 1


def read_npy_header(read: Read, size: int) -> NpyHeader:
    """The header of an array in `size` bytes, usually by one read of 256. Raises `FormatError`, and what `read` raises."""
    head = bytearray(min(size, USUAL_HEADER))
    read(0, memoryview(head))
    end = _header_end(head, size)
    if end > len(head):
        more = bytearray(end - len(head))
        read(len(head), memoryview(more))
        head += more
    return parse_npy_header(head, size)


def parse_npy_header(data: bytes | bytearray | memoryview, size: int) -> NpyHeader:
    """The header of an array of `size` bytes; `data` begins with it, and may go past it."""
    return _parsed(bytes(data[: _header_end(data, size)]))


@lru_cache(maxsize=32)  # files of one data set share their header; parsing takes 20 us
def _parsed(header: bytes) -> NpyHeader:
    version, begin = header[6], 10 if header[6] == 1 else 12
    where = f"the .npy header (bytes {begin} to {len(header)})"
    try:
        text = header[begin:].decode("utf-8" if version == 3 else "latin1").strip(" \n")
        if not _ESCAPED.fullmatch(text):
            raise ValueError("a backslash in front of a letter that has no meaning there")
        # Python 2 wrote long numbers as "10L".
        fields = ast.literal_eval(re.sub(r"(?<=\d)L(?=\s*[,)])", "", text) if version < 3 else text)
        repr(fields)  # fails for integers with thousands of digits
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"{where} is damaged: {error}") from None
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise FormatError(f"{where} is damaged: {str(fields)[:200]}")
    if not isinstance(fields["fortran_order"], bool):
        raise FormatError(f"{where} is damaged: fortran_order is {fields['fortran_order']!r:.200}, not True or False")
    parsed = NpyHeader(_dtype_of(fields["descr"]), _shape_of(fields["shape"]), fields["fortran_order"], len(header))
    if parsed.num_bytes >= 2**63:
        raise FormatError(f"{where} is damaged: {parsed.dtype} {list(parsed.shape)!s:.200} has more than 2**63 bytes")
    return parsed


def _header_end(data: bytes | bytearray | memoryview, size: int) -> int:
    """The offset of the header's end, from the first 12 bytes."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise FormatError(f"not an .npy file: it begins with {bytes(data[:8])!r} instead of {_MAGIC!r}")
    if size < 12 or len(data) < 12:
        raise FormatError(f"truncated .npy: {size} bytes do not hold a header")
    version = data[6]
    if version not in (1, 2, 3) or data[7]:
        raise FormatError(f"version {version}.{data[7]} of .npy is unknown (byte 6): expected 1.0, 2.0 or 3.0")
    length = struct.unpack_from("<H", data, 8)[0] + 10 if version == 1 else struct.unpack_from("<I", data, 8)[0] + 12
    if length > MAX_HEADER:
        raise FormatError(f"the .npy header takes {length} bytes, more than any array needs: it is damaged (byte 8)")
    if length > size:
        raise FormatError(f"truncated .npy: its header ends at byte {length}, the file at {size}")
    return int(length)


def _dtype_of(descr: object) -> np.dtype[Any]:
    try:
        if not isinstance(descr, (str, list, tuple)):
            raise TypeError("expected text, or a list for a structure")
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(descr)  # type: ignore[arg-type]
    except Exception as error:
        raise FormatError(f"the .npy header's descr {descr!r:.200} is no type of NumPy: {error}") from None
    if not dtype.itemsize:
        raise FormatError(f"the .npy header's descr {descr!r:.200} is a type of no bytes: there is nothing to read")
    if dtype.subdtype is not None:  # np.save writes none; NumPy itself changes what '1i2' means from version to version
        raise FormatError(f"the .npy header's descr {descr!r:.200} is an array within an array: save it as numbers")
    if dtype.hasobject:
        raise FormatError(
            f"the array holds Python objects ({descr!r:.200}), which only pickle could read, running whatever "
            "code they name: save it as an array of numbers"
        )
    return dtype


def _shape_of(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise FormatError(f"the .npy header's shape is {shape!r:.200}, not a tuple of lengths")
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(
            f"the .npy header's shape has {len(shape)} dimensions, NumPy's have {_MAX_DIMENSIONS} at most"
        )
    return shape


def view_npy(data: memoryview) -> NDArray[Any]:
    """The array in the bytes of an .npy file, as a view of `data`.

    Bytes after the array are ignored, as by np.load.
    """
    header = parse_npy_header(data, len(data))
    num_left = len(data) - header.data_start
    if header.num_bytes > num_left:
        raise FormatError(
            f"truncated .npy: {header.dtype} {list(header.shape)} takes {header.num_bytes} bytes from byte "
            f"{header.data_start} on, and {num_left} are there"
        )
    shape = header.shape[::-1] if header.fortran_order else header.shape
    try:
        array = np.ndarray(shape, header.dtype, data, header.data_start)
    except (ValueError, TypeError, OverflowError) as error:  # it has no bytes, and NumPy refuses its lengths or type
        raise FormatError(f"the .npy header's shape {header.shape} of {header.dtype} is no array: {error}") from None
    return array.T if header.fortran_order else array
