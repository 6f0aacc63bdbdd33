"""Writes files of a checkpoint: cut into parts, each staged, hashed and written by one of several threads.

    FilePlan ──> part ──> a worker's buffer: copied, and hashed block by block while in the CPU's cache ──> ObjectWriter.write
                     └──> where it lies, if it is part of a copy that training does not change: hashed ────────┘
                                                                                          all parts of all files ──> commit

A tensor's archive ends with the tensor's checksum, so the part with that end waits until other workers have copied the tensor's
other parts. Parts are begun in order, and a part waits only after all its own tensors are copied: the first one never waits. No
part waits once none is being copied: a checksum that is not whole by then is an error.
Each call that takes the GIL again makes the training loop wait, so a part is put together and hashed by one call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.cuda.streams import DeviceStreams
from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit._internal.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES
from loaderkit.checkpoint.save.file_plan import (
    BytesItem,
    ElementsItem,
    ElementSource,
    FilePlan,
    ItemSlice,
    TensorItem,
    address_of,
)
from loaderkit.checkpoint.save.memory import PartBuffers
from loaderkit.checkpoint.save.tensor_bytes import TensorBytes
from loaderkit.checkpoint.transfer.stages import wait_for_queued
from loaderkit.connectors.base import ObjectWriter, Writes
from loaderkit.errors import CheckpointError, LoaderkitError

_COPIED_AT_ONCE = 2**20  # bytes of elements that have to be made


@dataclass
class SaveTimes:
    """Seconds of all workers together: copying to host memory, with checksums, hashing, waiting for another worker's part,
    writing, and making durable."""

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
    """A file that was written. `hashes` are the hashes of its blocks, 8 bytes each, little-endian."""

    name: str
    num_bytes: int
    block_bytes: int
    hashes: bytes
    times: SaveTimes

    def hexadecimal(self) -> list[str]:
        """The hashes as the manifest has them."""
        return [f"{value:016x}" for value in np.frombuffer(self.hashes, "<u8").tolist()]


class _FilePart(NamedTuple):
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

    def parts(self) -> list[_FilePart]:
        """In order; a file without bytes has none."""
        size, step = self.plan.size, self.part_bytes
        return [_FilePart(self, begin, min(begin + step, size)) for begin in range(0, size, step)]

    def saved(self) -> SavedFile:
        return SavedFile(
            self.plan.name, self.plan.size, self.block_bytes, self.hashes.astype("<u8").tobytes(), self.times
        )


def save_files(
    plans: Sequence[FilePlan], writes: Writes, prefix: str, *, num_workers: int, buffers: PartBuffers
) -> list[SavedFile]:
    """Write the files below `prefix`, whole and durable; their names are after `writes.sync`.

    Raises what the store or a tensor raises first, and CheckpointError if a tensor's bytes were not each copied once; then no
    file is left that was not committed already.
    """
    files: list[_OpenFile] = []
    try:
        files.extend(_opened(plan, writes, prefix) for plan in plans)
        parts = [part for file in files for part in file.parts()]
        devices = _devices_of(plans)
        wait_for_queued(devices)  # of this thread's kernels, which still compute what is saved
        _Workers(parts, buffers, devices).run(min(num_workers, len(parts)))
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

    def __init__(self, parts: Sequence[_FilePart], buffers: PartBuffers, devices: Collection[torch.device]) -> None:
        self._parts = parts
        self._devices = devices
        self._next = 0
        self._num_filling = 0  # parts that are being copied
        self._buffers = buffers
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, num_workers: int) -> None:
        """Write all parts, in this thread if the program ends. Raises the first error of a worker, and what interrupts this
        thread, after all have stopped."""
        threads: list[threading.Thread] = []
        try:
            with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
                ready = threading.Barrier(num_workers + 1)
                try:
                    for number in range(num_workers):
                        work = partial(self._work, ready, compute_alone)
                        thread = threading.Thread(target=work, name=f"loaderkit-save-{number}", daemon=True)
                        start_thread(thread)
                        threads.append(thread)
                    ready.wait()
                except BaseException:
                    ready.abort()
                    raise
            for thread in threads:
                thread.join()
        except ProgramEndsError:
            for thread in threads:
                thread.join()  # they have taken no part
            self._write_parts()
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
            self._write_parts()
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            self._fail(error)

    def _write_parts(self) -> None:
        with closing(DeviceStreams(self._devices)) as streams, streams.current():
            while (part := self._take()) is not None:
                self._write(part, streams.device)

    def _take(self) -> _FilePart | None:
        with self._changed:
            if self._error is not None or self._next == len(self._parts):
                return None
            self._next += 1
            self._num_filling += 1
            return self._parts[self._next - 1]

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _write(self, part: _FilePart, device: torch.device | None) -> None:
        fixed = part.file.plan.fixed(part.begin, part.end)
        if fixed is not None:
            self._fill_and_put(part, fixed)
            return
        with self._buffers.buffer(part.file.part_bytes, device) as buffer:
            self._fill_and_put(part, buffer[: part.end - part.begin])

    def _fill_and_put(self, part: _FilePart, memory: NDArray[np.uint8]) -> None:
        filler = _Filler(part, memory)
        filler.fill()
        begin_s = time.perf_counter()
        with self._changed:
            self._num_filling -= 1
            self._changed.notify_all()  # of checksums that are whole now
            self._changed.wait_for(lambda: self._error is not None or filler.can_finish() or not self._num_filling)
            if self._error is not None:
                return
        filler.times.waiting_s += time.perf_counter() - begin_s
        filler.finish()
        self._put(part, memory, filler.times)

    def _put(self, part: _FilePart, memory: NDArray[np.uint8], times: SaveTimes) -> None:
        begin_s = time.perf_counter()
        part.file.writer.write(part.begin, memory.data)
        times.writing_s += time.perf_counter() - begin_s
        with self._changed:
            part.file.times.add(times)


class _Filler:
    """Fills memory with a part of a file, and hashes it. Bytes that are there already, as in memory that is written
    from where it lies, are not copied."""

    def __init__(self, part: _FilePart, memory: NDArray[np.uint8]) -> None:
        self._part, self._memory = part, memory
        self._rows: list[tuple[int, int, int, int]] = []  # as `native.fill_part` takes them
        self._summed: list[tuple[int, TensorItem, int]] = []  # rows with bytes of tensors, from where on
        self._tails: list[ItemSlice] = []  # ends of archives, which have the tensors' checksums
        self._has_tail = np.zeros(-(-len(memory) // part.file.block_bytes), np.bool_)  # by block
        self.times = SaveTimes()

    def fill(self) -> None:
        """Copy everything but the ends of archives, and hash the blocks that have no such ends in them."""
        begin_s, done = time.perf_counter(), 0
        for piece in self._part.file.plan.pieces(self._part.begin, self._part.end):
            self._rows.append((done, piece.at, native.ZEROS, native.NO_CRC))
            self._add(piece)
            done = piece.at + piece.hi - piece.lo
        self._rows.append((done, len(self._memory), native.ZEROS, native.NO_CRC))
        rows = np.array(self._rows, np.int64)
        hashing_s = _fill_part(self._part, self._memory, rows, ~self._has_tail)
        for number, item, start in self._summed:
            begin, end, _, crc = rows[number].tolist()
            item.crc.add(start, end - begin, crc)
        self.times.hashing_s += hashing_s
        self.times.staging_s += time.perf_counter() - begin_s - hashing_s

    def can_finish(self) -> bool:
        """True if all checksums that are still to be written are known."""
        return all(piece.item.crc.is_whole for piece in self._tails if isinstance(piece.item, TensorItem))

    def finish(self) -> None:
        """Copy the ends of archives, and hash those blocks. Raises CheckpointError for a checksum that is not whole."""
        if not self._tails:
            return
        begin_s = time.perf_counter()
        for item, lo, hi, at in self._tails:
            assert isinstance(item, TensorItem)
            if not item.crc.is_whole:
                raise CheckpointError(
                    f"{self._part.file.plan.name}: of the {item.data.num_bytes} bytes of {item.name!r} some were copied never "
                    "or twice, so the save is given up; the tensor is unchanged. This is a fault of loaderkit: please report it"
                )
            tail = item.archive.tail(item.crc.value())[lo - item.data_end : hi - item.data_end]
            self._memory[at : at + len(tail)] = np.frombuffer(tail, np.uint8)
        hashing_s = _fill_part(self._part, self._memory, np.empty((0, 4), np.int64), self._has_tail)
        self.times.hashing_s += hashing_s
        self.times.staging_s += time.perf_counter() - begin_s - hashing_s

    def _add(self, piece: ItemSlice) -> None:
        """Note from where the bytes of a piece of an item are to be copied; bytes that do not lie in memory are copied
        now."""
        item, lo, hi, at = piece
        if isinstance(item, BytesItem):
            self._add_bytes(np.frombuffer(item.data, np.uint8), lo, hi, at)
            return
        if isinstance(item, ElementsItem):
            self._add_elements(item.data, lo, hi, at)
            return
        begin, end = item.data_begin, item.data_end
        if lo < begin:
            self._add_bytes(np.frombuffer(item.archive.head, np.uint8), lo, min(hi, begin), at)
        if (first := max(lo, begin)) < (last := min(hi, end)):
            self._summed.append((len(self._rows), item, first - begin))
            self._add_elements(item.data, first - begin, last - begin, at + first - lo, crc=0)
        if hi > end:
            first = max(lo, end)
            self._tails.append(ItemSlice(item, first, hi, at + first - lo))
            block = self._part.file.block_bytes
            self._has_tail[(at + first - lo) // block] = self._has_tail[(at + hi - lo - 1) // block] = True

    def _add_elements(self, data: ElementSource, lo: int, hi: int, at: int, crc: int = native.NO_CRC) -> None:
        if isinstance(data, TensorBytes) and data.memory is not None:
            self._add_bytes(data.memory, lo, hi, at, crc)
            return
        end = at + hi - lo
        for start in range(at // _COPIED_AT_ONCE * _COPIED_AT_ONCE, end, _COPIED_AT_ONCE):
            first, last = max(start, at), min(start + _COPIED_AT_ONCE, end)
            data.copy(lo + first - at, self._memory[first:last])
        self._add_bytes(self._memory, at, end, at, crc)

    def _add_bytes(self, data: NDArray[np.uint8], lo: int, hi: int, at: int, crc: int = native.NO_CRC) -> None:
        self._rows.append((at, at + hi - lo, address_of(data) + lo, crc))


def _fill_part(part: _FilePart, memory: NDArray[np.uint8], rows: NDArray[np.int64], blocks: NDArray[np.bool_]) -> float:
    """Do what `rows` say, note the hashes of some blocks, and return the seconds that the hashes took."""
    file, step = part.file, part.file.block_bytes
    hashes = file.hashes[part.begin // step : -(-part.end // step)]
    return native.fill_part(memory, rows, step, hashes, blocks)
