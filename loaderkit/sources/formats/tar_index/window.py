"""A window on an object that moves forward and adapts its read size to the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.connectors.base import Connector, ObjectInfo

_SMALL_BYTES = 4 << 10
_LEAST_WINDOW_BYTES = 256 << 10
_MOST_WINDOW_BYTES = 4 << 20
_MOST_CACHED_BYTES = 512 << 10
_MOST_BREAK_EVEN_BYTES = 8 << 20
_MEMORY_S = 1e-4
# A first request this fast is dominated by warm-up, so a second one is measured.
_WARM_UP_S = 1e-3


class WindowRun(NamedTuple):
    """Regular files in archive order: their names, each ended by a NUL, their offsets and sizes, int64 [n]."""

    names: bytes
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Window:
    """Small ranges of an object, taken in ascending order, served from few reads.

    One read serves many ranges that lie close together; distant ones are read alone. The limit follows from the store: the
    bytes it delivers in the time of one more request (about 70 kB for a file in the page cache, more than 1 MB for S3),
    measured on the reads so far.
    """

    def __init__(self, connector: Connector, info: ObjectInfo, clock: Callable[[], float]) -> None:
        self._connector = connector
        self._info = info
        self._clock = clock
        self._data = bytearray()
        self._start = 0
        self._num_filled = 0
        self._num_taken = 0  # since the last read
        self._num_reads = 0
        self._request_s = float("inf")
        self._byte_s = float("inf")

    def take(self, position: int, num_bytes: int) -> bytearray:
        """A copy of `num_bytes` bytes from `position` on; they must lie inside the object."""
        offset = position - self._start
        if offset < 0 or offset + num_bytes > self._num_filled:
            self._move(position, num_bytes)
            offset = 0
        self._num_taken += 1
        return self._data[offset : offset + num_bytes]

    def plain_files(self, position: int) -> tuple[WindowRun | None, int]:
        """The plain files from the header at `position` on, while the window holds their headers, and the offset of the next
        header; in a hundredth of the time of parsing each."""
        if not self._start <= position < self._start + self._num_filled:
            return None, position
        base = self._start
        names, starts, sizes, after = native.tar_run(
            self._data, position - base, self._num_filled, self._info.size - base
        )
        if not names:
            return None, position
        run = WindowRun(names, np.frombuffer(starts, np.int64) + base, np.frombuffer(sizes, np.int64))
        self._num_taken += len(run.starts)
        return run, after + base

    def rest_after(self, position: int) -> bytearray:
        """The bytes of the window from `position` on."""
        return self._data[max(0, position - self._start) : self._num_filled]

    def _move(self, position: int, num_bytes: int) -> None:
        num_read = max(num_bytes, self._num_bytes_to_read(position))
        num_read = min(num_read, self._info.size - position)
        if num_read > len(self._data):
            self._data = bytearray(num_read)
        before_s = self._clock()
        with memoryview(self._data) as whole, whole[:num_read] as part:
            self._connector.read_into(self._info.key, position, part, etag=self._info.etag)
        self._learn(num_read, self._clock() - before_s)
        self._num_reads += 1
        self._start, self._num_filled, self._num_taken = position, num_read, 0

    def _num_bytes_to_read(self, position: int) -> int:
        if self._info.size <= _LEAST_WINDOW_BYTES:
            return self._info.size
        if self._num_reads == 0 or (self._num_reads == 1 and self._request_s < _WARM_UP_S):
            return _SMALL_BYTES
        break_even = float(_LEAST_WINDOW_BYTES)
        if self._byte_s < float("inf"):
            break_even = min(self._request_s / self._byte_s, _MOST_BREAK_EVEN_BYTES)
        if (position - self._start) / max(1, self._num_taken) > break_even:
            return _SMALL_BYTES
        # At eight times the break-even the request itself costs a ninth. A store with requests this fast is memory, where reads
        # that fit the CPU's cache are faster.
        most = _MOST_CACHED_BYTES if self._request_s < _MEMORY_S else _MOST_WINDOW_BYTES
        return int(min(max(8 * break_even, _LEAST_WINDOW_BYTES), most))

    def _learn(self, num_bytes: int, seconds: float) -> None:
        # The fastest read of each kind was disturbed least.
        if num_bytes <= _SMALL_BYTES:
            self._request_s = min(self._request_s, max(seconds, 1e-9))
        elif self._request_s < float("inf"):
            self._byte_s = min(self._byte_s, max(seconds - self._request_s, 1e-9) / num_bytes)
