"""Row groups that are decoded slice by slice, as they are too large to be decoded at once.

What stands before a slice in its row group has to be looked through. So slices that come in order are decoded on from one to
the next, and one that lies before starts at the row group's first row again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from threading import Lock

from loaderkit.sources.arrow.row_groups import Column

_MOST_OPEN = 2  # row groups: pages of all their columns are held
Slices = Iterator[list[Column]]
Begin = Callable[[Callable[[int], None]], Slices]
"""Decodes all slices of a row group, from the first on, and notes the bytes that it reads on the way."""


class SlicedGroups:
    """The last row groups that slices were taken from. Any number of threads."""

    def __init__(self) -> None:
        self._open: OrderedDict[Hashable, _SlicedGroup] = OrderedDict()
        self._lock = Lock()

    def take(self, group: Hashable, number: int, begin: Begin) -> tuple[list[Column], int]:
        """The columns of a slice, and the bytes that were read for it. Raises what `begin` raises."""
        with self._lock:
            found = self._open.setdefault(group, _SlicedGroup(begin))
            self._open.move_to_end(group)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return found.take(number)


class _SlicedGroup:
    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._num_read = 0
        self._slices: Slices = iter(())
        self._number = 0  # of the next slice
        self._is_begun = False
        self._passed: tuple[int, list[Column]] | None = None  # the last one that nobody has asked for yet
        self._lock = Lock()

    def _note(self, num_bytes: int) -> None:
        self._num_read += num_bytes

    def take(self, number: int) -> tuple[list[Column], int]:
        with self._lock:
            if self._passed is not None and self._passed[0] == number:
                passed, self._passed = self._passed[1], None
                return passed, 0
            self._num_read = 0
            if number < self._number or not self._is_begun:
                self._slices, self._number, self._is_begun, self._passed = self._begin(self._note), 0, True, None
            try:
                while True:
                    columns = next(self._slices)
                    self._number += 1
                    if self._number > number:
                        return columns, self._num_read
                    # Of two workers the one with the later slice may come first.
                    self._passed = self._number - 1, columns
            except BaseException:
                self._is_begun = False  # an iterator that has failed gives no more
                raise
