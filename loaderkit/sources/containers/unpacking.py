"""Unpacking a chunk within a bound: what would become longer is refused before there is memory for it.

Each function takes the packed bytes and `most`, and raises FormatError for what unpacks to more than `most` bytes.
The frames of zstd: RFC 8878; of Blosc 1: README_CHUNK_FORMAT.rst of c-blosc.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from loaderkit.errors import FormatError

Unpack = Callable[[memoryview, int], Any]
_MOST_DICTIONARY = 256 << 20
_ZSTD, _ZSTD_SKIPPED, _ZSTD_BLOCK = 0xFD2FB528, 0x184D2A5, 128 << 10
_MOST_UNSAID = 64 << 20


class _Decompressor(Protocol):
    """What decompressors of zlib, bz2 and lzma have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


def unpack_deflate(data: memoryview, most: int) -> bytes:
    """Of zlib or gzip, told from the first bytes."""
    return _in_streams(lambda: zlib.decompressobj(47), data, most, b"\x1f\x8b")


def unpack_bz2(data: memoryview, most: int) -> bytes:
    """Of bzip2."""
    return _in_streams(bz2.BZ2Decompressor, data, most, b"BZh")


def unpack_lzma(data: memoryview, most: int) -> bytes:
    """Of xz or the older lzma, with a dictionary of 256 MiB at most."""
    return _in_streams(lambda: lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY), data, most, b"\xfd7zXZ\0")


def unpack_zstd(data: memoryview, most: int) -> Any:
    """Of Zstandard. Frames that do not say how long they are may have 64 MiB in blocks that are less than full."""
    from numcodecs.zstd import Zstd

    said, unsaid = _zstd_lengths(data)
    if said > most or unsaid > max(2 * most, _MOST_UNSAID):
        raise _too_long(most)
    return _checked(Zstd().decode(data), most)


def unpack_lz4(data: memoryview, most: int) -> Any:
    """Of LZ4 as numcodecs writes it, behind the length."""
    from numcodecs.lz4 import LZ4

    if int.from_bytes(data[:4], "little") > most:
        raise _too_long(most)
    return LZ4().decode(data)


def unpack_blosc(data: memoryview, most: int) -> Any:
    """Of Blosc 1, whose header says both lengths. It is believed by c-blosc, which reads on behind a chunk that is cut."""
    from numcodecs.blosc import Blosc

    if len(data) < 16 or int.from_bytes(data[12:16], "little") != len(data):
        raise FormatError(f"a chunk is cut or damaged: it has {len(data)} bytes, and its header says another number")
    if int.from_bytes(data[4:8], "little") > most:
        raise _too_long(most)
    return Blosc().decode(data)


UNPACK: Mapping[str, Unpack] = {
    "zlib": unpack_deflate, "gzip": unpack_deflate, "bz2": unpack_bz2, "lzma": unpack_lzma, "zstd": unpack_zstd,
    "lz4": unpack_lz4, "blosc": unpack_blosc,
}  # fmt: skip


def _in_streams(make: Callable[[], _Decompressor], data: memoryview, most: int, begin: bytes) -> bytes:
    """What one stream has, and those behind it that begin so; `most` + 1 bytes are enough to know that it is too long."""
    found: list[bytes] = []
    room = most + 1
    rest: Any = data
    while not found or rest.startswith(begin):
        stream = make()
        found.append(stream.decompress(rest, room))
        room -= len(found[-1])
        if room <= 0:
            raise _too_long(most)
        if not stream.eof:
            raise FormatError("a chunk is cut: its packed bytes end too early")
        rest = stream.unused_data
    return found[0] if len(found) == 1 else b"".join(found)


def _zstd_lengths(data: memoryview) -> tuple[int, int]:
    """(the bytes that frames say they have, the most that the blocks of other frames may have)."""
    said = unsaid = at = 0
    while at < len(data):
        if int.from_bytes(data[at : at + 4], "little") >> 4 == _ZSTD_SKIPPED:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        if len(data) < at + 6 or int.from_bytes(data[at : at + 4], "little") != _ZSTD:
            raise FormatError("a chunk is damaged: it is no frame of Zstandard")
        flags = data[at + 4]
        is_single, has_checksum = flags >> 5 & 1, flags >> 2 & 1
        at += 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        size = (is_single, 2, 4, 8)[flags >> 6]
        if size:
            said += int.from_bytes(data[at : at + size], "little") + 256 * (size == 2)
        at += size
        is_last = False
        while not is_last:
            if len(data) < at + 3:
                raise FormatError("a chunk is cut: its packed bytes end too early")
            head = int.from_bytes(data[at : at + 3], "little")
            is_last, kind, length = bool(head & 1), head >> 1 & 3, head >> 3
            if not size:
                unsaid += min(length, _ZSTD_BLOCK) if kind < 2 else _ZSTD_BLOCK
            at += 3 + (1 if kind == 1 else length)
        at += 4 * has_checksum
    return said, unsaid


def _checked(unpacked: Any, most: int) -> Any:
    if len(unpacked) > most:
        raise _too_long(most)
    return unpacked


def _too_long(most: int) -> FormatError:
    return FormatError(
        f"a chunk unpacks to more than {most} bytes, which is more than its shape and type have room for: it is damaged, or "
        "made to fill the memory"
    )
