"""Memory that two processes see: one file without a name, mapped once, whole, by both.

The file is made as long as memory could ever be (a hole costs nothing) and is filled by blocks of whole pages. The process
that fills batches allocates blocks and frees them; the other one finds them by their place. Nothing has a name, so nothing
can be left behind: the memory is gone with the last mapping.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import resource
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from loaderkit._internal.cgroups import free_memory
from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.interrupts import owned
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
            f"so that the system would kill a process: make prefetch.batches, prefetch.memory or stages.batch.size smaller"
        )


_MAX_SPARE = 16
FIRST_FREE = 3
"""The lowest number for descriptors that stay open. Where stdin, stdout or stderr is closed the system hands out those
numbers, and whatever prints would write into the memory of batches."""


def _mapped(descriptor: int) -> mmap.mmap:
    """All of a file. A mapping keeps a descriptor of its own, which must not be one of stdio's either."""
    with ExitStack() as held:
        while held.enter_context(owned(os.open, os.devnull, os.O_RDWR | os.O_CLOEXEC)).fileno() < FIRST_FREE:
            pass
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


class Block(NamedTuple):
    """A part of the arena: where it begins, and its size in bytes."""

    start: int
    size: int


class SharedArena:
    """The mapping of one process. `memory` is all of it as bytes; only blocks that are allocated may be touched.

    The mapping has a descriptor of its own, which is closed with it, when no array over it is left.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._mapping = _mapped(file.fileno())
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump would bring every hole into memory
        self.memory: Bytes = np.frombuffer(self._mapping, np.uint8)

    @classmethod
    def create(cls, num_arenas: int = 1) -> SharedArena:
        """A new arena: all of them are twice as long as the machine's memory, so there is room for blocks of several sizes."""
        num_pages = 2 * os.sysconf("SC_PHYS_PAGES") // num_arenas
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            num_pages = min(num_pages, limit // 4 // num_arenas // mmap.PAGESIZE)
        size = num_pages * mmap.PAGESIZE
        with owned(os.memfd_create, "loaderkit", os.MFD_CLOEXEC) as low:
            file = owned(fcntl.fcntl, low.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
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
        """The descriptor to hand to the other process; good until `release_descriptor`."""
        return self._file.fileno()

    def release_descriptor(self) -> None:
        """Close our own descriptor. The mapping stays, as long as anything sees it."""
        self._file.close()

    def view(self, block: Block) -> Bytes:
        """The bytes of a block."""
        return self.memory[block.start : block.start + block.size]

    def discard(self, start: int, end: int) -> None:
        """Give the pages of [start, end) back to the system; for every process that sees them."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            try:
                self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)
            except OSError:  # a kernel that cannot: the memory is gone with the mapping
                return

    def discard_all_but(self, kept: list[Block]) -> None:
        """Give everything back but these blocks."""
        end = 0
        for extent in sorted(kept):
            self.discard(end, extent.start)
            end = max(end, -(-(extent.start + extent.size) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.discard(end, len(self.memory))


class Allocator:
    """Hands out blocks of an arena, in the one process that fills it. Any thread may allocate; freeing is reentrant."""

    def __init__(self, arena: SharedArena, *, begin: int = 0, keep_pages: bool = False) -> None:
        self._arena = arena
        self._keep_pages = keep_pages  # they are pinned elsewhere: a hole would be filled with other pages
        self._next = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lock = threading.Lock()
        self._freed: SimpleQueue[Block] = SimpleQueue()  # `free` may run inside any allocation, ours included
        self._holes: dict[int, list[int]] = {}  # size -> places, used again by blocks of that size
        self._live: list[Block] = []
        self._spare: deque[Block] = deque()
        self._address = arena.memory.__array_interface__["data"][0]

    def allocate(self, num_bytes: int) -> Bytes:
        """Memory that goes back to the system when the array is garbage: what a slab pool asks for. Raises OSError."""
        extent = self.take(num_bytes)
        block = self._arena.view(extent)[:num_bytes]
        weakref.finalize(block, self.free, extent).atexit = False
        return block

    def take(self, num_bytes: int) -> Block:
        """A block of at least `num_bytes`, to be given to `free` or `spare`. Raises OSError when memory is short."""
        size = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._lock:
            self._collect()
            holes = self._holes.get(size)
            start = holes.pop() if holes else self._next
            try:
                if start + size > len(self._arena.memory):
                    raise MemoryError
                # Without it, memory that is short would show as SIGBUS at the first touch.
                os.posix_fallocate(self._arena.fileno(), start, size)
            except (OSError, MemoryError) as error:
                if holes is not None and start != self._next:
                    holes.append(start)
                raise OSError(
                    getattr(error, "errno", None) or errno.ENOMEM,
                    f"there are no {say_bytes(size)} of shared memory for another batch: make prefetch.memory or "
                    "prefetch.batches smaller, and keep fewer batches alive",
                ) from error
            self._next = max(self._next, start + size)
            extent = Block(start, size)
            insort(self._live, extent)
            return extent

    def borrow(self, num_bytes: int) -> Block:
        """A block for what lies in no slab: one that was given back by `spare` if it fits, else a new one.

        Sizes are rounded up to a quarter of a power of two, so that blocks fit again.
        """
        step = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 3))
        size = -(-max(1, num_bytes) // step) * step
        for extent in list(self._spare):
            if extent.size == size:
                try:
                    self._spare.remove(extent)
                except ValueError:
                    continue
                return extent
        return self.take(size)

    def spare(self, extent: Block) -> None:
        """Give a borrowed block back. The last few are kept as they are: fresh pages cost more than copying to them."""
        self._spare.append(extent)
        if len(self._spare) > _MAX_SPARE:
            self.free(self._spare.popleft())

    def free(self, extent: Block) -> None:
        """Give a block back to the system. From any thread, also inside a destructor."""
        if not self._keep_pages:
            self._arena.discard(extent.start, extent.start + extent.size)
        self._freed.put(extent)

    @property
    def end(self) -> int:
        """No block has begun behind it yet."""
        return self._next

    def block_of(self, address: int, num_bytes: int) -> tuple[Block, Block] | None:
        """Where in the arena memory of this process lies, and in which block; None if in none."""
        start = address - self._address
        with self._lock:
            place = bisect_right(self._live, (start, 1 << 62)) - 1
            if place >= 0:
                block = self._live[place]
                if block.start <= start and start + num_bytes <= block.start + block.size:
                    return Block(start, num_bytes), block
        return None

    def _collect(self) -> None:
        while True:
            try:
                extent = self._freed.get_nowait()
            except Empty:
                return
            self._live.remove(extent)
            self._holes.setdefault(extent.size, []).append(extent.start)
