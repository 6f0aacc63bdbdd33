"""Slices of objects in memory, from the time they are planned until their last needed byte is read."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.ranges import RangeSlice

_REUSED_BYTES = 1 << 20  # memory of larger slices is reused, since fresh pages cost as much as the copy
_NUM_REUSED = 8
_NUM_CANDIDATES = 8


class HeldSlice:
    """One slice: planned, being fetched, held, or failed."""

    __slots__ = ("data", "error", "is_begun", "left_bytes", "num_readers", "ready", "slice")

    def __init__(self, range_slice: RangeSlice) -> None:
        self.slice = range_slice
        self.is_begun = False
        self.ready: threading.Event | None = None  # created by the first reader that waits
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.left_bytes = range_slice.wanted_bytes  # needed and not read yet
        self.num_readers = 0  # readers that copy from it or wait for it


class SliceDropped(Exception):  # noqa: N818 - not an error: the reader reads directly
    """Raised for a slice that will not be fetched."""


class HeldSlices:
    """All slices of one ReadAheadConnector, and their memory. Its lock is held around every method but `allocate`."""

    def __init__(self, memory_bytes: int, freed: Callable[[], None]) -> None:
        """`freed` is called whenever memory is freed."""
        self._memory_bytes = memory_bytes
        self._freed = freed
        self.held_bytes = 0  # held or being fetched
        self._by_key: dict[str, list[HeldSlice]] = {}  # by start
        self._in_order: deque[HeldSlice] = deque()  # those begun, by first need
        self._spare: deque[NDArray[np.uint8]] = deque()

    def __contains__(self, held: HeldSlice) -> bool:
        return held in self._by_key.get(held.slice.key, ())

    def add(self, range_slice: RangeSlice) -> HeldSlice:
        """Plan a slice; it takes no memory yet."""
        held = HeldSlice(range_slice)
        insort(self._by_key.setdefault(range_slice.key, []), held, key=_start_of)
        return held

    def find(self, key: str, start: int, num_bytes: int, etag: str | None) -> HeldSlice | None:
        """The slice that has these bytes; if several have them (for two epochs), the one needed first."""
        same_key = self._by_key.get(key)
        if same_key is None:
            return None
        end_index = bisect_right(same_key, start, key=_start_of)
        end = start + num_bytes
        fitting = [
            held
            for held in same_key[max(0, end_index - _NUM_CANDIDATES) : end_index]
            if end <= held.slice.start + held.slice.length and held.slice.etag == etag
        ]
        return min(fitting, key=_first_of, default=None)

    def resize(self, memory_bytes: int) -> None:
        """Set how many bytes may be held; bytes that are held stay."""
        self._memory_bytes = memory_bytes

    def has_room(self, num_bytes: int) -> bool:
        """True if a slice of `num_bytes` fits."""
        return self.held_bytes + num_bytes <= self._memory_bytes

    def reserve(self, held: HeldSlice) -> None:
        """Reserve the memory of a slice that will be fetched."""
        held.is_begun = True
        self.held_bytes += held.slice.length
        self._in_order.append(held)

    def allocate(self, num_bytes: int) -> memoryview:
        """Memory for a slice; reused if there is free memory of about that size."""
        for _ in range(len(self._spare)):
            try:
                spare = self._spare.popleft()
            except IndexError:  # another thread took it
                break
            if num_bytes <= len(spare) <= 2 * num_bytes:
                return spare[:num_bytes].data
            self._spare.append(spare)
        return np.empty(num_bytes, np.uint8).data

    def drop_if_read(self, held: HeldSlice) -> None:
        """Drop a slice once all its needed bytes are read."""
        if held.left_bytes <= 0 and not held.num_readers:
            self.drop(held)

    def drop_passed(self, position: int) -> None:
        """Drop slices whose last sample comes before `position`: their samples failed, or were read twice elsewhere."""
        while self._in_order and (self._in_order[0].left_bytes <= 0 or self._in_order[0].slice.last < position):
            if self._in_order[0].num_readers:
                break
            held = self._in_order.popleft()
            if held.left_bytes > 0:
                self.drop(held)

    def drop(self, held: HeldSlice) -> None:
        """Drop a slice and free its memory."""
        same_key = self._by_key.get(held.slice.key, [])
        if held not in same_key:
            return
        same_key.remove(held)
        if not same_key:
            del self._by_key[held.slice.key]
        if held.is_begun:
            self.held_bytes -= held.slice.length
            if held.data is not None and held.slice.length >= _REUSED_BYTES and len(self._spare) < _NUM_REUSED:
                self._spare.append(np.frombuffer(held.data, np.uint8))
            held.data = None
            self._freed()

    def forget(self, prefix: str, error: Exception) -> list[HeldSlice]:
        """Drop the slices of all keys that start with `prefix`; readers that wait for one get `error`. Their memory is not
        reused, as readers may be copying from it."""
        keys = [key for key in self._by_key if key.startswith(prefix)]
        forgotten = [held for key in keys for held in self._by_key.pop(key)]
        for held in forgotten:
            _fail(held, error)
            if held.is_begun:
                self.held_bytes -= held.slice.length
        if forgotten:
            self._freed()
        return forgotten

    def clear(self, error: Exception) -> None:
        """Drop all slices; readers that wait for one get `error`."""
        for same_key in self._by_key.values():
            for held in same_key:
                _fail(held, error)
        self._by_key.clear()
        self._in_order.clear()
        self._spare.clear()
        self.held_bytes = 0


def _fail(held: HeldSlice, error: Exception) -> None:
    """Give `error` to the readers of a slice that was not fetched yet."""
    if held.data is None and held.error is None:
        held.error = error
        if held.ready is not None:
            held.ready.set()


def _start_of(held: HeldSlice) -> int:
    return held.slice.start


def _first_of(held: HeldSlice) -> int:
    return held.slice.first
