"""Writes files of a checkpoint: cut into parts, each staged, hashed and written by one of several threads.

    FilePlan ──> part ──> a worker's buffer: copied, and hashed block by block while in the CPU's cache ──> ObjectWriter.write
                     └──> where it lies, if it is part of a copy that training does not change: hashed ────────┘
                                                                                          all parts of all files ──> commit

A tensor's archive ends with the tensor's checksum, so the part with that end waits until other workers have copied the tensor's
other parts. Parts are begun in order, and a part waits only after all its own tensors are copied: the first one never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.hashing import address_of_hash
from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES
from loaderkit.checkpoint.save.file_plan import BytesItem, ElementsItem, FilePlan, Piece, TensorItem
from loaderkit.checkpoint.save.memory import PartBuffers
from loaderkit.checkpoint.transfer.stages import stream_of, wait_for_queued
from loaderkit.connectors.base import ObjectWriter, Writes
from loaderkit.engine.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit.errors import LoaderkitError

_CPU = torch.device("cpu")
_BLOCKS_AT_ONCE = 4  # copied and hashed while in the CPU's cache


@dataclass
class SaveTimes:
    """Seconds of all workers together: copying to host memory, hashing, waiting for another worker's part, writing, and making
    durable."""

    staging_s: float = 0.0
    hashing_s: float = 0.0
    waiting_s: float = 0.0
    writing_s: float = 0.0
    syncing_s: float = 0.0

    def add(self, other: SaveTimes) -> None:
        """Add the seconds of another."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(frozen=True)
class SavedFile:
    """A file that was written. `hashes` are those of its blocks, 8 bytes each, little-endian."""

    name: str
    num_bytes: int
    block_bytes: int
    hashes: bytes
    times: SaveTimes

    def hexadecimal(self) -> list[str]:
        """The hashes as the manifest has them."""
        return [f"{value:016x}" for value in np.frombuffer(self.hashes, "<u8").tolist()]


class _Part(NamedTuple):
    """The bytes [begin, end) of a file."""

    file: _OpenFile
    begin: int
    end: int


@dataclass
class _OpenFile:
    """A file while it is being written."""

    plan: FilePlan
    writer: ObjectWriter
    part_bytes: int
    block_bytes: int
    hashes: NDArray[np.uint64]
    times: SaveTimes = field(default_factory=SaveTimes)

    def parts(self) -> list[_Part]:
        """In order; a file without bytes has none."""
        size, step = self.plan.size, self.part_bytes
        return [_Part(self, begin, min(begin + step, size)) for begin in range(0, size, step)]

    def saved(self) -> SavedFile:
        return SavedFile(
            self.plan.name, self.plan.size, self.block_bytes, self.hashes.astype("<u8").tobytes(), self.times
        )


def save_files(
    plans: Sequence[FilePlan], writes: Writes, prefix: str, *, num_workers: int, buffers: PartBuffers
) -> list[SavedFile]:
    """Write the files below `prefix`, whole and durable; their names are after `writes.sync`.

    Raises what the store or a tensor raises first; then no file is left that was not committed already.
    """
    files: list[_OpenFile] = []
    try:
        files.extend(_opened(plan, writes, prefix) for plan in plans)
        parts = [part for file in files for part in file.parts()]
        devices = _devices_of(plans)
        wait_for_queued(devices)  # of this thread's kernels, which still compute what is saved
        _Workers(parts, buffers, next(iter(devices), _CPU)).run(min(num_workers, len(parts)))
        for file in files:
            begin_s = time.perf_counter()
            file.writer.commit()
            file.times.syncing_s += time.perf_counter() - begin_s
    except BaseException:
        for file in files:
            with suppress(LoaderkitError):  # the first error says more
                file.writer.abort()
        raise
    return [file.saved() for file in files]


def _devices_of(plans: Iterable[FilePlan]) -> set[torch.device]:
    """The GPUs that tensors lie on."""
    items = [item for plan in plans for item in plan.items if not isinstance(item, BytesItem)]
    return {item.data.device for item in items if item.data.device.type == "cuda"}


def _opened(plan: FilePlan, writes: Writes, prefix: str) -> _OpenFile:
    part_bytes = writes.part_bytes_of(plan.size)
    block_bytes = gcd(part_bytes, MAX_BLOCK_BYTES)  # so that no block lies in two parts
    hashes = np.zeros(-(-plan.size // block_bytes), np.uint64)
    return _OpenFile(plan, writes.create(prefix + plan.name, plan.size), part_bytes, block_bytes, hashes)


class _Workers:
    """Threads that write parts, in order."""

    def __init__(self, parts: Sequence[_Part], buffers: PartBuffers, device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._next = 0
        self._buffers = buffers
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, num_workers: int) -> None:
        """Write all parts. Raises the first error of a worker, and what interrupts this thread, after all have stopped."""
        threads: list[threading.Thread] = []
        try:
            with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
                ready = threading.Barrier(num_workers + 1)
                try:
                    for number in range(num_workers):
                        work = partial(self._work, ready, compute_alone)
                        thread = threading.Thread(target=work, name=f"loaderkit-save-{number}", daemon=True)
                        thread.start()
                        threads.append(thread)
                    ready.wait()
                except BaseException:
                    ready.abort()
                    raise
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._fail(error)
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error

    def _work(self, ready: threading.Barrier, compute_alone: Callable[[], None]) -> None:
        try:
            compute_alone()
            ready.wait()
            with stream_of(self._device):
                while (part := self._take()) is not None:
                    self._write(part)
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            self._fail(error)

    def _take(self) -> _Part | None:
        with self._changed:
            if self._error is not None or self._next == len(self._parts):
                return None
            self._next += 1
            return self._parts[self._next - 1]

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _write(self, part: _Part) -> None:
        fixed = part.file.plan.fixed(part.begin, part.end)
        if fixed is None:
            self._write_copy(part)
            return
        times = _hash_fixed(part, *fixed)
        with self._changed:
            self._changed.notify_all()
        item, start = fixed
        assert item.data.fixed is not None
        self._put(part, item.data.fixed[start : start + part.end - part.begin], times)

    def _write_copy(self, part: _Part) -> None:
        with self._buffers.buffer(part.file.part_bytes) as buffer:
            memory = buffer[: part.end - part.begin]
            filler = _Filler(part, memory)
            filler.fill()
            with self._changed:
                self._changed.notify_all()  # of checksums that are whole now
            if filler.late:
                begin_s = time.perf_counter()
                with self._changed:
                    self._changed.wait_for(lambda: self._error is not None or filler.can_finish())
                    if self._error is not None:
                        return
                filler.times.waiting_s += time.perf_counter() - begin_s
                filler.finish()
            self._put(part, memory, filler.times)

    def _put(self, part: _Part, memory: NDArray[np.uint8], times: SaveTimes) -> None:
        begin_s = time.perf_counter()
        part.file.writer.write(part.begin, memory.data)
        times.writing_s += time.perf_counter() - begin_s
        with self._changed:
            part.file.times.add(times)


def _hash_fixed(part: _Part, item: TensorItem, start: int) -> SaveTimes:
    """Hash a part that is a range of a tensor, from `start` on, which stays as it is until it is written."""
    begin_s = time.perf_counter()
    assert item.data.fixed is not None
    num_bytes = part.end - part.begin
    crc = _hash_blocks(part.file, part.begin, item.data.fixed[start : start + num_bytes].data)
    item.crc.add(start, num_bytes, crc)
    return SaveTimes(hashing_s=time.perf_counter() - begin_s)


def _hash_blocks(file: _OpenFile, start: int, data: memoryview, *, with_crc: bool = True) -> int:
    """Note the hashes of whole blocks of a file, from `start` on; the CRC-32 of all of them, or 0.

    In one call: each end of a call takes the GIL, for which a training loop then waits.
    """
    step = file.block_bytes
    first, address = start // step, address_of_hash()
    if native.hash_blocks is not None and address is not None:
        hashes, crc = native.hash_blocks(data, step, address, with_crc)
        file.hashes[first : first + len(hashes) // 8] = np.frombuffer(hashes, np.uint64)
        return int(crc)
    for at in range(0, len(data), step):
        file.hashes[first + at // step] = xxhash.xxh3_64_intdigest(data[at : at + step])
    return native.crc32(data) if with_crc else 0


class _Filler:
    """Fills memory with a part of a file, and hashes it block by block. `late` are the ends of archives whose checksum was not
    known yet."""

    def __init__(self, part: _Part, memory: NDArray[np.uint8]) -> None:
        self._part = part
        self._file = part.file
        self._memory = memory
        self.late: list[Piece] = []
        self.times = SaveTimes()

    def fill(self) -> None:
        """Copy and hash everything but `late`."""
        begin, end, step = self._part.begin, self._part.end, _BLOCKS_AT_ONCE * self._file.block_bytes
        for start in range(begin, end, step):
            blocks = self._memory[start - begin : start - begin + step]
            num_late, done = len(self.late), 0
            for piece in self._file.plan.pieces(start, start + len(blocks)):
                blocks[done : piece.at] = 0
                done = piece.at + piece.hi - piece.lo
                self._place(piece._replace(at=piece.at + start - begin))
            blocks[done:] = 0
            if len(self.late) == num_late:
                self._hash(start, blocks)
                continue
            late = self._late_blocks(self.late[num_late:])
            for number in range(
                (start - begin) // self._file.block_bytes, -(-(start - begin + len(blocks)) // self._file.block_bytes)
            ):
                if number not in late:
                    self._hash_block(number)

    def can_finish(self) -> bool:
        """True if the checksums are there that `late` needs."""
        return all(isinstance(piece.item, TensorItem) and piece.item.crc.is_whole for piece in self.late)

    def finish(self) -> None:
        """Fill `late`, and hash those blocks."""
        for piece in self.late:
            self._place(piece)
        for number in sorted(self._late_blocks(self.late)):
            self._hash_block(number)

    def _late_blocks(self, late: Sequence[Piece]) -> set[int]:
        """The numbers, in the part, of the blocks that have some of these pieces, which are shorter than a block."""
        return {at // self._file.block_bytes for piece in late for at in (piece.at, piece.at + piece.hi - piece.lo - 1)}

    def _hash_block(self, number: int) -> None:
        step = self._file.block_bytes
        self._hash(self._part.begin + number * step, self._memory[number * step : (number + 1) * step])

    def _hash(self, start: int, blocks: NDArray[np.uint8]) -> None:
        begin_s = time.perf_counter()
        _hash_blocks(self._file, start, blocks.data, with_crc=False)  # each tensor's is made as it is copied
        self.times.hashing_s += time.perf_counter() - begin_s

    def _place(self, piece: Piece) -> None:
        """Copy a piece of an item to memory."""
        item, lo, hi, at = piece
        target = self._memory[at : at + hi - lo]
        begin_s = time.perf_counter()
        if isinstance(item, BytesItem):
            target[:] = np.frombuffer(item.data[lo:hi], np.uint8)
            self.times.staging_s += time.perf_counter() - begin_s
            return
        if isinstance(item, ElementsItem):
            item.data.copy(lo, target)
            self.times.staging_s += time.perf_counter() - begin_s
            return
        data_begin, data_end = len(item.archive.head), len(item.archive.head) + item.archive.num_bytes
        if lo < data_begin:
            head = item.archive.head[lo:hi]
            target[: len(head)] = np.frombuffer(head, np.uint8)
        first, last = max(lo, data_begin), min(hi, data_end)
        if first < last:
            data = target[first - lo : last - lo]
            item.data.copy(first - data_begin, data)
            copied_s = time.perf_counter()
            item.crc.add(first - data_begin, len(data), native.crc32(data.data))
            self.times.hashing_s += time.perf_counter() - copied_s
            begin_s += time.perf_counter() - copied_s
        if hi > data_end:
            first = max(lo, data_end)
            if item.crc.is_whole:
                tail = item.archive.tail(item.crc.value())[first - data_end : hi - data_end]
                target[first - lo :] = np.frombuffer(tail, np.uint8)
            else:
                self.late.append(Piece(item, first, hi, at + first - lo))
        self.times.staging_s += time.perf_counter() - begin_s
