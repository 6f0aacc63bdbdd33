"""The archive that `torch.save` makes of one contiguous tensor, without the tensor: the bytes before it and the bytes
after it.

So a tensor can be written from its memory, chunk by chunk. The archive is a zip of seven records, none of them
compressed; the bytes of each start at a multiple of 64. The checksum of a record comes after its bytes, so everything
before the tensor is known without reading the tensor.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 64
_ROOT = "archive/"
_BEFORE = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
_DATA = "data/0"
_VERSION = b"3\n"
_SERIALIZATION_ID = ".data/serialization_id"
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_CRC_FOLLOWS, _UTF8 = 0x0008, 0x0800
_CRC = struct.Struct("<L")
_CRC_IN_FOOTER, _CRC_IN_ENTRY = 4, 16
_CRC_OF_VERSION = zlib.crc32(_VERSION)
_WIDE = 0xFFFFFFFF  # sizes and offsets from here on are in an extra field, in 64 bits
_MASK = 2**64 - 1
_HASH_OF_NAMES = 15728199511854643026  # by torch's build with libstdc++
_TYPED = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Long": torch.int64,
    "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
_STORAGE_OF = {dtype: getattr(torch, f"{name}Storage") for name, dtype in _TYPED.items()}


class WrittenRecord(NamedTuple):
    """A record of the zip to write: its name below the archive's folder, the offset of its header, its size and checksum."""

    name: str
    offset: int
    size: int
    crc: int

    @property
    def path(self) -> bytes:
        """Its name in the archive."""
        return f"{_ROOT}{self.name}".encode()

    @property
    def flags(self) -> int:
        """The bits in the header that say how the record's name and checksum are written."""
        return _UTF8 | (_CRC_FOLLOWS if self.size else 0)

    def header(self) -> bytes:
        """The record's own header, padded so that its bytes are aligned."""
        path, wide = self.path, self._wide()
        padding = -(self.offset + _LOCAL.size + len(path) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        return _LOCAL.pack(b"PK\3\4", 0, self.flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra

    def footer(self) -> bytes:
        """What follows the record's bytes."""
        if not self.size:
            return b""
        form = "<4sLQQ" if self._wide() else "<4sLLL"
        return struct.pack(form, b"PK\7\x08", self.crc, self.size, self.size)

    def entry(self) -> bytes:
        """The record in the archive's directory."""
        size, offset = min(self.size, _WIDE), min(self.offset, _WIDE)
        path, wide = self.path, self._wide()
        numbers = (0, 0, self.flags, 0, 0, 0, self.crc, size, size, len(path), len(wide), 0, 0, 0, 0, offset)
        return _ENTRY.pack(b"PK\1\2", *numbers) + path + wide

    def _wide(self) -> bytes:
        numbers = [self.size, self.size] if self.size >= _WIDE else []
        numbers += [self.offset] if self.offset >= _WIDE else []
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class TensorArchive(NamedTuple):
    """The parts of an archive: `head`, then `num_bytes` of the tensor in C order, then a tail of `tail_bytes`."""

    head: bytes
    num_bytes: int
    blank: bytes  # the tail, but for what follows from the tensor's checksum
    crc_places: tuple[int, ...]  # where in it that is, and the serialization id, and the checksum of this
    id_place: int
    id_crc_places: tuple[int, ...]
    combined: int  # the checksums of what is before the tensor

    @property
    def tail_bytes(self) -> int:
        """The bytes after the tensor's."""
        return len(self.blank)

    @property
    def size(self) -> int:
        """The bytes of the whole archive."""
        return len(self.head) + self.num_bytes + len(self.blank)

    def tail(self, crc: int) -> bytes:
        """What follows the tensor's bytes, whose CRC-32 is `crc`."""
        tail = bytearray(self.blank)
        combined = _combined(self.combined, crc) if self.num_bytes else self.combined
        name = _id_of(_combined(combined, _CRC_OF_VERSION))
        tail[self.id_place : self.id_place + len(name)] = name
        for places, value in ((self.crc_places, crc), (self.id_crc_places, zlib.crc32(name))):
            for place in places:
                _CRC.pack_into(tail, place, value)
        return bytes(tail)


@lru_cache(maxsize=4096)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorArchive:
    """The archive of a tensor on the CPU that is C-contiguous and has a storage of its own."""
    head, records, combined = bytearray(), [], 0
    for name, content in {"data.pkl": _pickled(dtype, shape), **_BEFORE}.items():
        records.append(WrittenRecord(name, len(head), len(content), zlib.crc32(content)))
        combined = _combined(combined, records[-1].crc)
        head += records[-1].header() + content + records[-1].footer()
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = WrittenRecord(_DATA, len(head), num_bytes, 0)
    head += data.header()
    begin, blank, crc_places = len(head) + num_bytes, bytearray(data.footer()), [_CRC_IN_FOOTER] if num_bytes else []
    records.append(data)
    for name, content in (("version", _VERSION), (_SERIALIZATION_ID, _id_of(0))):
        records.append(WrittenRecord(name, begin + len(blank), len(content), zlib.crc32(content)))
        blank += records[-1].header() + content
        end = len(blank)
        blank += records[-1].footer()
    entries = []
    start = len(blank)
    for record in records:
        entries.append(len(blank) + _CRC_IN_ENTRY)
        blank += record.entry()
    blank += _ended(begin + start, begin + len(blank), len(records))
    places = (*crc_places, entries[-3]), end - len(_id_of(0)), (end + _CRC_IN_FOOTER, entries[-1])
    return TensorArchive(bytes(head), num_bytes, bytes(blank), *places, combined)


def _ended(start: int, end: int, count: int) -> bytes:
    """The end of an archive whose directory of `count` records is [start, end)."""
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 0x031E, 45, 0, 0, count, count, end - start, start)
    last = _END.pack(b"PK\5\6", 0, 0, count, count, min(end - start, _WIDE), min(start, _WIDE), 0)
    return end64 + _END64_LOCATOR.pack(b"PK\6\7", 0, end, 1) + last


def _combined(before: int, crc: int) -> int:
    """Checksums of records, as torch combines them, with one more."""
    return before ^ (crc + 0x9E3779B9 + (before << 6) + (before >> 2) & _MASK)


def _id_of(combined: int) -> bytes:
    """Twenty digits of the records' names, which are always the same, and twenty of their checksums."""
    return f"{_HASH_OF_NAMES:020}{combined:020}".encode()


# ------------------------------------------------------------------------------------------------------ the pickle


class _StorageStandIn:
    """Stands for the storage, which is no part of the pickle."""


@dataclass(frozen=True)
class _Described:
    """Is pickled as a contiguous tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: _StorageStandIn

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, dtype=self.dtype, device="meta").stride()
        described: tuple[Any, ...] = (
            self.storage,
            0,
            self.shape,
            strides,
            False,
            OrderedDict(),
        )  # requires_grad, hooks
        if self.dtype in _STORAGE_OF:
            return torch._utils._rebuild_tensor_v2, described
        return torch._utils._rebuild_tensor_v3, (*described, self.dtype)


class _StructurePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, described: _Described) -> None:
        super().__init__(file, protocol=2)
        self._described = described

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, _StorageStandIn):
            return None
        dtype = self._described.dtype
        num_elements = torch.Size(self._described.shape).numel()
        if dtype in _STORAGE_OF:
            return "storage", _STORAGE_OF[dtype], "0", "cpu", num_elements
        return "storage", torch.UntypedStorage, "0", "cpu", num_elements * dtype.itemsize


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    described = _Described(dtype, shape, _StorageStandIn())
    _StructurePickler(file, described).dump(described)
    return file.getvalue()
