"""Kernels for samples that lie one behind another in files, in Python and NumPy; see `fallback`."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CASTAGNOLI = 0x82F63B78  # bits reversed
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_LANES = 4096


def scan_lines(data: bytes | memoryview, begin: int, is_blank: bool) -> tuple[bytes, bytes, bool]:
    """Where lines begin behind those that end in `data`, which itself begins at `begin`, and which of these are blank (spaces,
    tabs, CR), counted from the first: int64, as bytes. `is_blank`: the line that goes on at the begin is so before it; and, as
    the third result, the one that goes on behind the end."""
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == ord("\n"))
    firsts = np.concatenate(([0], ends + 1)).astype(np.int64)  # of the lines, also of the one that goes on
    stops = np.append(ends, len(array))
    may_be_blank = (firsts == stops) | (
        array.take(np.minimum(firsts, len(array) - 1)) <= ord(" ") if len(array) else True
    )
    may_be_blank[0] &= is_blank
    lines = np.flatnonzero(may_be_blank).tolist()
    blanks = [line for line in lines if not array[firsts[line] : stops[line]].tobytes().strip(b" \t\r")]
    goes_on = bool(blanks) and blanks[-1] == len(ends)
    return (begin + firsts[1:]).tobytes(), np.array(blanks[: len(blanks) - goes_on], np.int64).tobytes(), goes_on


@cache
def _table() -> NDArray[np.uint32]:
    """The checksum of each byte."""
    values: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = ((values >> 1) ^ np.where(values & 1, _CASTAGNOLI, 0)).astype(np.uint32)
    return values


@cache
def _shift(num_bytes: int) -> tuple[int, ...]:
    """What each of the 32 bits of a checksum becomes when `num_bytes` zeros are appended to the data."""
    if num_bytes == 1:
        table = _table().tolist()
        return tuple(bit >> 8 ^ table[bit & 0xFF] for bit in (1 << place for place in range(32)))
    half = _shift(num_bytes // 2)
    twice = tuple(_applied(half, column) for column in half)
    return twice if num_bytes % 2 == 0 else tuple(_applied(_shift(1), column) for column in twice)


def _applied(columns: tuple[int, ...], crc: int) -> int:
    result, place = 0, 0
    while crc:
        result ^= columns[place] if crc & 1 else 0
        crc, place = crc >> 1, place + 1
    return result


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of contiguous bytes."""
    array = np.frombuffer(data, np.uint8)
    table = _table()
    lane_bytes = 1
    while lane_bytes * lane_bytes < min(len(array), _MOST_LANES * _MOST_LANES):
        lane_bytes *= 2
    num_lanes = len(array) // lane_bytes
    crc = 0xFFFFFFFF
    if num_lanes > 8:  # all lanes at once, each as if it were alone
        lanes = array[: num_lanes * lane_bytes].reshape(num_lanes, lane_bytes)
        sums = np.zeros(num_lanes, np.uint32)
        for place in range(lane_bytes):
            sums = (sums >> np.uint32(8)) ^ table[(sums ^ lanes[:, place]) & np.uint32(0xFF)]
        columns = _shift(lane_bytes)
        for lane in sums.tolist():
            crc = _applied(columns, crc) ^ lane
        array = array[num_lanes * lane_bytes :]
    single = table.tolist()
    for byte in array.tolist():
        crc = crc >> 8 ^ single[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


Field = tuple[int, int, memoryview]
"""The number of a field, the type it has on the wire, and its bytes."""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at == len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        at += 1
        if shift == 63 and byte > 1:
            break
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than 64 bits")


def _fields(data: memoryview, most: int, other: int = -1) -> Iterator[Field]:
    """The fields with numbers up to `most`, which have the type of bytes, or `other`."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if tag >> 32 or not number:
            raise ValueError("a field has no number that there is")
        if number <= most and kind not in (_BYTES, other):
            raise ValueError("a field is not of its type")
        begin = at
        if kind == _BYTES:
            size, begin = _varint(data, at)
            at = begin + size
            if at > len(data):
                raise ValueError("a length reaches beyond what holds it")
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
            if at > len(data):
                raise ValueError("a value is cut off")
        else:
            raise ValueError("a field is a group")
        if number <= most:
            yield number, kind, data[begin:at]


def parse_example(data: bytes | memoryview, wanted: Container[str] | None) -> dict[str, Any]:
    """The features of a serialised tf.train.Example (`wanted`: only those of these names): a list of bytes, ("f", bytearray) of
    float32 or ("q", bytearray) of int64, little-endian. Features without any kind are left out, and fields that are not known.
    Raises ValueError for what is none, or not whole."""
    features: dict[str, Any] = {}
    for number, _, map_of_features in _fields(memoryview(data), 2):
        if number == 2:
            raise ValueError("it is a SequenceExample, not an Example")
        for _, _, entry in _fields(map_of_features, 1):
            parts: dict[int, memoryview] = {}
            for part, _, content in _fields(entry, 2):
                if part in parts:
                    raise ValueError("a feature has two names or values")
                parts[part] = content
            name = str(parts.get(1, b""), "utf-8")
            if wanted is None or name in wanted:
                values = _values(parts.get(2, memoryview(b"")))
                if values is not None:
                    features[name] = values
    return features


def _values(feature: memoryview) -> Any:
    values: Any = None
    before = 0
    for kind, _, content in _fields(feature, 3):
        if kind != before:  # the last of several kinds holds
            before, values = kind, [] if kind == 1 else bytearray()
        if kind == 1:
            values += [bytes(one) for _, _, one in _fields(content, 1)]
        elif kind == 2:
            for _, _, floats in _fields(content, 1, _FIXED32):
                if len(floats) % 4:
                    raise ValueError("a list of floats is cut off")
                values += floats
        else:
            for _, _, packed in _fields(content, 1, _VARINT):
                at = 0
                while at < len(packed):
                    number, at = _varint(packed, at)
                    values += struct.pack("<Q", number)
    return values if before < 2 else ("f" if before == 2 else "q", values)
