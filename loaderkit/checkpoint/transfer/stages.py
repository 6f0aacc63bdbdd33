"""What is done to the chunks of a checkpoint: `read`, which compares checksums where there are any, and `place`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import xxhash

from loaderkit._internal.hashing import address_of_hash
from loaderkit.checkpoint.checksums import Checksums
from loaderkit.checkpoint.transfer.layout import ByteSpan
from loaderkit.checkpoint.transfer.plan import SMALL_GAP, CoalescedRead, ReadChunk, ReadTotals, gap_of
from loaderkit.connectors.base import Connector, Hashed, ObjectInfo, ReadInto, bulk_of
from loaderkit.engine.work import Chunk, Stage
from loaderkit.errors import CheckpointError, ConnectorError, FormatError

T = TypeVar("T")

_PINNED = "pinned"
# What is read at a time from where reading is copying, and hashed before more is read: it lies in the CPU's cache then. Only
# where a connector cannot hash by itself.
_STEP_BYTES = 2**22


class _Comparison:
    """Compares an object's blocks with their checksums, from the one that begins at `begin` on, as their bytes come."""

    def __init__(self, checksums: Checksums, begin: int) -> None:
        self.wrong: tuple[int, int] | None = None  # [lo, hi) of the first block that differs
        self.took_s = 0.0
        self.block_bytes = checksums.block_bytes
        self._checksums = checksums
        self._at = begin
        self._number = begin // checksums.block_bytes
        self._digest = xxhash.xxh3_64()

    def add(self, data: memoryview) -> None:
        """The bytes that follow."""
        begin_s = time.perf_counter()
        while len(data):
            end = self._checksums.end_of(self._number)
            part = data[: end - self._at]
            self._digest.update(part)  # all versions of the library let other threads run meanwhile
            self._at += len(part)
            data = data[len(part) :]
            if self._at == end:
                self._end_block(end, self._digest.hexdigest())
                self._digest.reset()
        self.took_s += time.perf_counter() - begin_s

    def take(self, found: Hashed) -> None:
        """The hashes of the blocks that follow."""
        for value in found.hashes:
            self._at = self._checksums.end_of(self._number)
            self._end_block(self._at, f"{value:016x}")
        self.took_s += found.took_s

    def cut(self, num_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """[lo, hi) of the parts of so many bytes that follow, and whether a part is whole blocks."""
        block = self.block_bytes
        first = min(-self._at % block, num_bytes)
        last = first + (num_bytes - first) // block * block
        if self._at + num_bytes == self._checksums.num_bytes:
            last = num_bytes  # the object's last block may be shorter
        for lo, hi, are_blocks in ((0, first, False), (first, last, True), (last, num_bytes, False)):
            if lo < hi:
                yield lo, hi, are_blocks

    def _end_block(self, end: int, found: str) -> None:
        if self.wrong is None and found != self._checksums.hashes[self._number]:
            self.wrong = self._number * self.block_bytes, end
        self._number += 1


class Shards:
    """The stages, bound to where the bytes are. One instance serves all workers."""

    def __init__(
        self,
        connector: Connector,
        objects: Mapping[str, ObjectInfo],
        totals: ReadTotals,
        *,
        checksums: Mapping[str, Checksums],
        device: torch.device,
        touched: set[str],
        direct: bool = False,
    ) -> None:
        """`touched` is given the names of what is written to. `direct`: read past the page cache, if the connector can."""
        self._connector = connector
        self._objects = objects
        self._totals = totals
        self._checksums = checksums
        self._device = device
        self._touched = touched
        self._answers_late = gap_of(connector) >= SMALL_GAP
        bulk = bulk_of(connector)
        self._direct = direct and bulk.read_direct is not None
        self._read: ReadInto = bulk.read_direct if direct and bulk.read_direct is not None else connector.read_into
        self._read_hashed = bulk.read_hashed
        self._address = address_of_hash() if checksums and self._read_hashed is not None else None

    def stages(self) -> list[Stage]:
        """In their order."""
        return [Stage("read", "read", "sample", self.read), Stage("place", "place", "sample", self.place)]

    # ------------------------------------------------------------------------------------------------------- read

    def read(self, chunk: Chunk) -> int:
        """Read every run of a chunk: to its target, or to staging memory; what differs from its checksum once more. The
        number of bytes. Raises CheckpointError."""
        assert isinstance(chunk, ReadChunk)
        spans = [self._span(run) for run in chunk.runs]
        sizes = [_staged(run, *span) for run, span in zip(chunk.runs, spans, strict=True)]
        staging = self._staging(chunk, sum(sizes))
        offset = num_bytes = 0
        chunk.buffers = []
        for run, size, span in zip(chunk.runs, sizes, spans, strict=True):
            buffer = staging[offset : offset + size]
            chunk.buffers.append(buffer)
            offset += -(-size // 64) * 64
            self._read_run(run, buffer, span[0])
            num_bytes += span[1] - span[0]
        return num_bytes

    def _staging(self, chunk: Chunk, size: int) -> memoryview:
        size += 64 * len(chunk.runs) if isinstance(chunk, ReadChunk) else 0
        if self._device.type != "cuda":
            return chunk.memory("staging", size)
        known = chunk.scratch.get(_PINNED)
        if known is None or len(known) < size:
            known = chunk.scratch[_PINNED] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
        found: memoryview = known[:size]
        return found

    def _span(self, run: CoalescedRead) -> tuple[int, int]:
        """What is read for a run: with checksums, all of the blocks it lies in."""
        checksums = self._checksums.get(run.key)
        if checksums is None:
            return run.start, run.end
        block = checksums.block_bytes
        return run.start // block * block, min(-(-run.end // block) * block, checksums.num_bytes)

    def _read_run(self, run: CoalescedRead, buffer: memoryview, begin: int) -> None:
        """Read a run, from `begin` on; once more if a block in it has not the checksum it should. Raises CheckpointError."""
        if self._first_wrong(run, buffer, begin) is None:
            return
        with self._totals.lock:
            self._totals.num_reread += 1
        wrong = self._first_wrong(run, buffer, begin)
        if wrong is not None:
            lo, hi = wrong
            raise CheckpointError(
                f"{_who(run, lo, hi)} is damaged: bytes {lo} to {hi} of {self._connector.describe(run.key)} are not those of "
                "its manifest, read twice. Restore another checkpoint; or, if this one was replaced on purpose, write its "
                "manifest again"
            )

    def _first_wrong(self, run: CoalescedRead, buffer: memoryview, begin: int) -> tuple[int, int] | None:
        """Read a run; the first block that has another checksum, [lo, hi) of the object, if there are checksums."""
        checksums = self._checksums.get(run.key)
        comparison = None if checksums is None else _Comparison(checksums, begin)
        if run.is_direct:
            self._touch(run.byte_spans[0])
        for start, part in _parts(run, buffer, begin):
            if len(part):
                self._totals.note(run.key, len(part), self._read_part(run, start, part, comparison))
        if comparison is None:
            return None
        self._totals.note_work(run.key, verify_s=comparison.took_s)
        return comparison.wrong

    def _read_part(self, run: CoalescedRead, start: int, part: memoryview, comparison: _Comparison | None) -> float:
        """Read bytes of a run and compare them with their checksums; for how many seconds they were read."""
        if comparison is None or self._answers_late:
            return self._read_step(run, start, part, comparison)
        read_s = 0.0
        for lo, hi, are_blocks in comparison.cut(len(part)):
            took_s = self._read_blocks(run, start + lo, part[lo:hi], comparison) if are_blocks else None
            if took_s is None:
                steps = [(at, part[at : min(at + _STEP_BYTES, hi)]) for at in range(lo, hi, _STEP_BYTES)]
                took_s = sum(self._read_step(run, start + at, byte_span, comparison) for at, byte_span in steps)
            read_s += took_s
        return read_s

    def _read_step(self, run: CoalescedRead, start: int, part: memoryview, comparison: _Comparison | None) -> float:
        begin_s = time.perf_counter()
        self._ask(run, start, part, self._read)
        took_s = time.perf_counter() - begin_s
        if comparison is not None:
            comparison.add(part)
        return took_s

    def _read_blocks(self, run: CoalescedRead, start: int, blocks: memoryview, comparison: _Comparison) -> float | None:
        """The same of whole blocks, each hashed while it lies in the CPU's cache; None, and nothing is read, where the
        connector cannot do that."""
        address = self._address  # another thread may find that there is none
        if address is None or self._read_hashed is None:
            return None
        read = partial(self._read_hashed, block_bytes=comparison.block_bytes, address=address, direct=self._direct)
        begin_s = time.perf_counter()
        found = self._ask(run, start, blocks, read)
        if found is None:
            self._address = None
            return None
        num_blocks = -(-len(blocks) // comparison.block_bytes)
        if len(found.hashes) != num_blocks:
            raise CheckpointError(
                f"{_who(run)} was not compared: the connector made {len(found.hashes)} hashes of {num_blocks} blocks"
            )
        comparison.take(found)
        return time.perf_counter() - begin_s - found.took_s

    def _ask(self, run: CoalescedRead, start: int, buffer: memoryview, read: Callable[..., T]) -> T:
        """What `read` of a connector gives. Raises CheckpointError."""
        info = self._objects.get(run.key)
        try:
            return read(run.key, start, buffer, etag=info.etag if info is not None else None)
        except ConnectorError as error:
            raise CheckpointError(
                f"{_who(run)} could not be read (bytes {start} to {start + len(buffer)} of "
                f"{self._connector.describe(run.key)}): {error}"
            ) from error

    # ------------------------------------------------------------------------------------------------------ place

    def place(self, chunk: Chunk) -> int:
        """Copy what was staged to where it belongs, cast or transferred on the way. The number of bytes."""
        assert isinstance(chunk, ReadChunk)
        num_bytes = 0
        with stream_of(self._device):
            for run, buffer in zip(chunk.runs, chunk.buffers, strict=True):
                if run.is_direct:
                    continue
                begin_s = time.perf_counter()
                begin, _ = self._span(run)
                for byte_span in run.byte_spans:
                    self._place(byte_span, buffer[byte_span.start - begin : byte_span.start - begin + byte_span.length])
                    num_bytes += byte_span.length
                took_s = time.perf_counter() - begin_s
                if run.byte_spans[0].target is not None:
                    self._totals.note_work(run.key, copy_s=took_s)
                else:
                    self._totals.note_work(run.key, cast_s=took_s)
            if self._device.type == "cuda":
                # The staging memory is written over by the next chunk: nothing of it may still be under way.
                torch.cuda.current_stream(self._device).synchronize()
        chunk.buffers = []
        return num_bytes

    def _place(self, byte_span: ByteSpan, data: memoryview) -> None:
        self._touch(byte_span)
        if byte_span.target is not None:
            byte_span.target[:] = data
        else:
            place_span(byte_span, data, self._connector)

    def _touch(self, byte_span: ByteSpan) -> None:
        self._touched.add(byte_span.label)


def place_span(byte_span: ByteSpan, data: memoryview, connector: Connector) -> None:
    """Copy, cast or transfer all bytes of a piece that has no target. Raises CheckpointError for an archive that is none."""
    assert byte_span.place is not None
    try:
        byte_span.place(data)
    except FormatError as error:
        raise CheckpointError(
            f"{byte_span.label!r} is damaged (bytes {byte_span.start} to {byte_span.start + byte_span.length} of "
            f"{connector.describe(byte_span.key)}): {error}"
        ) from error


def _staged(run: CoalescedRead, begin: int, end: int) -> int:
    """Bytes of staging memory for a run that is read as [begin, end)."""
    return end - begin - (run.end - run.start if run.is_direct else 0)


def _parts(run: CoalescedRead, buffer: memoryview, begin: int) -> list[tuple[int, memoryview]]:
    """Where the bytes that were read for a run now lie: (place in the object, bytes), in their order."""
    target = run.byte_spans[0].target
    if not run.is_direct or target is None:
        return [(begin, buffer)]
    num_before = run.start - begin
    return [(begin, buffer[:num_before]), (run.start, target), (run.end, buffer[num_before:])]


def _who(run: CoalescedRead, lo: int = 0, hi: int | None = None) -> str:
    """The tensors that a run is for, as far as they have bytes in [lo, hi) of the object."""
    inside = [p for p in run.byte_spans if p.start + p.length > lo and (hi is None or p.start < hi)]
    names = list(dict.fromkeys(byte_span.label for byte_span in inside or run.byte_spans))
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def wait_for_queued(devices: Iterable[torch.device]) -> None:
    """Wait for what this thread has queued on its CUDA streams, which may still read or write the tensors to be filled.

    The threads that fill them have streams of their own, which do not wait for this thread's.
    """
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def stream_of(device: torch.device) -> Any:
    """A stream of its own for what a worker copies, so that workers do not wait for one another or for the training."""
    from contextlib import nullcontext

    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)
