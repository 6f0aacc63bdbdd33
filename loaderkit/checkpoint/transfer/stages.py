"""The stages of a transfer: `read`, which verifies checksums where there are any, and `place`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
import xxhash

from loaderkit._internal.cuda.host_pages import HostPins
from loaderkit._internal.cuda.streams import DeviceStreams
from loaderkit._internal.hashing import address_of_hash
from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.transfer.layout import ByteSpan
from loaderkit.checkpoint.transfer.plan import LATENCY_GAP, CoalescedRead, ReadChunk, ReadTotals
from loaderkit.connectors.base import Connector, Hashed, ObjectInfo, ReadInto, bulk_of, traits_of
from loaderkit.engine.work import Chunk, Stage
from loaderkit.errors import CheckpointError, ConnectorError, FormatError

T = TypeVar("T")

_PINNED = "pinned"
# Bytes that are read and then hashed while they are in the CPU's cache. Only for connectors without latency that cannot hash.
_STEP_BYTES = 2**22


class _BlockVerifier:
    """Compares an object's blocks with their checksums, in order from the block that begins at `begin` on."""

    def __init__(self, checksums: Checksums, begin: int) -> None:
        self.damaged: tuple[int, int] | None = None  # [lo, hi) of the first block that differs
        self.took_s = 0.0
        self.block_bytes = checksums.block_bytes
        self._checksums = checksums
        self._at = begin
        self._number = begin // checksums.block_bytes
        self._digest = xxhash.xxh3_64()

    def add(self, data: memoryview) -> None:
        """Hash the bytes that follow."""
        begin_s = time.perf_counter()
        while len(data):
            end = self._checksums.end_of(self._number)
            head = data[: end - self._at]
            self._digest.update(head)  # xxhash releases the GIL
            self._at += len(head)
            data = data[len(head) :]
            if self._at == end:
                self._end_block(end, self._digest.hexdigest())
                self._digest.reset()
        self.took_s += time.perf_counter() - begin_s

    def take(self, hashed: Hashed) -> None:
        """Compare the hashes of the blocks that follow."""
        for value in hashed.hashes:
            self._at = self._checksums.end_of(self._number)
            self._end_block(self._at, f"{value:016x}")
        self.took_s += hashed.took_s

    def cut(self, num_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """[lo, hi) of the parts of the next `num_bytes`, and whether a part consists of whole blocks."""
        block = self.block_bytes
        first = min(-self._at % block, num_bytes)
        last = first + (num_bytes - first) // block * block
        if self._at + num_bytes == self._checksums.num_bytes:
            last = num_bytes  # the object's last block may be shorter
        for lo, hi, are_blocks in ((0, first, False), (first, last, True), (last, num_bytes, False)):
            if lo < hi:
                yield lo, hi, are_blocks

    def _end_block(self, end: int, digest: str) -> None:
        if self.damaged is None and digest != self._checksums.hashes[self._number]:
            self.damaged = self._number * self.block_bytes, end
        self._number += 1


class TransferStages:
    """The stages, bound to a connector. One instance serves all workers."""

    def __init__(
        self,
        connector: Connector,
        objects: Mapping[str, ObjectInfo],
        totals: ReadTotals,
        *,
        checksums: Mapping[str, Checksums],
        streams: DeviceStreams | None,
        touched: set[str],
        direct: bool = False,
    ) -> None:
        """`streams`: on every CUDA device with a tensor to be filled, if there is one. `touched` collects the names of the
        tensors that are written to. `direct`: read past the page cache, if possible."""
        self._connector = connector
        self._objects = objects
        self._totals = totals
        self._checksums = checksums
        self._streams = streams
        self._device = None if streams is None else streams.device
        self._pins = None if self._device is None else HostPins()
        self._touched = touched
        self._has_latency = traits_of(connector).coalesce_gap >= LATENCY_GAP
        bulk = bulk_of(connector)
        self._direct = direct and bulk.read_direct is not None
        self._read: ReadInto = bulk.read_direct if direct and bulk.read_direct is not None else connector.read_into
        self._read_hashed = bulk.read_hashed
        self._address = address_of_hash() if checksums and self._read_hashed is not None else None

    def stages(self) -> list[Stage]:
        """In order."""
        return [Stage("read", "read", "sample", self.read, waits=True), Stage("place", "place", "sample", self.place)]

    # ------------------------------------------------------------------------------------------------------- read

    def read(self, chunk: Chunk) -> int:
        """Make the reads of a chunk, to targets or to staging memory; returns the number of bytes.

        A read with a block that differs from its checksum is repeated once. Raises CheckpointError.
        """
        assert isinstance(chunk, ReadChunk)
        extents = [self._extent(read) for read in chunk.reads]
        sizes = [_staged_bytes(read, *extent) for read, extent in zip(chunk.reads, extents, strict=True)]
        staging = self._staging(chunk, sum(sizes) + 64 * len(sizes))
        offset = num_bytes = 0
        chunk.buffers = []
        for read, size, (begin, end) in zip(chunk.reads, sizes, extents, strict=True):
            buffer = staging[offset : offset + size]
            chunk.buffers.append(buffer)
            offset += -(-size // 64) * 64
            self._read_verified(read, buffer, begin)
            num_bytes += end - begin
        return num_bytes

    def _staging(self, chunk: Chunk, size: int) -> memoryview:
        if self._device is None or self._pins is None:
            return chunk.memory("staging", size)
        pinned: memoryview | None = chunk.scratch.get(_PINNED)
        if pinned is None or len(pinned) < size:
            pinned = None
            chunk.scratch.pop(_PINNED, None)  # before the other is made
            pinned = chunk.scratch[_PINNED] = self._pins.pages(size + size // 4, self._device).data
        return pinned[:size]

    def _extent(self, read: CoalescedRead) -> tuple[int, int]:
        """[begin, end) of the bytes that are read: with checksums, all blocks that the read overlaps."""
        checksums = self._checksums.get(read.key)
        if checksums is None:
            return read.start, read.end
        block = checksums.block_bytes
        return read.start // block * block, min(-(-read.end // block) * block, checksums.num_bytes)

    def _read_verified(self, read: CoalescedRead, buffer: memoryview, begin: int) -> None:
        """Read from `begin` on, and again if a block differs from its checksum. Raises CheckpointError."""
        if self._read_extent(read, buffer, begin) is None:
            return
        with self._totals.lock:
            self._totals.num_reread += 1
        damaged = self._read_extent(read, buffer, begin)
        if damaged is not None:
            lo, hi = damaged
            raise CheckpointError(
                f"{_labels(read, lo, hi)} is damaged: bytes {lo} to {hi} of {self._connector.describe(read.key)} are not those "
                "of its manifest, read twice. Restore another checkpoint; or, if this one was replaced on purpose, write its "
                "manifest again"
            )

    def _read_extent(self, read: CoalescedRead, buffer: memoryview, begin: int) -> tuple[int, int] | None:
        """Read from `begin` on; returns [lo, hi) in the object of the first block that differs from its checksum, if any."""
        checksums = self._checksums.get(read.key)
        verifier = None if checksums is None else _BlockVerifier(checksums, begin)
        if read.is_direct:
            self._touched.add(read.spans[0].label)
        for start, part in _memory_of(read, buffer, begin):
            if len(part):
                self._totals.add_read(read.key, len(part), self._read_part(read, start, part, verifier))
        if verifier is None:
            return None
        self._totals.add_work(read.key, verify_s=verifier.took_s)
        return verifier.damaged

    def _read_part(self, read: CoalescedRead, start: int, part: memoryview, verifier: _BlockVerifier | None) -> float:
        """Read and verify bytes from `start` on; returns the seconds that reading took."""
        if verifier is None or self._has_latency:
            return self._read_step(read, start, part, verifier)
        read_s = 0.0
        for lo, hi, are_blocks in verifier.cut(len(part)):
            took_s = self._read_blocks(read, start + lo, part[lo:hi], verifier) if are_blocks else None
            if took_s is None:
                steps = [(at, part[at : min(at + _STEP_BYTES, hi)]) for at in range(lo, hi, _STEP_BYTES)]
                took_s = sum(self._read_step(read, start + at, step, verifier) for at, step in steps)
            read_s += took_s
        return read_s

    def _read_step(self, read: CoalescedRead, start: int, part: memoryview, verifier: _BlockVerifier | None) -> float:
        begin_s = time.perf_counter()
        self._ask(read, start, part, self._read)
        took_s = time.perf_counter() - begin_s
        if verifier is not None:
            verifier.add(part)
        return took_s

    def _read_blocks(
        self, read: CoalescedRead, start: int, blocks: memoryview, verifier: _BlockVerifier
    ) -> float | None:
        """Read whole blocks with a connector that hashes them while they are in the CPU's cache; returns the seconds
        that reading took.

        Returns None, with nothing read, where the connector cannot do that.
        """
        address = self._address  # another thread may set it to None
        if address is None or self._read_hashed is None:
            return None
        read_hashed = partial(self._read_hashed, block_bytes=verifier.block_bytes, address=address, direct=self._direct)
        begin_s = time.perf_counter()
        hashed = self._ask(read, start, blocks, read_hashed)
        if hashed is None:
            self._address = None
            return None
        num_blocks = -(-len(blocks) // verifier.block_bytes)
        if len(hashed.hashes) != num_blocks:
            raise CheckpointError(
                f"{_labels(read)} was not compared: the connector made {len(hashed.hashes)} hashes of {num_blocks} blocks"
            )
        verifier.take(hashed)
        return time.perf_counter() - begin_s - hashed.took_s

    def _ask(self, read: CoalescedRead, start: int, buffer: memoryview, method: Callable[..., T]) -> T:
        """The result of a connector's `method`. Raises CheckpointError."""
        info = self._objects.get(read.key)
        try:
            return method(read.key, start, buffer, etag=info.etag if info is not None else None)
        except ConnectorError as error:
            raise CheckpointError(
                f"{_labels(read)} could not be read (bytes {start} to {start + len(buffer)} of "
                f"{self._connector.describe(read.key)}): {error}"
            ) from error

    # ------------------------------------------------------------------------------------------------------ place

    def place(self, chunk: Chunk) -> int:
        """Copy staged bytes to their tensors, cast or transferred on the way; returns the number of bytes."""
        assert isinstance(chunk, ReadChunk)
        num_bytes = 0
        with (
            nullcontext() if self._streams is None else self._streams.current()
        ):  # the next chunk overwrites the memory
            for read, buffer in zip(chunk.reads, chunk.buffers, strict=True):
                if read.is_direct:
                    continue
                begin_s = time.perf_counter()
                begin, _ = self._extent(read)
                for span in read.spans:
                    data = buffer[span.start - begin : span.start - begin + span.length]
                    self._touched.add(span.label)
                    if span.target is not None:
                        span.target[:] = data
                    else:
                        place_span(span, data, self._connector)
                    num_bytes += span.length
                took_s = time.perf_counter() - begin_s
                if read.spans[0].target is not None:
                    self._totals.add_work(read.key, copy_s=took_s)
                else:
                    self._totals.add_work(read.key, cast_s=took_s)
        chunk.buffers = []
        return num_bytes


def place_span(span: ByteSpan, data: memoryview, connector: Connector) -> None:
    """Copy, cast or transfer all bytes of a span without a target. Raises CheckpointError for an archive that is none."""
    assert span.place is not None
    try:
        span.place(data)
    except FormatError as error:
        raise CheckpointError(
            f"{span.label!r} is damaged (bytes {span.start} to {span.start + span.length} of "
            f"{connector.describe(span.key)}): {error}"
        ) from error


def _staged_bytes(read: CoalescedRead, begin: int, end: int) -> int:
    """Bytes of staging memory for a read of [begin, end)."""
    return end - begin - (read.end - read.start if read.is_direct else 0)


def _memory_of(read: CoalescedRead, buffer: memoryview, begin: int) -> list[tuple[int, memoryview]]:
    """(start in the object, memory) of the parts of a read from `begin` on, in order."""
    target = read.spans[0].target
    if not read.is_direct or target is None:
        return [(begin, buffer)]
    num_before = read.start - begin
    return [(begin, buffer[:num_before]), (read.start, target), (read.end, buffer[num_before:])]


def _labels(read: CoalescedRead, lo: int = 0, hi: int | None = None) -> str:
    """The tensors of a read that have bytes in [lo, hi) of the object."""
    inside = [span for span in read.spans if span.start + span.length > lo and (hi is None or span.start < hi)]
    names = list(dict.fromkeys(span.label for span in inside or read.spans))
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def wait_for_queued(devices: Iterable[torch.device]) -> None:
    """Wait for the kernels of this thread's CUDA streams, which may still read or write the tensors to be filled.

    The threads that fill them use streams of their own, which do not wait for this thread's.
    """
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def hand_over(tensors: Iterable[object]) -> None:
    """Note that this thread's current streams use tensors that another thread has made, on the default stream: else their
    memory would be used again there as soon as they are dropped, before kernels on these streams have ended."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
