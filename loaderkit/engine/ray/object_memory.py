"""Makes writable arrays over the memory of Ray's object store in which a batch lies.

Ray gives read-only views, as an object may have several readers. A batch has one reader: a batch that is lost is made
again from its position, and never read twice. So it may be changed in place, and no copy is made. The view keeps the
store's buffer, and with it the memory, for as long as a tensor refers to it.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from loaderkit._internal.cuda.device import Device
from loaderkit._internal.cuda.pinned import PinnedMemory
from loaderkit._internal.dtypes import Bytes

_MAPS = Path("/proc/self/maps")


class _View:
    """The base of a writable array over `kept`'s memory."""

    __slots__ = ("__array_interface__", "_kept")

    def __init__(self, kept: Bytes) -> None:
        interface = dict(kept.__array_interface__)
        self._kept = kept
        self.__array_interface__: dict[str, Any] = {**interface, "data": (interface["data"][0], False)}


class ObjectMemory:
    """Opens the memory of objects; for one thread."""

    def __init__(self, pinned_for: Device | None = None) -> None:
        """`pinned_for`: the CUDA device that batches are copied to; they are brought into pinned memory then, if there is
        some."""
        self._pinned = None if pinned_for is None else PinnedMemory(pinned_for)
        self._writable: list[tuple[int, int]] = []  # ranges of addresses that were found writable, in order

    def open(self, memory: Bytes) -> Bytes:
        """The bytes of an object, writable: the same memory, or a copy where it is to be pinned or cannot be written."""
        pinned = None if self._pinned is None else self._pinned.take(memory.nbytes)
        if pinned is not None:
            pinned[:] = memory
            return pinned
        if memory.flags.writeable:
            return memory
        start = memory.__array_interface__["data"][0]
        if not self._is_writable(start, start + memory.nbytes):
            return memory.copy()
        view: Bytes = np.asarray(_View(memory))
        return view

    def _is_writable(self, start: int, end: int) -> bool:
        """True if the process may write to [start, end): whether the object store maps its memory writable is looked up
        once."""
        if not self._covers(start, end):
            self._writable = _writable_ranges()
        return self._covers(start, end)

    def _covers(self, start: int, end: int) -> bool:
        place = bisect_right(self._writable, (start, 1 << 64)) - 1
        return place >= 0 and end <= self._writable[place][1]


def _writable_ranges() -> list[tuple[int, int]]:
    """The ranges of addresses to which this process may write, joined where they touch."""
    ranges: list[tuple[int, int]] = []
    for line in _MAPS.read_text().splitlines():
        span, mode, *_ = line.split(maxsplit=2)
        if "w" not in mode:
            continue
        start, end = (int(text, 16) for text in span.split("-"))
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges
