"""The pages of an Ogg file (RFC 3533). FFmpeg and libsndfile leave damaged and missing ones out without a word."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from loaderkit.errors import FormatError

_HEADER_BYTES = 27
_BEGINS, _ENDS = 2, 4
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class _Page(NamedTuple):
    flags: int
    serial: bytes
    number: int
    content: int  # where it begins
    end: int


def check_pages(data: memoryview) -> None:
    """Raise FormatError for a file with a page that is damaged, missing or cut. What follows the last one is no part of it."""
    following: dict[bytes, int] = {}  # of the streams that have begun and not ended: the number of the next page
    position = 0
    while position < data.nbytes:
        if position and not following and bytes(data[position : position + 4]) != b"OggS":
            return
        page = _page_at(data, position)
        expected = page.number if page.flags & _BEGINS else following.pop(page.serial, None)
        if expected is None:
            raise FormatError(f"ogg: the page at byte {position} is of a stream that has not begun")
        if page.number != expected:
            raise FormatError(f"ogg: page {expected} is missing: at byte {position} comes page {page.number}")
        if not page.flags & _ENDS:
            following[page.serial] = page.number + 1
        position = page.end
    if following:
        raise FormatError(
            f"ogg: its last page, which ends at byte {position}, does not say that it is the last: it is cut"
        )


def codec_of(data: memoryview) -> str | None:
    """`vorbis` or `opus` if one such sound is all that the file has, else None. Raises FormatError."""
    first = _page_at(data, 0)
    head = bytes(data[first.content : first.content + 8])
    if data.nbytes > first.end and _page_at(data, first.end).flags & _BEGINS:
        return None
    return "vorbis" if head[:7] == b"\1vorbis" else "opus" if head == b"OpusHead" else None


def has_pages(data: memoryview, num: int) -> bool:
    """True for a file of `num` pages or more. Raises FormatError."""
    position = 0
    for _ in range(num):
        if position >= data.nbytes:
            return False
        position = _page_at(data, position).end
    return True


def _page_at(data: memoryview, position: int) -> _Page:
    head = bytes(data[position : position + _HEADER_BYTES])
    if len(head) < _HEADER_BYTES or head[:4] != b"OggS":
        raise FormatError(f"ogg: at byte {position} begins no page: it is damaged or cut")
    content = position + _HEADER_BYTES + head[26]
    end = content + sum(data[position + _HEADER_BYTES : content])
    if end > data.nbytes:
        raise FormatError(f"ogg: the page at byte {position} ends at {end}, and the file at {data.nbytes}: it is cut")
    if _checksum(head[:22] + bytes(4) + bytes(data[position + 26 : end])) != head[22:26]:
        raise FormatError(f"ogg: the page at byte {position} is damaged: its checksum is another")
    return _Page(head[5], head[14:18], int.from_bytes(head[18:22], "little"), content, end)


def _checksum(page: bytes) -> bytes:
    """CRC-32 without mirroring, from 0 on: zlib's of the mirrored bytes, mirrored."""
    mirrored = zlib.crc32(page.translate(_MIRRORED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return mirrored.to_bytes(4, "big").translate(_MIRRORED)
