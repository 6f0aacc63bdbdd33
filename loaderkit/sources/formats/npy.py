"""NumPy's `.npy` and `.npz`: locates arrays and their types from a few small ranges, without running code.

    .npy   magic, version, header (a dict as text) ──> NpyHeader ──> the array, row after row
    .npz   a zip: its directory (at the end) ──> NpzMember of every array ──> its own header and bytes, as in .npy

The formats are NumPy's (numpy.lib.format) and PKWARE's APPNOTE. Every error is a `FormatError` that names the offset; the
caller adds the file.
"""

from __future__ import annotations

import ast
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError

Read = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes from an offset on, or raises."""

_MAGIC = b"\x93NUMPY"
_USUAL_HEADER = 256  # NumPy pads to a multiple of 64: usually 128 bytes
_MAX_HEADER = 65536  # structured types may have long headers; a longer one is damaged
_MAX_DIMENSIONS = 64
_ESCAPED = re.compile(r"""(?:[^\\]|\\[\\'"abfnrtvxuUN0-7\n])*""", re.DOTALL)  # Python warns about other backslashes

# ------------------------------------------------------------------------------------------------------ one array


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
    head = bytearray(min(size, _USUAL_HEADER))
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
    if length > _MAX_HEADER:
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
    except (
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # an array without bytes whose lengths or type NumPy refuses
        raise FormatError(f"the .npy header's shape {header.shape} of {header.dtype} is no array: {error}") from None
    return array.T if header.fortran_order else array


# ----------------------------------------------------------------------------------------------- several in a zip

_LOCAL = struct.Struct(
    "<4sHHHHHIIIHH"
)  # a member's local header; the last fields are the lengths of name and extra field
_MAX_DEFLATE = 1032  # the highest ratio of deflate: 258 bytes in 2 bits


class NpzMember(NamedTuple):
    """One array of an archive: its name, the offset of its bytes in the archive, and their number, stored and unpacked.

    `head` holds the first of those bytes, which were read with the local header.
    """

    name: str
    start: int
    num_stored: int
    size: int
    is_packed: bool
    crc: int
    head: bytes


def read_npz_members(read: Read, size: int) -> list[NpzMember]:
    """The arrays of an archive of `size` bytes, in its order: one read of its end, and one of about 300 bytes per array."""
    try:
        with zipfile.ZipFile(_RangeFile(read, size)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError, OverflowError) as error:
        raise FormatError(f"not a whole .npz archive ({size} bytes): {error}") from None
    members = [_member_of(info, read, size) for info in infos]
    names: set[str] = set()
    for member in members:
        if member.name in names:
            raise FormatError(f"the .npz archive holds two arrays called {member.name!r}: it is damaged")
        names.add(member.name)
    for before, after in pairwise(sorted(members, key=lambda member: member.start)):
        if before.start + before.num_stored > after.start:
            raise FormatError(
                f"the arrays {before.name!r} and {after.name!r} share bytes of the .npz archive: it is damaged"
            )
    return members


def _member_of(info: zipfile.ZipInfo, read: Read, size: int) -> NpzMember:
    name = info.filename.removesuffix(".npy")
    where = f"member {info.filename!r:.200} of the .npz archive"
    if name == info.filename or not name:
        raise FormatError(f"{where} is no array: np.savez calls arrays <name>.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 0x1:
        raise FormatError(f"{where} is packed by method {info.compress_type} or encrypted: write it with np.savez")
    start = info.header_offset
    head = bytearray(max(0, min(size - start, _LOCAL.size + 2 * len(info.filename) + 32 + _USUAL_HEADER)))
    if start < 0 or len(head) < _LOCAL.size:
        raise FormatError(f"{where} begins at byte {start} of {size}: the archive is damaged")
    read(start, memoryview(head))
    signature, *_, name_length, extra_length = _LOCAL.unpack_from(head)
    skipped = _LOCAL.size + name_length + extra_length
    if signature != b"PK\3\4" or start + skipped + info.compress_size > size:
        raise FormatError(f"{where} does not lie where the archive's directory says (byte {start}): it is damaged")
    is_packed = info.compress_type != zipfile.ZIP_STORED
    most = info.compress_size * _MAX_DEFLATE + 1024 if is_packed else info.compress_size
    if info.file_size > most or (not is_packed and info.file_size != most):
        raise FormatError(
            f"{where} cannot be {info.file_size} bytes, as the directory says, packed in {info.compress_size}"
        )
    begun = bytes(head[skipped : skipped + info.compress_size])
    return NpzMember(name, start + skipped, info.compress_size, info.file_size, is_packed, info.CRC, begun)


def unpack_member(member: NpzMember, data: memoryview) -> memoryview:
    """The bytes of a member's `.npy` file, from those of the archive: a view unless it is compressed. Raises FormatError, to
    which the caller adds the array's name.

    The CRC of a compressed member is checked, as it costs less than unpacking; that of a stored one is not checked.
    """
    stored = data[member.start : member.start + member.num_stored]
    if not member.is_packed:
        return stored
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        head = unpacker.decompress(stored, min(member.size, _MAX_HEADER) or 1)
        _check_unpacked(head, member.size)
        unpacked = head + unpacker.decompress(unpacker.unconsumed_tail, member.size + 1 - len(head))
    except zlib.error as error:
        raise FormatError(f"it cannot be unpacked: {error}") from None
    if len(unpacked) != member.size or zlib.crc32(unpacked) != member.crc:
        raise FormatError(
            f"it is damaged: it unpacks to {len(unpacked)} bytes of {member.size}, or to others than were packed"
        )
    return memoryview(bytearray(unpacked))  # writable, as other arrays; a twentieth of unpacking


def _check_unpacked(head: bytes, size: int) -> None:
    """Raise FormatError unless an array that begins with `head` has about the `size` in the directory: bytes after an array are
    ignored, but compressed they could unpack to a thousand times their size."""
    header = parse_npy_header(head, size)
    end = header.data_start + header.num_bytes
    if not end <= size <= 2 * end + 2**20:
        raise FormatError(
            f"it is damaged: it unpacks to {size} bytes, and {header.dtype} {list(header.shape)} ends at byte {end}"
        )


def view_npz(data: memoryview) -> dict[str, NDArray[Any]]:
    """The arrays in the bytes of an .npz file by name; stored ones are views, see `view_npy`."""

    def read(start: int, buffer: memoryview) -> None:
        buffer[:] = data[start : start + len(buffer)]

    arrays = {}
    for member in read_npz_members(read, len(data)):
        try:
            arrays[member.name] = view_npy(unpack_member(member, data))
        except FormatError as error:
            raise FormatError(f"array {member.name!r}: {error}") from None
    return arrays


class _RangeFile(io.RawIOBase):
    """A seekable file over a function that reads ranges. Its end, which holds a zip's directory, is read once: `zipfile` reads
    it three times."""

    _TAIL = 8192

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._position = 0
        self._tail_start = max(0, size - self._TAIL)
        self._tail = memoryview(bytearray(size - self._tail_start))
        read(self._tail_start, self._tail)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise OSError(f"byte {position} lies before the first")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        num_bytes = max(0, min(len(target), self._size - self._position))
        if self._position >= self._tail_start:
            first = self._position - self._tail_start
            target[:num_bytes] = self._tail[first : first + num_bytes]
        elif num_bytes:
            self._read(self._position, target[:num_bytes])
        self._position += num_bytes
        return num_bytes
