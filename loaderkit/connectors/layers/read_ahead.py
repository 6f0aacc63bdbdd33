"""A slow store's bytes fetched before they are wanted, by many requests at a time, and held until they have been.

    forecast ──> pieces, by first need ──> threads: one `read_into` each ──> held in memory ──> read_into: copied out
                                           as far as `memory_bytes` holds them                   └─> the last of it: dropped

A piece may be a block of an archive that a hundred samples are read from, or one file. What is wanted and is not among the
held pieces is read from the store directly, so correctness never depends on the forecast.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector
from loaderkit.connectors.layers.layer import ConnectorLayer
from loaderkit.connectors.ranges import RangeSlice
from loaderkit.errors import ChecksumError, ClosedError, ConnectorError, ShortReadError

logger = logging.getLogger("loaderkit")
# In a class with a method `list` that name means the method.
_Threads = list[threading.Thread]
_Memories = list[NDArray[np.uint8]]
_Found = list[RangeSlice]
_NUM_PLANNED = 256  # pieces at a time
_JOIN_S = 2.0
_REUSED_BYTES = 1 << 20  # memory of larger pieces is kept for others: fresh pages cost as much as the copy
_NUM_REUSED = 8
_LARGE_BYTES = 256 << 10
_NUM_LOOKED_AT = 8


class _Held:
    """A piece: planned, being fetched, there, or failed."""

    __slots__ = ("data", "error", "is_begun", "left_bytes", "num_readers", "piece", "ready")

    def __init__(self, piece: RangeSlice) -> None:
        self.piece = piece
        self.is_begun = False
        self.ready: threading.Event | None = None  # made for the first who waits
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.left_bytes = piece.wanted_bytes  # until nobody wants it any more
        self.num_readers = 0  # who copy from it just now, or wait for it


class ReadAheadConnector(ConnectorLayer):
    """What `inner` has, read ahead along `pieces`: what is wanted from (epoch, position) on, by first need.

    At most `memory_bytes` are held or on their way; a piece of more than half of that is read when it is wanted. The
    `num_requests` threads begin with the first read. Any number of threads may read.
    """

    def __init__(
        self,
        inner: Connector,
        pieces: Callable[[int, int], Iterator[RangeSlice]],
        *,
        memory_bytes: int,
        num_requests: int,
        num_samples: int = 4096,
        slack: int = 4096,
    ) -> None:
        """`num_samples`: how far is read ahead of the furthest read so far; `slack`: by how many samples reads may be out of
        order."""
        super().__init__(inner)
        self._num_samples = num_samples
        self._slack = slack
        self._pieces_from = pieces
        self._memory_bytes = memory_bytes
        self._num_requests = num_requests
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._place = (0, 0)
        self._generation = 0
        self._pieces: Iterator[RangeSlice] | None = None
        self._beyond: RangeSlice | None = None  # the first that is too far ahead
        self._has_plan = threading.Event()  # something is planned, or there is nothing to plan, or nobody who does
        self._is_planning = False
        self._planned: deque[_Held] = deque()
        self._urgent: deque[_Held] = deque()  # somebody waits for it, and it has its memory
        self._held: dict[str, list[_Held]] = {}  # by object: planned, on their way, and there
        self._in_order: deque[_Held] = deque()  # those begun, by first need
        self._spare: _Memories = []
        self._held_bytes = 0
        self._reached = 0  # the furthest sample that was read for
        self._threads: _Threads = []
        self._is_stopped = True  # no thread runs
        self._is_ended = False  # and none may be started
        self._over_read_bytes = self._ahead_bytes = self._direct_bytes = self._num_direct = 0

    # --------------------------------------------------------------------------------------------------- the contract

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        held = self._claim(key, start, len(buffer), etag)
        if held is None or not self._take(held, start, buffer):
            with self._lock:
                self._num_direct += 1
                self._direct_bytes += len(buffer)
            self.inner.read_into(key, start, buffer, etag=etag)

    def counters(self) -> dict[str, float]:
        """What `inner` counts, and what was read ahead."""
        counts = super().counters()
        counts["over_read_bytes"] = counts.get("over_read_bytes", 0) + self._over_read_bytes
        return counts | {
            "ahead_bytes": self._ahead_bytes,
            "held_bytes": self._held_bytes,
            "num_direct_reads": self._num_direct,
            "direct_bytes": self._direct_bytes,
        }

    def seek(self, epoch: int, position: int) -> None:
        """Forget what was fetched, and go on from another place."""
        with self._lock:
            self._forget()
            self._is_ended = False
            self._has_plan.clear()
            self._place = (epoch, position)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let the threads go and forget what they fetched. Idempotent. Reads are errors until `seek`: they are those of
        workers that are to end."""
        with self._lock:
            self._is_stopped = self._is_ended = True
            self._forget(ClosedError("reading ahead was stopped"))
            self._has_plan.set()
            threads, self._threads = self._threads, []
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S / len(threads))

    def close(self) -> None:
        """Stop, and close `inner`."""
        self.stop()
        self.inner.close()

    # ----------------------------------------------------------------------------------------------------- the readers

    def _claim(self, key: str, start: int, num_bytes: int, etag: str | None) -> _Held | None:
        """The piece that has these bytes, or soon will; None if they are to be read directly."""
        if not num_bytes:
            return None
        if not self._has_plan.is_set():  # the very first reads are worth waiting for the plan they stand in
            with self._lock:
                self._start()
            self._has_plan.wait()
        with self._lock:
            self._start()
            held = self._find(key, start, num_bytes, etag)
            if held is None:
                return None
            if held.piece.first > self._reached:
                self._reached = held.piece.first
                self._changed.notify()
            held.left_bytes -= num_bytes
            if not held.is_begun and not self._begin_now(held, num_bytes):
                return None
            held.num_readers += 1
            return held

    def _find(self, key: str, start: int, num_bytes: int, etag: str | None) -> _Held | None:
        mine = self._held.get(key)
        if mine is None:
            return None
        # Two epochs may want the same piece, and then there are two: the one wanted first is meant.
        place = bisect_right(mine, start, key=_start_of)
        end = start + num_bytes
        fitting = [
            held
            for held in mine[max(0, place - _NUM_LOOKED_AT) : place]
            if end <= held.piece.start + held.piece.length and held.piece.etag == etag
        ]
        return min(fitting, key=_first_of, default=None)

    def _begin_now(self, held: _Held, num_bytes: int) -> bool:
        """A planned piece is wanted already: put it first, if there is room and enough of it is wanted. Under the lock."""
        piece = held.piece
        is_worth_it = 2 * (held.left_bytes + num_bytes) >= piece.wanted_bytes
        if is_worth_it and self._has_room(piece.length):
            # Its room is taken now: were it another's in the end, the reader might wait for memory that nobody frees.
            self._planned.remove(held)
            self._reserve(held)
            self._urgent.append(held)
            self._changed.notify()
            return True
        if not is_worth_it:  # most of it has been read directly: so will be the rest
            self._planned.remove(held)
            self._drop(held)
        return False

    def _take(self, held: _Held, start: int, buffer: memoryview) -> bool:
        """Copy from a piece once it is there; False if it is not going to be."""
        try:
            if held.data is None and held.error is None:
                with self._lock:
                    if held.data is None and held.error is None and held.ready is None:
                        held.ready = threading.Event()
                if held.ready is not None:
                    held.ready.wait()
            data, error = held.data, held.error
            if data is not None:
                begin = start - held.piece.start
                _copy(data[begin : begin + len(buffer)], buffer)
                return True
            # What is wrong with a part of it may be right with the others.
            if error is None or isinstance(error, (ShortReadError, ChecksumError, _Dropped)):
                return False
            # Another reader may raise it at the same time.
            raise type(error)(*error.args) if isinstance(error, ConnectorError) else error
        finally:
            with self._lock:
                held.num_readers -= 1
                if held.left_bytes <= 0 and not held.num_readers:
                    self._drop(held)
                self._drop_passed()

    def _drop_passed(self) -> None:
        """Drop what nobody came for: its samples failed, or were read twice elsewhere. Under the lock."""
        while self._in_order and (
            self._in_order[0].left_bytes <= 0 or self._in_order[0].piece.last + self._slack < self._reached
        ):
            if self._in_order[0].num_readers:
                break
            held = self._in_order.popleft()
            if held.left_bytes > 0:
                self._drop(held)

    def _drop(self, held: _Held) -> None:
        """Nobody wants a piece any more. Under the lock."""
        mine = self._held.get(held.piece.key, [])
        if held not in mine:
            return
        mine.remove(held)
        if not mine:
            del self._held[held.piece.key]
        if held.is_begun:
            self._held_bytes -= held.piece.length
            if held.data is not None and held.piece.length >= _REUSED_BYTES and len(self._spare) < _NUM_REUSED:
                self._spare.append(np.frombuffer(held.data, np.uint8))
            held.data = None
            self._changed.notify_all()

    # ----------------------------------------------------------------------------------------------------- the fetchers

    def _start(self) -> None:
        """Begin to fetch, if that has not begun. Under the lock. Raises ClosedError after `stop`."""
        if self._is_ended:
            raise ClosedError("reading ahead was stopped")
        if not self._is_stopped:
            return
        self._is_stopped = False
        self._has_plan.clear()
        for number in range(self._num_requests):
            name = f"loaderkit-ahead-{number}"
            thread = threading.Thread(target=self._work, args=(self._threads,), name=name, daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except BaseException:  # the system has no more threads, or Ctrl-C
                if thread.ident is None:
                    self._threads.remove(thread)
                self._is_stopped = not self._threads
                raise

    def _work(self, mine: _Threads) -> None:
        while True:
            held = self._next(mine)
            if held is None:
                return
            self._fetch(held)
            del held

    def _next(self, mine: _Threads) -> _Held | None:
        """The piece to fetch next, once there is room for it; None when this thread is to end."""
        with self._lock:
            while not self._is_stopped and mine is self._threads:
                if self._urgent:
                    return self._urgent.popleft()
                if self._planned:
                    if self._has_room(self._planned[0].piece.length):
                        held = self._planned.popleft()
                        self._reserve(held)
                        return held
                elif not self._is_planning and self._plan():
                    continue
                self._changed.wait()
            return None

    def _reserve(self, held: _Held) -> None:
        """A piece is going to be fetched: it takes its memory. Under the lock."""
        held.is_begun = True
        self._held_bytes += held.piece.length
        self._in_order.append(held)

    def _has_room(self, num_bytes: int) -> bool:
        return self._held_bytes + num_bytes <= self._memory_bytes

    def _plan(self) -> bool:
        """Look further ahead, with the lock open meanwhile; False at the end. Under the lock."""
        generation = self._generation
        if self._pieces is None:
            self._pieces = self._pieces_from(*self._place)
        pieces, beyond, limit = self._pieces, self._beyond, self._reached + self._num_samples
        if beyond is not None and beyond.first > limit:
            return False
        self._beyond = None
        self._is_planning = True
        self._changed.release()
        found: _Found = [] if beyond is None else [beyond]
        try:
            for piece in pieces:
                found.append(piece)
                if len(found) >= _NUM_PLANNED or piece.first > limit:
                    break
        except Exception:  # nothing is read ahead then; who reads finds out what is wrong
            logger.exception("reading ahead has stopped; reads go on one by one")
        finally:
            self._changed.acquire()
            self._is_planning = False
        if generation != self._generation:
            return True
        self._has_plan.set()
        if found and found[-1].first > limit:
            self._beyond = found.pop()
        for piece in found:
            if piece.length <= self._memory_bytes // 2:
                held = _Held(piece)
                self._planned.append(held)
                insort(self._held.setdefault(piece.key, []), held, key=_start_of)
        self._changed.notify_all()
        return bool(found)

    def _fetch(self, held: _Held) -> None:
        piece = held.piece
        error: BaseException | None = None
        data: memoryview | None = None
        try:
            data = self._memory(piece.length)
            self.inner.read_into(piece.key, piece.start, data, etag=piece.etag)
        except BaseException as raised:
            error = raised.with_traceback(None)
        with self._lock:
            if held in self._held.get(piece.key, ()):
                held.data, held.error = (data, None) if error is None else (None, error)
                if error is None:
                    self._ahead_bytes += piece.length
                    self._over_read_bytes += max(0, piece.length - piece.wanted_bytes)
                if held.left_bytes <= 0 and not held.num_readers:
                    self._drop(held)
            if held.ready is not None:
                held.ready.set()

    def _memory(self, num_bytes: int) -> memoryview:
        with self._lock:
            for number, spare in enumerate(self._spare):
                if num_bytes <= len(spare) <= 2 * num_bytes:
                    del self._spare[number]
                    return spare[:num_bytes].data
        return np.empty(num_bytes, np.uint8).data

    def _forget(self, error: Exception | None = None) -> None:
        """Drop all pieces; who waits for one gets `error`, or reads by itself. Under the lock."""
        self._generation += 1
        self._pieces = self._beyond = None
        for pieces in self._held.values():
            for held in pieces:
                if held.data is None and held.error is None:
                    held.error = error or _Dropped()
                    if held.ready is not None:
                        held.ready.set()
        self._planned.clear()
        self._urgent.clear()
        self._in_order.clear()
        self._held.clear()
        self._held_bytes = self._reached = 0
        self._spare.clear()


class _Dropped(Exception):  # noqa: N818
    """A piece is not going to come, as nobody wants it any more."""


def _start_of(held: _Held) -> int:
    return held.piece.start


def _first_of(held: _Held) -> int:
    return held.piece.first


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < _LARGE_BYTES:
        target[:] = source
    else:  # NumPy lets go of Python's lock meanwhile
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
