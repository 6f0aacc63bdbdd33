"""Reads ahead from a slow store, by many concurrent requests, and holds the bytes until they are read.

    forecast ──> slices, by first need ──> threads: one `read_into` each ──> held in memory ──> read_into: copied out
                                           within `memory_bytes`                                └─> after its last: dropped

A slice may be a block of an archive that a hundred samples are read from, or one file. A range outside all slices is read
directly from the store, so correctness never depends on the forecast.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from loaderkit.connectors.base import Connector, ConnectorLayer, ObjectInfo, ObjectWriter, Writes
from loaderkit.connectors.layers.held_slices import HeldSlice, HeldSlices, SliceDropped
from loaderkit.connectors.ranges import RangeSlice
from loaderkit.connectors.writing import WriterLayer, WritesLayer
from loaderkit.errors import ChecksumError, ClosedError, ConnectorError, ShortReadError

logger = logging.getLogger("loaderkit")
# In a class with a method `list` that name means the method.
_Threads = list[threading.Thread]
_NUM_PLANNED = 256  # slices at a time
_JOIN_S = 2.0
_LARGE_BYTES = 256 << 10


class ReadAheadConnector(ConnectorLayer):
    """`inner`, read ahead along `slices`. This function gives the slices needed from (epoch, position) on, in the order
    of first need.

    At most `memory_bytes` are held or being fetched; a slice of more than half of that is not read ahead. The
    `num_requests` threads start with the first read. Any number of threads may read.
    """

    def __init__(
        self,
        inner: Connector,
        slices: Callable[[int, int], Iterator[RangeSlice]],
        *,
        memory_bytes: int,
        num_requests: int,
        num_samples: int = 4096,
        slack: int = 4096,
    ) -> None:
        """`num_samples` is how far ahead of the furthest read to fetch, `slack` by how many samples reads may be out of
        order."""
        super().__init__(inner)
        self._num_samples = num_samples
        self._slack = slack
        self._slices_from = slices
        self._most_bytes = memory_bytes // 2
        self._num_requests = num_requests
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held = HeldSlices(memory_bytes, self._changed.notify_all)
        self._position = (0, 0)
        self._generation = 0
        self._slices: Iterator[RangeSlice] | None = None
        self._deferred: RangeSlice | None = None  # the first slice that is too far ahead
        self._has_plan = threading.Event()  # also set if there can be no plan
        self._is_planning = False
        self._planned: deque[HeldSlice] = deque()
        self._urgent: deque[HeldSlice] = deque()  # a reader waits for them; their memory is reserved
        self._reached = 0  # the furthest sample whose bytes were read
        self._threads: _Threads = []
        self._surplus: _Threads = []  # those that are too many end after their fetch
        self._is_stopped = True  # no thread runs
        self._is_ended = False  # after `stop`, until `seek`
        self._over_read_bytes = self._ahead_bytes = self._direct_bytes = self._num_direct = 0
        self._wait_s = 0.0
        self._num_waiting, self._counted_s = 0, 0.0  # readers that wait now, and until when their waits are counted

    # --------------------------------------------------------------------------------------------------- the contract

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        held = self._claim(key, start, len(buffer), etag)
        if held is None or not self._take(held, start, buffer):
            with self._lock:
                self._num_direct += 1
                self._direct_bytes += len(buffer)
            self.inner.read_into(key, start, buffer, etag=etag)

    def writes(self) -> Writes | None:
        """The writing side of `inner`; bytes of an object that were read ahead are forgotten when the object is written."""
        inner = super().writes()
        return inner and _ForgettingWrites(inner, self._forget)

    def counters(self) -> dict[str, float]:
        """The counters of `inner`, and the counters of reading ahead."""
        counts = super().counters()
        with self._lock:
            self._count_waits(0)
        counts["over_read_bytes"] = counts.get("over_read_bytes", 0) + self._over_read_bytes
        return counts | {
            "ahead_bytes": self._ahead_bytes,
            "ahead_wait_s": self._wait_s,
            "held_bytes": self._held.held_bytes,
            "num_direct_reads": self._num_direct,
            "direct_bytes": self._direct_bytes,
        }

    def seek(self, epoch: int, position: int) -> None:
        """Drop what was fetched, and continue from another position."""
        with self._lock:
            self._drop_all(SliceDropped())
            self._is_ended = False
            self._has_plan.clear()
            self._position = (epoch, position)
            self._changed.notify_all()

    def resize(self, *, memory_bytes: int, num_requests: int) -> None:
        """Set how many bytes are held and how many requests run at once; bytes that are held and requests that run stay."""
        with self._lock:
            self._most_bytes = memory_bytes // 2
            self._held.resize(memory_bytes)
            self._num_requests = num_requests
            self._surplus = [thread for thread in self._surplus if thread.is_alive()] + self._threads[num_requests:]
            del self._threads[num_requests:]
            if not self._is_stopped:
                with suppress(RuntimeError):  # the system has no more threads: those that run do it
                    self._start_missing()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the threads and drop what they fetched. Idempotent. Reads raise ClosedError until `seek`, so workers end."""
        with self._lock:
            self._is_stopped = self._is_ended = True
            self._drop_all(ClosedError("reading ahead was stopped"))
            self._has_plan.set()
            threads, self._threads, self._surplus = [*self._threads, *self._surplus], [], []
            self._changed.notify_all()
        deadline_s = time.perf_counter() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.perf_counter()))

    def close(self) -> None:
        """Stop, and close `inner`."""
        self.stop()
        self.inner.close()

    # ----------------------------------------------------------------------------------------------------- the readers

    def _claim(self, key: str, start: int, num_bytes: int, etag: str | None) -> HeldSlice | None:
        """The slice that holds these bytes or will; None if they are to be read directly."""
        if not num_bytes:
            return None
        if not self._has_plan.is_set():  # the first reads wait for the plan that may contain them
            with self._lock:
                self._start()
            self._wait(self._has_plan)
        with self._lock:
            self._start()
            held = self._held.find(key, start, num_bytes, etag)
            if held is None:
                return None
            if held.slice.first > self._reached:
                self._reached = held.slice.first
                self._changed.notify()
            held.left_bytes -= num_bytes
            if not held.is_begun and not self._begin_now(held, num_bytes):
                return None
            held.num_readers += 1
            return held

    def _wait(self, event: threading.Event) -> None:
        """Wait for the fetching threads. The worker stays in its stage, so its clock counts the wait as part of the
        read; `ahead_wait_s` says how long such waits took."""
        with self._lock:
            self._count_waits(1)
        try:
            event.wait()
        finally:
            with self._lock:
                self._count_waits(-1)

    def _count_waits(self, num_more: int) -> None:
        """Count the waits up to now, also waits that have not ended. `num_more` readers begin to wait. Under the lock."""
        now = time.perf_counter()
        self._wait_s += self._num_waiting * (now - self._counted_s)
        self._num_waiting, self._counted_s = self._num_waiting + num_more, now

    def _begin_now(self, held: HeldSlice, num_bytes: int) -> bool:
        """Fetch a planned slice next, as a reader needs it, if there is room and half of it is still unread. Under the lock."""
        is_worth_it = 2 * (held.left_bytes + num_bytes) >= held.slice.wanted_bytes
        if is_worth_it and self._held.has_room(held.slice.length):
            # Its memory is reserved now, as the reader could deadlock on memory that another slice took.
            self._planned.remove(held)
            self._held.reserve(held)
            self._urgent.append(held)
            self._changed.notify()
            return True
        if not is_worth_it:  # most of it was read directly, so the rest will be too
            self._planned.remove(held)
            self._held.drop(held)
        return False

    def _take(self, held: HeldSlice, start: int, buffer: memoryview) -> bool:
        """Copy from a slice once it is fetched; False if it will not be."""
        try:
            if held.data is None and held.error is None:
                with self._lock:
                    if held.data is None and held.error is None and held.ready is None:
                        held.ready = threading.Event()
                if held.ready is not None:
                    self._wait(held.ready)
            data, error = held.data, held.error
            if data is not None:
                begin = start - held.slice.start
                _copy(data[begin : begin + len(buffer)], buffer)
                return True
            # An error of one part of the slice may not concern this part.
            if error is None or isinstance(error, (ShortReadError, ChecksumError, SliceDropped)):
                return False
            # A copy, since another reader may raise it at the same time.
            raise type(error)(*error.args) if isinstance(error, ConnectorError) else error
        finally:
            with self._lock:
                held.num_readers -= 1
                self._held.drop_if_read(held)
                self._held.drop_passed(self._reached - self._slack)

    # ----------------------------------------------------------------------------------------------------- the fetchers

    def _start(self) -> None:
        """Start the threads, unless they run. Under the lock. Raises ClosedError after `stop`."""
        if self._is_ended:
            raise ClosedError("reading ahead was stopped")
        if not self._is_stopped:
            return
        self._is_stopped = False
        self._has_plan.clear()
        self._start_missing()

    def _start_missing(self) -> None:
        for number in range(len(self._threads), self._num_requests):
            name = f"loaderkit-ahead-{number}"
            thread = threading.Thread(target=self._work, args=(self._threads, number), name=name, daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except BaseException:  # the system has no more threads, or Ctrl-C
                if thread.ident is None:
                    self._threads.remove(thread)
                self._is_stopped = not self._threads
                raise

    def _work(self, mine: _Threads, number: int) -> None:
        while True:
            held = self._next(mine, number)
            if held is None:
                return
            self._fetch(held)
            del held

    def _next(self, mine: _Threads, number: int) -> HeldSlice | None:
        """The slice to fetch next, once there is room for it; None when this thread is to end."""
        with self._lock:
            while not self._is_stopped and mine is self._threads and number < len(mine):
                if self._urgent:
                    return self._urgent.popleft()
                if self._planned:
                    if self._held.has_room(self._planned[0].slice.length):
                        held = self._planned.popleft()
                        self._held.reserve(held)
                        return held
                elif not self._is_planning and self._plan():
                    continue
                self._changed.wait()
            return None

    def _plan(self) -> bool:
        """Plan further ahead, with the lock released meanwhile; False at the end. Under the lock."""
        generation = self._generation
        if self._slices is None:
            self._slices = self._slices_from(*self._position)
        slices, limit = self._slices, self._reached + self._num_samples
        upcoming = [] if self._deferred is None else [self._deferred]
        if upcoming and upcoming[0].first > limit:
            return False
        self._deferred = None
        self._is_planning = True
        self._changed.release()
        try:
            for range_slice in slices:
                upcoming.append(range_slice)
                if len(upcoming) >= _NUM_PLANNED or range_slice.first > limit:
                    break
        except Exception:  # then nothing is read ahead, and the readers raise the same error
            logger.exception("reading ahead has stopped after an error; samples are read one by one")
        finally:
            self._changed.acquire()
            self._is_planning = False
        if generation != self._generation:
            return True
        self._has_plan.set()
        if upcoming and upcoming[-1].first > limit:
            self._deferred = upcoming.pop()
        self._planned.extend(
            self._held.add(range_slice) for range_slice in upcoming if range_slice.length <= self._most_bytes
        )
        self._changed.notify_all()
        return bool(upcoming)

    def _fetch(self, held: HeldSlice) -> None:
        range_slice = held.slice
        error: BaseException | None = None
        data: memoryview | None = None
        try:
            data = self._held.allocate(range_slice.length)
            self.inner.read_into(range_slice.key, range_slice.start, data, etag=range_slice.etag)
        except BaseException as raised:
            error = raised.with_traceback(None)
        with self._lock:
            if held in self._held:
                held.data, held.error = (data, None) if error is None else (None, error)
                if error is None:
                    self._ahead_bytes += range_slice.length
                    self._over_read_bytes += max(0, range_slice.length - range_slice.wanted_bytes)
                self._held.drop_if_read(held)
            if held.ready is not None:
                held.ready.set()

    def _forget(self, prefix: str) -> None:
        """Forget the slices of all objects whose key starts with `prefix`."""
        with self._lock:
            for held in self._held.forget(prefix, SliceDropped()):
                if held in self._planned:
                    self._planned.remove(held)

    def _drop_all(self, error: Exception) -> None:
        """Drop all slices; readers that wait for one get `error`. Under the lock."""
        self._generation += 1
        self._slices = self._deferred = None
        self._planned.clear()
        self._urgent.clear()
        self._held.clear(error)
        self._reached = 0


class _ForgettingWrites(WritesLayer):
    """`inner`; after each change `forget` is called with a prefix of the changed keys."""

    def __init__(self, inner: Writes, forget: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._forget = forget

    def create(self, key: str, size: int) -> ObjectWriter:
        return _ForgettingWriter(self.inner.create(key, size), lambda: self._forget(key))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        info = self.inner.put(key, data)
        self._forget(key)
        return info

    def delete(self, key: str) -> None:
        self.inner.delete(key)
        self._forget(key)

    def rename(self, prefix: str, new_prefix: str) -> bool:
        is_renamed = self.inner.rename(prefix, new_prefix)
        for changed in (prefix, new_prefix):
            self._forget(changed)
        return is_renamed


class _ForgettingWriter(WriterLayer):
    """`inner`; `forget` is called after the commit."""

    def __init__(self, inner: ObjectWriter, forget: Callable[[], None]) -> None:
        super().__init__(inner)
        self._forget = forget

    def commit(self) -> ObjectInfo:
        info = self.inner.commit()
        self._forget()
        return info


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < _LARGE_BYTES:
        target[:] = source
    else:  # NumPy releases the GIL
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
