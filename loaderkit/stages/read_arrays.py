"""Large arrays straight from the store into their slots: `read` looks at an array's header, and if the array is what the slot
holds, its numbers are read there and nowhere else.

    header (256 bytes) ──> is it the slot's dtype and shape? ──> read_into(slots[slot]) ──> Landed
                                                      no ──> None: the ordinary way, through memory of the chunk

The compiler says for which fields that is right: nothing but `decode` may want to see them before `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loaderkit._internal.forks import ending_forks
from loaderkit.connectors.base import ByteRange, Connector
from loaderkit.errors import ConnectorError, FormatError
from loaderkit.sources.base import FieldRange
from loaderkit.sources.formats.npy import NpyHeader, NpzMember, parse_npy_header, read_npy_header, read_npz_members
from loaderkit.stages.base import Encoded, FieldGroup, InPlace, SampleChunk
from loaderkit.stages.slots import Slots

LEAST_BYTES = 512 * 1024
"""Smaller arrays go the ordinary way: for them the second read costs more than the copy it saves. From the page cache, straight
and ordinary, in us: .npy of 64 KiB 22 and 12, 256 KiB 30 and 23, 1 MiB 112 and 146, 4 MiB 369 and 634; .npz of 256 KiB 111 and
74, 1 MiB 223 and 222, 4 MiB 492 and 712."""


@dataclass(frozen=True)
class DirectRead:
    """Reads arrays into slots. `decoded`: the fields that `decode` turns into arrays, None: all; `touched`: those that
    other stages change before `batch`."""

    connector: Connector
    decoded: frozenset[str] | None
    touched: frozenset[str]

    def fetch(self, chunk: SampleChunk, place: int, found: FieldRange) -> InPlace | FieldGroup | None:
        """Read one field of the sample at `place` of a chunk into its slot; None if it has to go the ordinary way.

        So it has whenever anything is wrong with it: then the error is the same for large arrays and small.
        """
        kind = found.extension.rpartition(".")[2]
        is_wanted = self.decoded is None or found.field in self.decoded
        if (
            kind not in ("npy", "npz")
            or not is_wanted
            or found.range.length < LEAST_BYTES
            or not chunk.work_item.fields
        ):
            return None
        slot = chunk.lo + place
        try:
            if kind == "npz":
                return self._archive(chunk, slot, found.range)
            read = self._reader(found.range)
            return self._array(chunk, slot, found.field, found.range, read_npy_header(read, found.range.length))
        except (FormatError, ConnectorError):
            return None

    def _reader(self, where: ByteRange) -> Any:
        def read(start: int, buffer: memoryview) -> None:
            ending_forks(self.connector.read_into)(where.key, where.start + start, buffer, etag=where.etag)

        return read

    def _array(self, chunk: SampleChunk, slot: int, field: str, where: ByteRange, header: NpyHeader) -> InPlace | None:
        """Read the numbers of the array in the bytes `where`, if they are what the slot is for."""
        slots = self._slots(chunk, field)
        if slots is None or not _is_for(slots, header) or header.num_bytes < LEAST_BYTES:
            return None
        if header.data_start + header.num_bytes > where.length:
            return None
        memory = slots.memory[slot * header.num_bytes : (slot + 1) * header.num_bytes]
        self._reader(where)(header.data_start, memory.data)
        return InPlace(header.num_bytes)

    def _archive(self, chunk: SampleChunk, slot: int, where: ByteRange) -> FieldGroup | None:
        """Read the arrays of an .npz file that fit into their slots; the others as the bytes they are stored as.

        None if anything is packed: the whole file is then needed anyway.
        """
        members = read_npz_members(self._reader(where), where.length)
        if any(member.is_packed for member in members):
            return None
        inside = [where._replace(start=where.start + m.start, length=m.num_stored) for m in members]
        if not any(self._fits(chunk, member) for member in members):
            return None
        fields: dict[str, Any] = {}
        for member, part in zip(members, inside, strict=True):
            landed = None
            if self._fits(chunk, member):
                landed = self._array(chunk, slot, member.name, part, parse_npy_header(member.head, member.size))
            if landed is None:
                data = np.empty(part.length, np.uint8).data
                self._reader(part)(0, data)
                fields[member.name] = Encoded(data, "npy")
            else:
                fields[member.name] = landed
        return FieldGroup(fields)

    def _fits(self, chunk: SampleChunk, member: NpzMember) -> bool:
        slots = self._slots(chunk, member.name)
        if slots is None or member.size < LEAST_BYTES:
            return False
        return _is_for(slots, parse_npy_header(member.head, member.size))

    def _slots(self, chunk: SampleChunk, field: str) -> Slots | None:
        """The slots [B, ...] of a field that nobody else writes to; none for images, which arrays are not."""
        spec = chunk.work_item.specs.get(field)
        return None if spec is None or spec.image or field in self.touched else chunk.work_item.fields.get(field)


def _is_for(slots: Slots, header: NpyHeader) -> bool:
    """Whether an array, as it lies in its file, is what the slots [B, ...] hold one of."""
    is_plain = header.dtype.isnative and header.dtype.names is None and header.is_c_order
    return is_plain and header.shape == slots.shape[1:] and header.dtype.name == slots.dtype
