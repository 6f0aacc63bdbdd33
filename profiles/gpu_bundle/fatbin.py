"""Shared objects without the code of other GPUs and without symbol tables. A file keeps its layout, and what is cut becomes
zeros, of which xz leaves nothing.

A section `.nv_fatbin` holds containers, one for each file that nvcc compiled: a header (magic, version, size of the header,
size of the entries), then entries, each a header (kind, version, size of the header, size of the payload, ..., architecture)
and a payload. The entries that are kept move to the front of their container, whose size then says so: the bytes that nvcc
makes for that architecture alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, size of this header, of the payload, ..., architecture
_MAGIC = 0xBA55ED50
_PTX, _ELF = 1, 2
_ALIGNMENT = 8  # of containers
_SYMBOL_TABLE = 2  # a type of section


class Section(NamedTuple):
    """A section of an ELF file: bytes `begin` to `end`; `link` is the number of the one it refers to."""

    name: bytes
    kind: int
    begin: int
    end: int
    link: int


class Entry(NamedTuple):
    """The code for one architecture (90: sm_90) in a container: bytes `begin` to `end` of the file, its header included."""

    kind: int
    architecture: int
    begin: int
    end: int


def cut(library: bytearray, architecture: int) -> None:
    """Zero what does not run on a GPU of `architecture`, and the symbol table that only debuggers read.

    A container without machine code for it stays whole. Raises ValueError for a section that is not understood.
    """
    all_sections = sections(library)
    for section in all_sections:
        if section.kind == _SYMBOL_TABLE:
            for table in (section, all_sections[section.link]):
                library[table.begin : table.end] = bytes(table.end - table.begin)
        elif section.name in {b".nv_fatbin", b"__nv_relfatbin"}:
            for container, entries in containers(library, section.begin, section.end):
                _keep(library, container, entries, architecture)


def sections(library: bytes | bytearray) -> list[Section]:
    """The sections of a 64-bit ELF file; none of another file."""
    if library[:5] != b"\x7fELF\x02":
        return []
    table = struct.unpack_from("<Q", library, 40)[0]
    header_bytes, num_sections, names_index = struct.unpack_from("<HHH", library, 58)
    headers = [struct.unpack_from("<IIQQQQI", library, table + number * header_bytes) for number in range(num_sections)]
    names = headers[names_index][4] if headers else 0
    found = []
    for name, kind, _, _, begin, num_bytes, link in headers:
        text = bytes(library[names + name : library.index(0, names + name)])
        found.append(Section(text, kind, begin, begin + num_bytes, link))
    return found


def containers(library: bytes | bytearray, begin: int, end: int) -> Iterator[tuple[int, list[Entry]]]:
    """Where each container of a section begins, and its entries. Raises ValueError."""
    while begin + _CONTAINER.size <= end:
        magic, _, header_bytes, entries_bytes = _CONTAINER.unpack_from(library, begin)
        if magic == 0:  # padding
            begin += _ALIGNMENT
            continue
        if magic != _MAGIC:
            raise ValueError(f"byte {begin} begins no container of GPU code: {magic:#x} is not {_MAGIC:#x}")
        first = begin + header_bytes
        yield begin, list(_entries(library, first, first + entries_bytes))
        begin = -(-(first + entries_bytes) // _ALIGNMENT) * _ALIGNMENT


def _entries(library: bytes | bytearray, begin: int, end: int) -> Iterator[Entry]:
    while begin < end:
        kind, _, header_bytes, payload_bytes, *_, architecture = _ENTRY.unpack_from(library, begin)
        after = begin + header_bytes + payload_bytes
        if kind not in {_PTX, _ELF} or header_bytes < _ENTRY.size or after > end:
            raise ValueError(
                f"byte {begin} begins no code of a container: kind {kind}, {header_bytes} + {payload_bytes} bytes"
            )
        yield Entry(kind, architecture, begin, after)
        begin = after


def _keep(library: bytearray, container: int, entries: list[Entry], architecture: int) -> None:
    """Leave only the machine code for `architecture` in a container."""
    kept = [entry for entry in entries if entry.kind == _ELF and entry.architecture == architecture]
    if not kept:
        return
    code = b"".join(library[entry.begin : entry.end] for entry in kept)
    begin, end = entries[0].begin, entries[-1].end
    magic, version, header_bytes, _ = _CONTAINER.unpack_from(library, container)
    _CONTAINER.pack_into(library, container, magic, version, header_bytes, len(code))
    library[begin:end] = code.ljust(end - begin, b"\0")
