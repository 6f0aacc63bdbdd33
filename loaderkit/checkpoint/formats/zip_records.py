"""The records of an uncompressed zip archive, from the directory at its end."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loaderkit._internal.garbage import collector_off
from loaderkit.errors import FormatError

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY_CRC, _LOCAL_CRC = 16, 14  # offsets of the four bytes of checksum
_MAX_COMMENT = 65535
_HEADERS_GAP = 32 * 2**10  # bytes between headers of records that are read together
_HEADERS_MOST = 2**20
MAGIC = b"PK\x03\x04"
Read = Callable[[int, memoryview], None]
"""`read(start, buffer)` fills the buffer with bytes of the archive."""
Fetch = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""The bytes of many ranges of the archive, (start, length) each, read at once where that is faster."""


class ZipRecord(NamedTuple):
    """One record of an archive, as the zip's directory describes it. The directory does not say where the bytes start,
    behind the record's header; they end before `limit`, where the next record begins."""

    name: str
    header: int
    header_size: int  # with the name, which is repeated there
    size: int
    limit: int


def read_directory(read: Read, size: int) -> dict[str, ZipRecord]:
    """The records of a zip archive by name. Raises FormatError for one that is not whole, or is packed."""
    data, count, start, _ = _directory(read, size)
    return _entries(data, count, start)


def layout_bytes(read: Read, size: int) -> list[tuple[int, int]]:
    """The half-open ranges of an archive's bytes that determine its layout: its directory, the headers and the descriptions,
    without checksums and tensors. Two archives of one size with the same bytes there have the same layout."""
    data, count, start, wide = _directory(read, size)
    ranges = [(start + len(data), size), wide]
    offset = 0
    for _ in range(count):
        names = _ENTRY.unpack_from(data, offset)[10:13]
        end = offset + _ENTRY.size + sum(names)
        ranges += [(start + offset, start + offset + _ENTRY_CRC), (start + offset + _ENTRY_CRC + 4, start + end)]
        offset = end
    ranges.append((start + offset, start + len(data)))
    for record in _entries(data, count, start).values():
        header = record.header
        ranges += [(header, header + _LOCAL_CRC), (header + _LOCAL_CRC + 4, header + record.header_size)]
        if "/data/" not in record.name and "/.data/" not in record.name:
            content = _start_after(_get(read, header, record.header_size), record)
            ranges.append((content, content + record.size))
    return ranges


def _directory(read: Read, size: int) -> tuple[bytes, int, int, tuple[int, int]]:
    """(the directory, its number of entries, its start, the extent of its 64-bit record)."""
    wide = (size, size)
    tail_start = max(0, size - _END.size - _END64_LOCATOR.size - 2048)
    tail = _get(read, tail_start, size - tail_start)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 and tail_start:
        tail_start = max(0, size - _END.size - _END64_LOCATOR.size - _MAX_COMMENT)
        tail = _get(read, tail_start, size - tail_start)
        end = tail.rfind(b"PK\x05\x06")
    if end < 0 or end + _END.size > len(tail):
        raise FormatError(f"not a whole zip archive ({size} bytes): its directory, at the end, is missing")
    *_, count, length, start, _comment = _END.unpack_from(tail, end)
    if end >= _END64_LOCATOR.size and tail[end - _END64_LOCATOR.size :][:4] == b"PK\x06\x07":
        _, _, end64, _ = _END64_LOCATOR.unpack_from(tail, end - _END64_LOCATOR.size)
        wide = (end64, end64 + _END64.size)
        if end64 + _END64.size > size:
            raise FormatError("not a whole zip archive: its 64-bit directory lies beyond its end")
        signature, *_, count, length, start = _END64.unpack(_get(read, end64, _END64.size))
        if signature != b"PK\x06\x06":
            raise FormatError("not a whole zip archive: its 64-bit directory is not where it should be")
    if start + length > size or count * _ENTRY.size > length:
        raise FormatError(
            f"not a whole zip archive: its directory of {length} bytes from byte {start} on lies beyond it"
        )
    inside = start - tail_start
    data = tail[inside : inside + length] if inside >= 0 else _get(read, start, length)
    return data, count, start, wide


@collector_off()
def _entries(data: bytes, count: int, limit: int) -> dict[str, ZipRecord]:
    records: dict[str, ZipRecord] = {}
    offset = 0
    for _ in range(count):
        if offset + _ENTRY.size > len(data) or data[offset : offset + 4] != b"PK\x01\x02":
            raise FormatError("the zip archive's directory is damaged")
        fields = _ENTRY.unpack_from(data, offset)
        flags, method = fields[3], fields[4]
        packed, unpacked, len_name, len_extra, len_comment, header = *fields[8:13], fields[16]
        name_start = offset + _ENTRY.size
        name = data[name_start : name_start + len_name].decode("utf-8", "replace")
        if 0xFFFFFFFF in (packed, unpacked, header):
            extra = data[name_start + len_name : name_start + len_name + len_extra]
            unpacked, packed, header = _wide(extra, unpacked, packed, header, name)
        if method != 0 or packed != unpacked or flags & 1:
            raise FormatError(f"its record {name!r:.200} is packed or encrypted, which torch.save never does")
        if name in records:
            raise FormatError(f"it has two records called {name!r:.200}")
        records[name] = ZipRecord(name, header, _LOCAL.size + len_name, unpacked, limit)
        offset = name_start + len_name + len_extra + len_comment
    return _limited(records, limit)


def _limited(records: dict[str, ZipRecord], limit: int) -> dict[str, ZipRecord]:
    """Records that end where the next begins, at the latest. Raises FormatError for records that share bytes."""
    limited = {}
    for record in sorted(records.values(), key=lambda record: record.header, reverse=True):
        if record.header + record.header_size + record.size > limit:
            raise FormatError(
                f"its record {record.name!r:.200} of {record.size} bytes reaches beyond byte {limit}, where the next begins"
            )
        limited[record.name] = record._replace(limit=limit)
        limit = record.header
    return {name: limited[name] for name in records}


def _wide(extra: bytes, unpacked: int, packed: int, header: int, name: str) -> tuple[int, int, int]:
    """The 64-bit numbers of an entry. Its extra field has, in this order, those that do not fit in 32 bits."""
    offset = 0
    while offset + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, offset)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(length, len(extra) - offset - 4) // 8}Q", extra, offset + 4))
            try:
                whole = [next(numbers) if value == 0xFFFFFFFF else value for value in (unpacked, packed, header)]
            except StopIteration:
                break
            return whole[0], whole[1], whole[2]
        offset += 4 + length
    raise FormatError(f"its record {name!r:.200} has no length")


def data_starts(read: Read, records: Sequence[ZipRecord], fetch: Fetch | None = None) -> list[int]:
    """The starts of the records' bytes. Headers of small records are neighbours and are read together."""
    order = sorted(range(len(records)), key=lambda number: records[number].header)
    spans: list[tuple[int, int]] = []
    span_of: dict[int, int] = {}
    for number in order:
        begin = records[number].header
        end = begin + records[number].header_size
        if spans and begin - sum(spans[-1]) <= _HEADERS_GAP and end - spans[-1][0] <= _HEADERS_MOST:
            spans[-1] = (spans[-1][0], end - spans[-1][0])
        else:
            spans.append((begin, end - begin))
        span_of[number] = len(spans) - 1
    headers = fetch(spans) if fetch is not None else [_get(read, start, length) for start, length in spans]
    starts = [0] * len(records)
    for number in order:
        span = span_of[number]
        offset = records[number].header - spans[span][0]
        starts[number] = _start_after(headers[span][offset : offset + records[number].header_size], records[number])
    return starts


def _start_after(header: bytes, record: ZipRecord) -> int:
    """The start of a record's bytes, behind its own header, which repeats its name and may be padded."""
    fields = _LOCAL.unpack_from(header)
    name = header[_LOCAL.size :].decode("utf-8", "replace")
    if fields[0] != MAGIC or fields[9] != len(header) - _LOCAL.size or name != record.name:
        raise FormatError(f"its record {record.name!r:.200} is not where its directory says")
    start: int = record.header + len(header) + fields[10]
    if fields[3] != 0 or start + record.size > record.limit:
        raise FormatError(f"its record {record.name!r:.200} is packed, or reaches beyond the archive or into the next")
    return start


def content_of(read: Read, record: ZipRecord, limit: int) -> bytes:
    """All bytes of a record. Raises FormatError for more than `limit`."""
    if record.size > limit:
        raise FormatError(
            f"its record {record.name!r:.200} has {record.size} bytes, and {limit} are the most it may have"
        )
    header = _get(read, record.header, record.header_size)
    return _get(read, _start_after(header, record), record.size)


def _get(read: Read, start: int, length: int) -> bytes:
    data = bytearray(length)
    read(start, memoryview(data))
    return bytes(data)
