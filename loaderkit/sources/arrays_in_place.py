"""Reads large arrays straight into their slots. It parses an array's header; if dtype and shape are the slot's, the
numbers are read there without a copy. Where shapes may differ, memory is leased for each array.

    header (256 bytes) ──> is it the slot's dtype and shape? ──> read_into(slots[slot]) ──> InPlace
                       ──> may the shape be any? ──> read_into(memory that is lent) ──> InPlace
                                                      no ──> None: through memory of the chunk, as usual

The numbers of the first sample are not read, as it only shows the layout of a batch.

Allowed for fields that no stage but `decode` sees before `batch`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loaderkit._internal.dtypes import type_in_numpy
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import ByteRange, Connector
from loaderkit.errors import ConnectorError, FormatError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import FieldRange
from loaderkit.samples.slots import new_tensor
from loaderkit.samples.values import Encoded, FieldGroup, InPlace
from loaderkit.sources.formats.npy import NpyHeader, parse_npy_header, read_npy_header
from loaderkit.sources.formats.npz import NpzMember, read_npz_members

LEAST_BYTES = 512 * 1024
"""Smaller arrays are read through memory, since a second read costs more than the copy it saves. From the page cache,
direct and through memory, in us: .npy of 64 KiB 22 and 12, 256 KiB 30 and 23, 1 MiB 112 and 146, 4 MiB 369 and 634;
.npz of 256 KiB 111 and 74, 1 MiB 223 and 222, 4 MiB 492 and 712."""


@dataclass(frozen=True)
class InPlaceReads:
    """Reads arrays into slots. `decoded` are the fields that `decode` turns into arrays (None means all), `touched` the
    fields that other stages change before `batch`."""

    connector: Connector
    decoded: frozenset[str] | None
    touched: frozenset[str]

    def fetch(self, chunk: SampleChunk, row: int, field_range: FieldRange) -> InPlace | FieldGroup | None:
        """Read one field of the sample at `row` of a chunk into its slot; None if it must be read through memory.

        After any error it returns None, so that errors are the same for large and small arrays.
        """
        kind = field_range.extension.rpartition(".")[2]
        is_decoded = self.decoded is None or field_range.field in self.decoded
        if kind not in ("npy", "npz") or not is_decoded or field_range.range.length < LEAST_BYTES:
            return None
        slot = chunk.slot_of(row)
        try:
            if kind == "npz":
                return self._archive(chunk, slot, field_range.range)
            read = self._reader(field_range.range)
            return self._array(
                chunk, slot, field_range.field, field_range.range, read_npy_header(read, field_range.range.length)
            )
        except (FormatError, ConnectorError):
            return None

    def _reader(self, byte_range: ByteRange) -> Any:
        def read(start: int, buffer: memoryview) -> None:
            ending_forks(self.connector.read_into)(
                byte_range.key, byte_range.start + start, buffer, etag=byte_range.etag
            )

        return read

    def _array(
        self,
        chunk: SampleChunk,
        slot: int,
        field: str,
        byte_range: ByteRange,
        header: NpyHeader,
        *,
        member: NpzMember | None = None,
    ) -> InPlace | None:
        """Read the numbers of the array in `byte_range`, if they fit the batch. Raises FormatError if the CRC of an archive's
        member is another."""
        num_bytes = header.num_bytes
        if not self._is_for(chunk, field, header) or num_bytes < LEAST_BYTES:
            return None
        if header.data_start + num_bytes > byte_range.length:
            return None
        work_item = chunk.work_item
        slots = work_item.fields.get(field)
        if slots is not None:
            memory = slots.memory[slot * num_bytes : (slot + 1) * num_bytes]
            self._reader(byte_range)(header.data_start, memory.data)
            _check_numbers(member, header, memory.data)
            return InPlace(num_bytes)
        tensor = new_tensor(header.shape, getattr(torch, header.dtype.name), work_item.take_bytes)
        if work_item.specs:
            numbers = tensor.numpy().reshape(-1).view(np.uint8).data
            self._reader(byte_range)(header.data_start, numbers)
            _check_numbers(member, header, numbers)
        return InPlace(num_bytes, tensor)

    def _archive(self, chunk: SampleChunk, slot: int, byte_range: ByteRange) -> FieldGroup | None:
        """Read the arrays of an .npz file that fit their slots; the others as stored bytes.

        None if any member is compressed, since then the whole file is needed.
        """
        members = read_npz_members(self._reader(byte_range), byte_range.length)
        if any(member.is_packed for member in members):
            return None
        inside = [
            byte_range._replace(start=byte_range.start + member.start, length=member.num_stored) for member in members
        ]
        if not any(self._fits(chunk, member) for member in members):
            return None
        fields: dict[str, Any] = {}
        for member, part in zip(members, inside, strict=True):
            in_place = None
            if self._fits(chunk, member):
                header = parse_npy_header(member.head, member.size)
                in_place = self._array(chunk, slot, member.name, part, header, member=member)
            if in_place is None:
                data = np.empty(part.length, np.uint8).data
                self._reader(part)(0, data)
                _check(member, zlib.crc32(data))
                fields[member.name] = Encoded(data, "npy")
            else:
                fields[member.name] = in_place
        return FieldGroup(fields)

    def _fits(self, chunk: SampleChunk, member: NpzMember) -> bool:
        return member.size >= LEAST_BYTES and self._is_for(
            chunk, member.name, parse_npy_header(member.head, member.size)
        )

    def _is_for(self, chunk: SampleChunk, field: str, header: NpyHeader) -> bool:
        """True if an array's bytes in the file are the bytes of its tensor in the batch, and no other stage changes them."""
        dtype, specs = header.dtype, chunk.work_item.specs
        is_plain = dtype.isnative and dtype.names is None and header.is_c_order
        if field in self.touched or not is_plain or type_in_numpy(dtype.name) is None:
            return False
        if not specs:  # the first sample
            return True
        spec = specs.get(field)
        if spec is None or spec.image or spec.kind not in ("slab", "pad", "ragged"):
            return False
        if spec.kind == "slab":
            return header.shape == spec.shape and dtype.name == spec.dtype
        return spec.kind == "ragged" or (len(header.shape) == len(spec.shape) and dtype.name == spec.dtype)


def _check_numbers(member: NpzMember | None, header: NpyHeader, numbers: memoryview) -> None:
    """Raise FormatError if a member is damaged. One with more behind its array is not looked at: that was not read."""
    if member is not None and member.size == header.data_start + header.num_bytes:
        _check(member, zlib.crc32(numbers, zlib.crc32(member.head[: header.data_start])))


def _check(member: NpzMember, crc: int) -> None:
    if crc != member.crc:
        raise FormatError(f"array {member.name!r}: its bytes are others than were stored")
