"""Looks at the accounts four times a second: keeps a time series of them, and lets the tuner act.

    accounts ──stats──> Monitor ──> Series    bounded: when it is full, every second point goes and the next come half as often
                           └──────> Tuner ──> resize

Its thread wants little, so how late it wakes up says how hard it is to get the GIL and a CPU here: the same is true of the
training loop's thread when a batch is ready for it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from loaderkit.errors import ClosedError, ConfigError
from loaderkit.prefetch.accounts import Histogram
from loaderkit.prefetch.stats import Stats
from loaderkit.prefetch.tuner import Move, Tuner

TICK_S = 0.25
_NUM_POINTS = 512
logger = logging.getLogger("loaderkit")


class Series:
    """What the accounts were, from the first moment on, in bounded memory. One writer; `to_list` for any thread."""

    def __init__(self, num_points: int = _NUM_POINTS) -> None:
        self._num_points = num_points
        self._every = 1  # one look in so many is kept
        self._num_looks = 0
        self._points: list[Stats] = []

    def add(self, stats: Stats) -> None:
        """Keep this moment, if it is one of those to be kept."""
        self._num_looks += 1
        if self._points and self._points[-1].run != stats.run:
            self._points = []
        if (self._num_looks - 1) % self._every:
            return
        points = [*self._points, stats.without_histograms()]
        if len(points) > self._num_points:
            points = points[::2]
            self._every *= 2
        self._points = points

    def to_list(self) -> list[dict[str, Any]]:
        """One entry for every stretch between two moments, in order: JSON values, described in docs/guide.md."""
        points = self._points
        return [later.since(earlier).to_point() for earlier, later in itertools.pairwise(points)]


class Monitor:
    """The thread. `read` gives the accounts, `turn` does what the tuner wants."""

    def __init__(
        self, read: Callable[[], Stats], series: Series, tuner: Tuner | None, turn: Callable[[Move], None]
    ) -> None:
        self._read = read
        self._series = series
        self._tuner = tuner
        self._turn = turn
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.lateness = Histogram()

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="loaderkit-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; from any thread, and without waiting for locks that somebody else may hold."""
        self._end.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        before_s = time.perf_counter()
        while not self._end.wait(TICK_S):
            now_s = time.perf_counter()
            self.lateness.add(max(0.0, now_s - before_s - TICK_S), 1)
            try:
                self.look()
            except ClosedError:
                return
            before_s = time.perf_counter()

    def look(self) -> None:
        """Once."""
        stats = self._read()
        self._series.add(stats)
        move = self._tuner.look(stats) if self._tuner is not None else None
        if move is not None:
            try:
                self._turn(move)
            except ConfigError as error:  # the memory does not hold it, say: it stays as it is
                logger.warning("the tuner could not set %s to %d: %s", move.knob.name, move.value, error)
