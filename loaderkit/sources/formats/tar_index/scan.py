"""Finds the members of a tar archive by reading its headers as ranges, through a connector.

Formats: v7, ustar, GNU (long names and links, base-256 sizes) and PAX (`path` and `size`, of one member or of all that
follow). POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from zlib import adler32

import numpy as np

from loaderkit._internal.text import warn
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError
from loaderkit.sources.formats.tar_index.index import Damage, TarIndex, sample_key_and_extension
from loaderkit.sources.formats.tar_index.window import Window, WindowRun

_BLOCK = 512
_MAX_EXTENDED_BYTES = 1 << 20
_EXTENDED = frozenset(b"LKxXg")
_REFUSED = {
    ord("S"): "is stored sparse; create the archive again without --sparse",
    ord("M"): "continues from another volume; join the volumes first",
}
_REGULAR = frozenset(b"\x0007")  # "7" is a contiguous file
_WITHOUT_DATA = frozenset(b"123456")  # links, devices, directories, pipes: their size field has no meaning
_LINKS = frozenset(b"12")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}

MemberRange = tuple[bytes, int, int]
"""Name, offset and size of a regular file."""


def scan_tar(
    connector: Connector,
    info: ObjectInfo,
    *,
    up_to_damage: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> TarIndex:
    """The regular files of the archive `info`, in archive order, up to the first block of zeros.

    Directories, links and devices are left out. `clock` (seconds) only decides how far apart members must lie to be worth
    skipping. Warns if the archive may be truncated at the end of a member, and of links named as members of samples. Raises
    `FormatError` with the archive and the offset for any other damage, and what the connector raises. With `up_to_damage` the
    index has the members before it, and the missing mark at the end of an archive is damage, too.
    """
    scanner = TarScanner(connector, info, clock, needs_end=up_to_damage)
    runs: list[WindowRun] = []
    damage = None
    try:
        for run in scanner.runs(0):
            runs.append(run)  # noqa: PERF402 - those before the damage are to stay
    except FormatError as error:
        if not up_to_damage:
            raise
        name = scanner.cut_name
        damage = Damage(error, None if name is None else name.decode("utf-8", "surrogateescape"))
    if scanner.num_links:
        warn(
            f"{scanner.where}: links are left out, as they have no bytes of their own ({scanner.num_links}, such as "
            f"{_shown(scanner.first_link)}); for files in their place create the archive again with "
            "`tar --dereference --hard-dereference`"
        )
    nothing = np.empty(0, np.int64)
    starts = np.concatenate([nothing, *(run.starts for run in runs)])
    sizes = np.concatenate([nothing, *(run.sizes for run in runs)])
    is_whole = damage is None and not (scanner.has_odd_end or scanner.num_links)
    return TarIndex(starts, sizes, b"".join(run.names for run in runs), is_whole=is_whole, damage=damage)


@dataclass
class _Extended:
    """The contents of extended headers for the next member."""

    is_pending: bool = False
    long_name: bytes | None = None
    records: dict[bytes, bytes] = field(default_factory=dict)


class TarScanner:
    """Walks over the headers of one archive."""

    def __init__(
        self,
        connector: Connector,
        info: ObjectInfo,
        clock: Callable[[], float] = time.perf_counter,
        *,
        needs_end: bool = False,
    ) -> None:
        """`needs_end`: an archive without a mark at its end is damaged."""
        self._needs_end = needs_end
        self.cut_name: bytes | None = None  # of the member that is damaged, if it is known
        self.has_odd_end = False
        self.num_links = 0
        self.first_link = b""
        self.where = connector.describe(info.key)
        self._window = Window(connector, info, clock)
        self._num_bytes = info.size
        self._globals: dict[bytes, bytes] = {}

    def walk(self, position: int) -> Iterator[MemberRange]:
        """All regular files whose headers are at `position` (the start of a header) or later, one by one."""
        for run in self.runs(position):
            yield from zip(run.names.split(b"\0")[:-1], run.starts.tolist(), run.sizes.tolist(), strict=True)

    def runs(self, position: int) -> Iterator[WindowRun]:
        """The same, in runs of consecutive plain files."""
        extended = _Extended()
        name = b""
        while position + _BLOCK <= self._num_bytes:
            if not extended.is_pending and not self._globals:
                plain, position = self._window.plain_files(position)
                if plain is not None:
                    name = plain.names[plain.names.rfind(b"\0", 0, -1) + 1 : -1]
                    yield plain
                    continue
            header = self._window.take(position, _BLOCK)
            if not header[0] and not any(header):
                return self._end_mark(position, extended)
            if not _checksum_fits(header):
                self._fail_as_no_header(position, header)
            size = _number(header[124:136])
            kind = header[156]
            start = position + _BLOCK
            if kind in _EXTENDED:
                position = self._read_extended(position, kind, size, extended)
                continue
            name = _name_of(header)
            if extended.is_pending or self._globals:
                name, size, kind = self._override(position, (name, size, kind), extended)
                extended = _Extended()
            if kind in _REFUSED:
                self._fail(position, f"{_shown(name)} {_REFUSED[kind]}")
            if kind in _WITHOUT_DATA or (kind == 0 and name.endswith(b"/")):
                if kind in _LINKS and sample_key_and_extension(name.decode("utf-8", "surrogateescape")) is not None:
                    self.first_link = self.first_link or name
                    self.num_links += 1
                position = start
                continue
            size = self._checked_size(position, name, size)
            if kind in _REGULAR:
                yield WindowRun(name + b"\0", np.array([start], np.int64), np.array([size], np.int64))
            position = start + _padded(size)
        return self._end(position, name, extended)

    def _read_extended(self, position: int, kind: int, size: int | None, extended: _Extended) -> int:
        """Read the extended header at `position`; returns the offset of the next header."""
        body = self._extended_body(position, size)
        if kind == ord("g"):
            self._globals.update(self._pax_records(position, body))
        else:
            extended.is_pending = True
            if kind == ord("L"):
                extended.long_name = body.partition(b"\0")[0]
            elif kind != ord("K"):
                extended.records.update(self._pax_records(position, body))
        return position + _BLOCK + _padded(len(body))

    def _override(
        self, position: int, header: tuple[bytes, int | None, int], extended: _Extended
    ) -> tuple[bytes, int | None, int]:
        """Name, size and kind of the member at `position`, overridden by its extended headers."""
        name, size, kind = header
        if extended.long_name is not None:
            name = extended.long_name
        records = {**self._globals, **extended.records}
        name = records.get(b"path") or name  # an empty value revokes a record
        if records.get(b"size"):
            size = _decimal(records[b"size"])
        if any(key.startswith(b"GNU.sparse.") for key in records):
            name, kind = records.get(b"GNU.sparse.name", name), ord("S")
        if b"\0" in name:
            self._fail(position, f"the name {_shown(name)} contains a NUL; the archive is damaged")
        return name, size, kind

    def _checked_size(self, position: int, name: bytes, size: int | None) -> int:
        if size is None or size < 0:
            self._fail(position, f"the size of {_shown(name)} is no number; the archive is damaged")
        if position + _BLOCK + size > self._num_bytes:
            self.cut_name = name
            self._fail(
                position,
                f"{_shown(name)} should have {size} bytes from byte {position + _BLOCK} on, but the archive has only "
                f"{self._num_bytes} bytes: it is truncated; copy it again",
            )
        return size

    def _extended_body(self, position: int, size: int | None) -> bytes:
        """The body of an extended header."""
        start = position + _BLOCK
        if size is None or not 0 <= size <= _MAX_EXTENDED_BYTES:
            self._fail(position, f"an extended header of {size} bytes (at most {_MAX_EXTENDED_BYTES}); it is damaged")
        if start + size > self._num_bytes:
            self._fail(position, "the archive ends inside an extended header: it is truncated; copy it again")
        return bytes(self._window.take(start, size))

    def _pax_records(self, position: int, body: bytes) -> dict[bytes, bytes]:
        """The records "<length> <key>=<value>\\n" of an extended header."""
        records = {}
        offset = 0
        while offset < len(body) and body[offset]:
            blank = body.find(b" ", offset, offset + 20)
            length = _decimal(body[offset:blank]) if blank > offset else None
            if not length or offset + length > len(body) or body[offset + length - 1] != 0x0A:
                self._fail(position, f"damaged PAX header, at its byte {offset}")
            key, equals, value = body[blank + 1 : offset + length - 1].partition(b"=")
            if not equals:
                self._fail(position, f"damaged PAX header, at its byte {offset}: a record without '='")
            if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
                records[key] = value
            offset += length
        return records

    def _end(self, position: int, name: bytes, extended: _Extended) -> None:
        """The archive's bytes end at, or less than a header after, `position`, without an end-of-archive mark."""
        if self._num_bytes == 0:
            self._fail(0, "the archive is empty (0 bytes), and even a tar without members has a header; copy it again")
        if extended.is_pending:
            self._fail(position, "the archive ends after an extended header, before its member; copy it again")
        if position > self._num_bytes:
            self._fail(self._num_bytes, f"the archive ends in the padding after {_shown(name)}; copy it again")
        rest = self._window.take(position, self._num_bytes - position)
        if any(rest):
            if position == 0:
                self._fail_as_no_header(0, rest)
            self._fail(position, f"the archive ends inside the header after {_shown(name)}; copy it again")
        if self._needs_end:
            self._fail(
                position, f"the archive ends without an end-of-archive mark, after {_shown(name)}; copy it again"
            )
        self._warn(
            f"{self.where} ends without an end-of-archive mark, after {_shown(name)}: it may be truncated there, and "
            "members may be missing"
        )

    def _end_mark(self, position: int, extended: _Extended) -> None:
        if extended.is_pending:
            self._fail(position, "the archive ends after an extended header, before its member; it is damaged")
        if position + 2 * _BLOCK <= self._num_bytes and any(self._window.take(position + _BLOCK, _BLOCK)):
            self._fail(
                position, "zeros in the place of a header, and not of two: the archive is damaged; copy it again"
            )
        if any(self._window.rest_after(position + _BLOCK)):
            self._warn(
                f"{self.where}: data after the end-of-archive mark at byte {position} is not read; "
                "archives joined with `cat` must be created again, or joined with `tar --concatenate`"
            )

    def _warn(self, message: str) -> None:
        self.has_odd_end = True
        warn(message)

    def _fail_as_no_header(self, position: int, header: bytes | bytearray) -> NoReturn:
        if position == 0:
            for magic, program in _COMPRESSED.items():
                if header.startswith(magic):
                    raise FormatError(
                        f"{self.where} is compressed with {program}, so its members cannot be read one by one; "
                        "decompress it first"
                    )
            raise FormatError(f"{self.where} is not a tar archive (no valid header at byte 0)")
        self._fail(position, "no valid tar header (its checksum is wrong): the archive is damaged; copy it again")

    def _fail(self, position: int, problem: str) -> NoReturn:
        raise FormatError(f"{self.where}, byte {position}: {problem}")


def _checksum_fits(header: bytes | bytearray) -> bool:
    stored = _number(header[148:156])
    # The low half of Adler-32 is 1 + the sum of the bytes modulo 65521, which 256 bytes cannot reach: it sums in C.
    total = (adler32(header[:256]) & 0xFFFF) + (adler32(header[256:]) & 0xFFFF) - 2
    total += 8 * 0x20 - sum(header[148:156])
    if stored == total:
        return True
    # Some old writers summed signed bytes.
    num_high = sum(byte > 127 for byte in header) - sum(byte > 127 for byte in header[148:156])
    return stored == total - 256 * num_high


def _number(field: bytes | bytearray) -> int | None:
    """An octal or base-256 field; None if it is neither."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        return value - (1 << 8 * len(field) - 1) if field[0] & 0x40 else value
    text = field.partition(b"\0")[0].strip(b" ")
    if not text:
        return 0
    try:
        return int(text, 8) if text.isdigit() else None
    except ValueError:  # an 8 or a 9
        return None


def _decimal(text: bytes) -> int | None:
    # No size has more than 20 digits; int() of a longer text could take very long.
    return int(text) if text.isdigit() and len(text) <= 20 else None


def _name_of(header: bytes | bytearray) -> bytes:
    name = bytes(header[:100].partition(b"\0")[0])
    # Only POSIX archives have a prefix; old GNU archives store times there.
    if header[345] and header[257:263] == b"ustar\0":
        return bytes(header[345:500].partition(b"\0")[0]) + b"/" + name
    return name


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "surrogateescape"))
