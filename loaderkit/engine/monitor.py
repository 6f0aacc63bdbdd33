"""Takes a snapshot four times a second: keeps a time series of them, and lets the tuner act.

    engine ──stats──> Monitor ──> Series           bounded: when it is full, every second point is dropped, and
                         └──────> LiveSettings     from then on half as many are kept
                                   ──> Tuner ──> resize

Its thread does little, so its lateness is the time that a thread waits for the GIL and a CPU, as the training loop's thread
does when a batch is ready.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.errors import ClosedError

TICK_S = 0.25
_NUM_POINTS = 512
logger = logging.getLogger("loaderkit")


class Series:
    """Snapshots from the first moment on, in bounded memory. One writer; `to_list` for any thread."""

    def __init__(self, num_points: int = _NUM_POINTS) -> None:
        self._num_points = num_points
        self._every = 1  # one snapshot in `_every` is kept
        self._num_looks = 0
        self._points: list[Snapshot] = []

    def add(self, stats: Snapshot) -> None:
        """Add a snapshot, if it is to be kept."""
        if self._points and self._points[-1].run != stats.run:
            self._points = []
            self._every, self._num_looks = 1, 0
        self._num_looks += 1
        if (self._num_looks - 1) % self._every:
            return
        points = [*self._points, stats.slimmed()]
        if len(points) > self._num_points:
            points = points[::2]
            self._every *= 2
        self._points = points

    def to_list(self) -> list[dict[str, Any]]:
        """One entry for each interval between two snapshots, in order: JSON values, described in docs/reference.md."""
        points = self._points
        pairs = [(one, other) for one, other in itertools.pairwise(points) if other.now_s > one.now_s]
        return [later.since(earlier).to_point(later.now_s - earlier.now_s) for earlier, later in pairs]


class Monitor:
    """The monitor's thread. `read` gives a snapshot; `act` passes it to the tuner."""

    def __init__(self, read: Callable[[], Snapshot], series: Series, act: Callable[[Snapshot], None]) -> None:
        self._read = read
        self._series = series
        self._act = act
        # Not an Event: its lock could be held when the garbage collector calls `stop`, in this thread or in a fork's child.
        self._end: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ident: int | None = None  # the thread's
        self._has_failed = False
        self.lateness = Histogram()

    def start(self) -> None:
        """Start the thread. Where the system has none, there is no time series and no tuning."""
        thread = threading.Thread(target=self._run, name="loaderkit-monitor", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("loading runs without a tuner and without a time series: %s", error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """End the thread; from any thread, and without waiting for a lock."""
        self._end.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and not self.is_this_thread():
            self._thread.join()

    def is_this_thread(self) -> bool:
        """True in the monitor's own thread."""
        return self._ident == threading.get_ident()

    def _run(self) -> None:
        self._ident = threading.get_ident()  # `start` may not have returned when the first look asks for it
        try:
            while True:
                self._try_to_look()
                begin_s = time.perf_counter()
                if self._is_told_to_end(TICK_S):
                    return
                self.lateness.add(max(0.0, time.perf_counter() - begin_s - TICK_S), 1)
        except ClosedError:
            return

    def _is_told_to_end(self, timeout_s: float) -> bool:
        try:
            self._end.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def _try_to_look(self) -> None:
        try:
            self.look()
        except ClosedError:
            raise
        except Exception:  # the training loop does not depend on it; logged once
            if not self._has_failed:
                logger.warning("the time series and the tuner miss what happens now", exc_info=True)
            self._has_failed = True

    def look(self) -> None:
        """Take one snapshot."""
        stats = replace(self._read(), lateness=self.lateness.copy())
        self._series.add(stats)
        self._act(stats)
