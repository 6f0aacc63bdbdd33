"""The memory of large samples that differ in shape: parts of one range of addresses, leased in the way of slabs.

A part is the first free one that is long enough, and free neighbours are joined, so memory is used again by samples of any
size. Sizes rounded up to classes would need twice as much: each class keeps what it once needed.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from weakref import ref

import numpy as np

from loaderkit._internal.dtypes import Bytes
from loaderkit.engine.process.leases import Lease
from loaderkit.engine.process.shared_memory import SharedArena, address_bytes

_MOST_SPARE = 1.5  # times the most memory in use lately: what is free beyond that is given back
_FORGET = 0.999  # of the most memory in use lately remains after each sample
_MAP_NORESERVE = 0x4000  # of x86 and ARM; Python names it from 3.13 on


class AddressRanges:
    """Disjoint half-open ranges of integers, in order; neighbours are joined."""

    def __init__(self, bounds: list[int]) -> None:
        self._bounds = bounds  # begin and end of each

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._bounds[::2], self._bounds[1::2], strict=True)

    @property
    def length(self) -> int:
        """The length of all ranges."""
        return sum(self._bounds[1::2]) - sum(self._bounds[::2])

    def add(self, begin: int, end: int) -> None:
        self._set(begin, end, is_in=True)

    def remove(self, begin: int, end: int) -> None:
        self._set(begin, end, is_in=False)

    def _set(self, begin: int, end: int, *, is_in: bool) -> None:
        bounds = self._bounds
        first, last = bisect_left(bounds, begin), bisect_right(bounds, end)
        # An odd number of bounds before a place: it lies in a range.
        bounds[first:last] = [begin] * (first % 2 != is_in) + [end] * (last % 2 != is_in)

    def first_fit(self, length: int) -> int | None:
        """The begin of the first range that is long enough."""
        return next((begin for begin, end in self if end - begin >= length), None)

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of the ranges in [begin, end)."""
        return [(max(begin, low), min(end, high)) for low, high in self if low < end and begin < high]

    def without(self, others: AddressRanges) -> AddressRanges:
        """The ranges without `others`."""
        left = AddressRanges(self._bounds.copy())
        for begin, end in others:
            left.remove(begin, end)
        return left


class PrivateArena:
    """Addresses of this process alone, as many as the machine has memory; none if the system refuses that."""

    def __init__(self) -> None:
        self.memory: Bytes = np.empty(0, np.uint8)
        # Linux joins neighbouring mappings into one. Of two that were accounted for, os.fork() would find no memory for a copy.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        with suppress(OSError):
            self._mapping = mmap.mmap(-1, address_bytes(1), flags=flags)
            self.memory = np.frombuffer(self._mapping, np.uint8)
            self._mapping.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does for large arrays

    def commit(self, start: int, end: int) -> None:
        """Nothing to do: pages come with the first access."""

    def discard(self, start: int, end: int) -> None:
        """Give the pages of [start, end) back to the system."""
        self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


class SampleMemory:
    """Gives out memory for samples, from any thread; leases may end anywhere."""

    def __init__(self, shared: SharedArena | None = None) -> None:
        """`shared`: where to lie, behind its middle."""
        self._is_shared = shared is not None
        self._arena = PrivateArena() if shared is None else shared
        begin, end = 0 if shared is None else shared.middle, len(self._arena.memory)
        self._size = end - begin
        self._free = AddressRanges([begin, end])
        self._bare = AddressRanges([begin, end])  # the free ranges that have no memory
        self._most_live = 0.0  # bytes in use, lately
        self._ended: SimpleQueue[tuple[int, int, Bytes]] = SimpleQueue()
        self._leases: dict[int, tuple[int, ref[Lease]]] = {}  # begin -> end, lease
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Bytes:
        """`num_bytes` of memory, uninitialised, kept as long as an array or tensor over it lives."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock, suppress(OSError):  # where even the system's memory is short, `np.empty` says so
            self._collect()
            begin = self._free.first_fit(size)
            if begin is not None:
                end = begin + size
                for low, high in self._bare.within(begin, end):
                    self._arena.commit(low, high)
                self._free.remove(begin, end)
                self._bare.remove(begin, end)
                self._give_back()
                memory = self._arena.memory[begin : begin + num_bytes]
                lease = Lease((begin, end, memory), self._ended, memory.__array_interface__)
                self._leases[begin] = (end, ref(lease))
                return np.asarray(lease)
        return np.empty(num_bytes, np.uint8)

    def num_bytes(self) -> tuple[int, int]:
        """Bytes in use, and bytes that have memory."""
        with self._lock:
            self._collect()
            return self._size - self._free.length, self._size - self._bare.length

    def _collect(self) -> None:
        while True:
            try:
                begin, end, _ = self._ended.get_nowait()
            except Empty:
                return
            self._leases.pop(begin, None)
            self._free.add(begin, end)

    def _give_back(self) -> None:
        """Give memory that is not needed back to the system, the last addresses first, because the first ones are used
        most."""
        live = self._size - self._free.length
        self._most_live = max(live, _FORGET * self._most_live)
        surplus = self._size - self._bare.length - int(_MOST_SPARE * self._most_live)
        if surplus <= 0:
            return
        for low, high in reversed(list(self._free.without(self._bare))):
            begin = max(low, high - (surplus // mmap.PAGESIZE + 1) * mmap.PAGESIZE)
            self._arena.discard(begin, high)
            self._bare.add(begin, high)
            surplus -= high - begin
            if surplus <= 0:
                return

    def close(self) -> None:
        """Free all memory that is not in use, and the rest once it is no longer in use. Shared memory is left to the
        other process."""
        if self._is_shared:
            return
        with self._lock:
            for begin, (end, leased) in list(self._leases.items()):
                if (lease := leased()) is not None:
                    lease.__del__ = partial(self._arena.discard, begin, end)
            self._collect()
            for begin, end in self._free.without(self._bare):
                self._arena.discard(begin, end)
            self._size, self._free, self._bare = 0, AddressRanges([]), AddressRanges([])
