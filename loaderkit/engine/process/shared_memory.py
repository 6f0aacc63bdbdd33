"""Memory shared by two processes: one file without a name, mapped as a whole by both.

The file is longer than memory could ever be (holes take no memory) and consists of blocks of whole pages. The process that
fills batches allocates and frees the blocks; the other one gets their offsets. Nothing has a name, so nothing is left behind:
the memory is freed with the last mapping.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import resource
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from loaderkit._internal.config import keys
from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.system.cgroups import free_memory
from loaderkit._internal.system.descriptors import mapped, memory_file
from loaderkit._internal.units import say_bytes
from loaderkit.errors import ConfigError

_ROOT = Path("/")


def check_room(num_batches: int, batch_bytes: int, *, root: Path = _ROOT) -> None:
    """Raise ConfigError if there is no memory for `num_batches` of that size."""
    free, whose = free_memory(root)
    needed = num_batches * batch_bytes
    if free is not None and needed > free:
        raise ConfigError(
            f"{num_batches} batches ahead take {say_bytes(needed)} of shared memory, and {whose} has {say_bytes(free)} left, "
            f"so that the system would kill a process: make {keys.BATCHES}, {keys.MEMORY} or {keys.BATCH_SIZE} smaller"
        )


_MAX_SPARE = 16


class Block(NamedTuple):
    """A part of the arena: where it begins, and its size in bytes."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def address_bytes(times_memory: int) -> int:
    """The length of a mapping that has no memory yet: in terms of the machine's memory, at most a quarter of `ulimit -v`."""
    num_bytes = times_memory * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return num_bytes if limit == resource.RLIM_INFINITY else min(num_bytes, limit // 4)


class SharedArena:
    """The mapping of one process. `memory` is all of it as bytes; only what is committed may be touched. Blocks lie before the
    `middle`, large samples that differ in shape behind it.

    The mapping has a descriptor of its own, which is closed with it, when no array over it is left.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._mapping = mapped(file.fileno())
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump would fill every hole with memory
        self.memory: Bytes = np.frombuffer(self._mapping, np.uint8)
        self.middle = len(self.memory) // 2 // mmap.PAGESIZE * mmap.PAGESIZE

    @classmethod
    def create(cls, num_arenas: int = 1) -> SharedArena:
        """A new arena; all of them together are four times as long as the machine's memory, which leaves room for blocks of
        several sizes."""
        size = address_bytes(4) // num_arenas // mmap.PAGESIZE * mmap.PAGESIZE
        file = memory_file("loaderkit")
        try:
            os.ftruncate(file.fileno(), size)
            return cls(file)
        except OSError as error:
            file.close()
            if error.errno == errno.EMFILE:
                raise
            raise OSError(
                error.errno,
                f"{say_bytes(size)} of addresses for shared memory were refused ({error.strerror}): raise `ulimit -v` "
                "and `ulimit -f`",
            ) from error

    def fileno(self) -> int:
        """The descriptor to pass to the other process; valid until `release_descriptor`."""
        return self._file.fileno()

    def release_descriptor(self) -> None:
        """Close the descriptor. The mapping stays while an array refers to it."""
        self._file.close()

    def view(self, block: Block) -> Bytes:
        """The bytes of a block."""
        return self.memory[block.start : block.end]

    def commit(self, start: int, end: int, limit: int | None = None) -> None:
        """Give [start, end), which must end before `limit`, memory; without memory the first access would end in
        SIGBUS. Raises OSError."""
        try:
            if end > (len(self.memory) if limit is None else limit):
                raise MemoryError
            os.posix_fallocate(self.fileno(), start, end - start)
        except (OSError, MemoryError) as error:
            raise OSError(
                getattr(error, "errno", None) or errno.ENOMEM,
                f"there are no {say_bytes(end - start)} of shared memory for another batch: make {keys.MEMORY} or "
                f"{keys.BATCHES} smaller, and keep fewer batches alive",
            ) from error

    def discard(self, start: int, end: int) -> None:
        """Give the pages of [start, end) back to the system, for all processes that map them."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            try:
                self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)
            except OSError:  # not supported by the kernel: the memory is freed with the mapping
                return

    def discard_all_but(self, kept: list[Block]) -> None:
        """Give all pages back to the system, except the pages of these blocks."""
        end = 0
        for block in sorted(kept):
            self.discard(end, block.start)
            end = max(end, -(-(block.end) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.discard(end, len(self.memory))


class Allocator:
    """Hands out blocks of an arena, in the one process that fills it. Any thread may allocate; freeing is reentrant."""

    def __init__(self, arena: SharedArena, *, begin: int = 0, keep_pages: bool = False) -> None:
        self._arena = arena
        self._keep_pages = keep_pages  # another process has pinned them: after a discard the block would get others
        self._next = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lock = threading.Lock()
        self._freed: SimpleQueue[Block] = SimpleQueue()  # `free` may run inside any allocation, ours included
        self._holes: dict[int, list[int]] = {}  # size -> offsets of freed blocks, reused by blocks of that size
        self._live: list[Block] = []
        self._spare: deque[Block] = deque()
        self._address = arena.memory.__array_interface__["data"][0]

    def allocate(self, num_bytes: int) -> Bytes:
        """Memory for a slab, freed when the array is collected. Raises OSError."""
        block = self.take(num_bytes)
        slab = self._arena.view(block)[:num_bytes]
        weakref.finalize(slab, self.free, block).atexit = False
        return slab

    def take(self, num_bytes: int) -> Block:
        """A block of at least `num_bytes`, to be given to `free` or `spare`. Raises OSError when memory is short."""
        size = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._lock:
            self._collect()
            holes = self._holes.get(size)
            start = holes.pop() if holes else self._next
            try:
                self._arena.commit(start, start + size, self._arena.middle)
            except OSError:
                if holes is not None and start != self._next:
                    holes.append(start)
                raise
            self._next = max(self._next, start + size)
            block = Block(start, size)
            insort(self._live, block)
            return block

    def borrow(self, num_bytes: int) -> Block:
        """A block for data outside of slabs: a spare one of the same size, else a new one.

        Sizes are rounded up to a quarter of a power of two, so that spare blocks fit.
        """
        step = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 3))
        size = -(-max(1, num_bytes) // step) * step
        for block in list(self._spare):
            if block.size == size:
                try:
                    self._spare.remove(block)
                except ValueError:
                    continue
                return block
        return self.take(size)

    def spare(self, block: Block) -> None:
        """Give a block back. The last few blocks keep their pages: fresh pages cost more than the copy into them."""
        self._spare.append(block)
        if len(self._spare) > _MAX_SPARE:
            self.free(self._spare.popleft())

    def free(self, block: Block) -> None:
        """Free a block; from any thread, also inside a destructor."""
        if not self._keep_pages:
            self._arena.discard(block.start, block.end)
        self._freed.put(block)

    @property
    def sample_arena(self) -> SharedArena | None:
        """The arena, for samples behind its middle; None if pages are pinned, because pages are pinned by the block."""
        return None if self._keep_pages else self._arena

    @property
    def end(self) -> int:
        """The offset from which on no block was ever allocated."""
        return self._next

    def block_of(self, address: int, num_bytes: int) -> tuple[Block, Block] | None:
        """(span in the arena, its block) of memory of this process; None if no block holds it. The block of a sample is
        its pages."""
        span = Block(address - self._address, num_bytes)
        if self._arena.middle <= span.start and span.end <= len(self._arena.memory):
            first, last = span.start // mmap.PAGESIZE, -(-span.end // mmap.PAGESIZE)
            return span, Block(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
        with self._lock:
            number = bisect_right(self._live, (span.start, 1 << 62)) - 1
            if number >= 0:
                block = self._live[number]
                if block.start <= span.start and span.end <= block.end:
                    return span, block
        return None

    def _collect(self) -> None:
        while True:
            try:
                block = self._freed.get_nowait()
            except Empty:
                return
            self._live.remove(block)
            self._holes.setdefault(block.size, []).append(block.start)
