"""Finds where the lines of a file begin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError
from loaderkit.sources.serial.files import refuse_compressed
from loaderkit.sources.serial.offsets import Int64s

_BLOCK_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
_IS_INK = ~np.isin(np.arange(256), list(b" \t\r\n"))


def find_lines(connector: Connector, info: ObjectInfo) -> Iterator[tuple[Int64s, Int64s]]:
    """Where the lines of a file begin, and which are blank; read block by block. Raises FormatError for one that is compressed
    or not UTF-8, and what the connector raises."""
    name, num_lines, begin = connector.describe(info.key), 0, 0
    block = memoryview(bytearray(min(_BLOCK_BYTES, info.size)))
    no_blanks, is_blank, last = np.zeros(0, np.int64), True, 0
    if not info.size:
        yield np.zeros(1, np.int64), no_blanks
        return
    while begin < info.size:
        view = block[: min(len(block), info.size - begin)]
        connector.read_into(info.key, begin, view, etag=info.etag)
        first = 0
        if begin == 0:
            refuse_compressed(name, view)
            if bytes(view[:2]) in {b"\xff\xfe", b"\xfe\xff"}:
                raise FormatError(f"{name} is UTF-16: convert it to UTF-8, as by `iconv -f UTF-16 -t UTF-8`")
            first = last = len(_BOM) if view[:3] == _BOM else 0
            yield np.array([first], np.int64), no_blanks
        found, blanks, is_blank = scan_lines(view[first:], begin + first, is_blank)
        yield found, blanks + num_lines
        num_lines += len(found)
        last = int(found[-1]) if len(found) else last
        begin += len(view)
    if last != info.size:  # the last line has no end
        yield np.array([info.size], np.int64), np.array([num_lines] if is_blank else [], np.int64)


def scan_lines(data: bytes | memoryview, begin: int, is_blank: bool) -> tuple[Int64s, Int64s, bool]:
    """Where lines begin behind those that end in `data`, which itself begins at `begin`, and which of the lines that
    end are blank (spaces, tabs, CR), counted from the first. `is_blank`: whether the line that continues at the start
    was blank so far; the third result says the same of the line that continues behind the end. At 1 GB/s, a fifth of
    that where lines begin with spaces."""
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == ord("\n"))
    firsts = np.concatenate(([0], ends + 1))  # of the lines, also of the one that continues
    are_blank = firsts == np.append(ends, len(array))
    inside = firsts[: len(firsts) - (firsts[-1] == len(array))]
    if (array[inside[~are_blank[: len(inside)]]] <= ord(" ")).any():
        are_blank[: len(inside)] = ~np.logical_or.reduceat(_IS_INK[array], inside)
    are_blank[0] &= is_blank
    return begin + firsts[1:], np.flatnonzero(are_blank[:-1]), bool(are_blank[-1])
