"""Finds where the records of a TFRecord file begin, by the .idx of DALI's `tfrecord2idx` beside it or by their lengths,
and checks a record.

The .idx is text: a line for each record, its first byte and its bytes, length and checksums included.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from loaderkit import native
from loaderkit._internal.text import warn
from loaderkit.connectors.base import Connector, ObjectInfo, traits_of
from loaderkit.errors import AccessDeniedError, FormatError, ObjectNotFoundError
from loaderkit.sources.serial.files import refuse_compressed
from loaderkit.sources.serial.offsets import Int64s

_HEAD = struct.Struct("<QI")
_FRAME_BYTES = 16  # around the data
_BLOCK_BYTES = 64 << 10
_REMOTE_BLOCK_BYTES = 8 << 20  # a request takes as long as these bytes
_NO_BLANKS = np.zeros(0, np.int64)


def masked(crc: int) -> int:
    """A checksum as it is written."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def check_record(data: memoryview, *, is_full: bool) -> memoryview:
    """The data of a record, given with its length and checksums. Raises FormatError for a wrong length or checksum."""
    if len(data) < _FRAME_BYTES:
        raise FormatError(f"it has {len(data)} bytes, and a record at least {_FRAME_BYTES}")
    size, crc = _HEAD.unpack_from(data)
    if masked(native.crc32c(data[:8])) != crc:
        raise FormatError("the checksum of its length is wrong: it is damaged, or the index of the file is not its own")
    if size != len(data) - _FRAME_BYTES:
        raise FormatError(f"it has {size} bytes of data, and the index of the file says {len(data) - _FRAME_BYTES}")
    record = data[_HEAD.size : -4]
    if is_full and masked(native.crc32c(record)) != int.from_bytes(data[-4:], "little"):
        raise FormatError("the checksum of its data is wrong: it is damaged")
    return record


def find_records(connector: Connector, info: ObjectInfo) -> Iterator[tuple[Int64s, Int64s]]:
    """Where the records of a file begin, and its end: by the index beside it, else by their lengths. An index that does
    not fit gives a warning. Raises FormatError if these are no whole records."""
    try:
        starts = read_idx(connector, info)
    except FormatError as error:
        warn(f"{error}; write it again (`loaderkit index`) or delete it")
        starts = None
    if starts is None:
        yield from scan_records(connector, info)
    else:
        yield starts, _NO_BLANKS


def keys_beside(key: str) -> list[str]:
    """The names that the index of a file may have, the usual one first."""
    return list(dict.fromkeys((f"{key}.idx", f"{key.rpartition('.')[0] or key}.idx")))


def read_idx(connector: Connector, info: ObjectInfo) -> Int64s | None:
    """Where records begin by the .idx beside their file, and where the last ends; None if there is no such file. Raises
    FormatError, which names it, if it does not fit."""
    for key in keys_beside(info.key):
        try:
            beside = connector.stat(key)
            data = bytearray(beside.size)
            connector.read_into(key, 0, memoryview(data), etag=beside.etag)
        except (ObjectNotFoundError, AccessDeniedError):  # a store may answer "denied" for what does not exist
            continue
        try:
            return parse_idx(bytes(data), info.size)
        except FormatError as error:
            raise FormatError(f"the index {connector.describe(key)} is not used: {error}") from None
    return None


def parse_idx(data: bytes, size: int) -> Int64s:
    """Where records begin, and the end of a file of `size` bytes. Raises FormatError unless they lie one behind another, from
    the file's begin to its end."""
    words = data.split()
    try:
        numbers = np.array(words, np.int64) if all(map(bytes.isdigit, words)) else None
    except (ValueError, OverflowError):
        numbers = None
    if numbers is None or len(numbers) % 2:
        raise FormatError("it is no text of two numbers a line")
    begins, sizes = numbers[::2], numbers[1::2]
    starts = np.append(begins, size)
    if starts[0] != 0 or (sizes < _FRAME_BYTES).any() or (np.diff(starts) != sizes).any():
        raise FormatError(
            f"its records do not lie one behind another in {size} bytes: it is of another version of the file"
        )
    return starts


def write_idx(starts: Int64s) -> bytes:
    """The .idx of a file."""
    return "".join(f"{start} {end - start}\n" for start, end in pairwise(starts.tolist())).encode()


def scan_records(connector: Connector, info: ObjectInfo) -> Iterator[tuple[Int64s, Int64s]]:
    """Where the records of a file begin, and its end, by the length of each, whose checksum is compared. Raises FormatError,
    which names file and record, and what the connector raises."""
    name, size = connector.describe(info.key), info.size
    block_bytes = _REMOTE_BLOCK_BYTES if traits_of(connector).is_remote else _BLOCK_BYTES
    block = memoryview(bytearray(min(block_bytes, size)))
    at = num = 0
    while at < size:
        view = block[: min(len(block), size - at)]
        connector.read_into(info.key, at, view, etag=info.etag)
        if at == 0:
            refuse_compressed(name, view)
        begin, starts = at, []
        while at - begin + _HEAD.size <= len(view):
            length, crc = _HEAD.unpack_from(view, at - begin)
            if masked(native.crc32c(view[at - begin : at - begin + 8])) != crc:
                hint = (
                    ""
                    if num
                    else ", or the file holds no TFRecords, or compressed ones (ZLIB), which have no random access"
                )
                raise FormatError(f"{name}: the checksum of the length of record {num} is wrong: it is damaged{hint}")
            if length + _FRAME_BYTES > size - at:
                raise FormatError(f"{name}: record {num} ends behind the file of {size} bytes, which is truncated")
            starts.append(at)
            at += length + _FRAME_BYTES
            num += 1
        yield np.array(starts, np.int64), _NO_BLANKS
        if not starts:
            raise FormatError(f"{name}: record {num} ends behind the file of {size} bytes, which is truncated")
    yield np.array([size], np.int64), _NO_BLANKS
