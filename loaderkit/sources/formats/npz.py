"""NumPy's `.npz`: locates its arrays and unpacks the compressed ones, without running code.

    a zip: its directory (at the end) ──> NpzMember of every array ──> its own header and bytes, as in .npy

The format is PKWARE's APPNOTE. Every error is a `FormatError` that names the offset or the array; the caller adds the file.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from loaderkit.errors import FormatError
from loaderkit.sources.formats.npy import MAX_HEADER, USUAL_HEADER, Read, parse_npy_header, view_npy

# A member's local header; the last fields are the lengths of name and extra field.
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
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
    head = bytearray(max(0, min(size - start, _LOCAL.size + 2 * len(info.filename) + 32 + USUAL_HEADER)))
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
    """The bytes of a member's `.npy` file, from the archive's bytes: a view unless it is compressed. Raises
    FormatError, to which the caller adds the array's name.

    Its CRC is checked.
    """
    stored = data[member.start : member.start + member.num_stored]
    if not member.is_packed:
        if zlib.crc32(stored) != member.crc:
            raise FormatError("it is damaged: its bytes are others than were stored (their CRC-32 differs)")
        return stored
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        head = unpacker.decompress(stored, min(member.size, MAX_HEADER) or 1)
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
