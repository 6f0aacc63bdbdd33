"""Counters of a loader that never go back: over epochs, seeks, executors that end, and loaders of one name in a row.

stats of a scrape ──> Totals.add ──> points: what ended runs have come to + the highest value of the present one
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from loaderkit.diagnosis.stats import Stats
from loaderkit.metrics.families import Point, causes, counters, outlives_runs

_Key = tuple[str, tuple[str, ...]]


class Totals:
    """May be used by any threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[_Key, float] = {}  # what runs that are over have come to
        self._now: dict[_Key, float] = {}  # the highest value in the present one
        self._stalls: dict[str, float] = {}
        self._last: Stats | None = None

    def begin(self, first: Stats, action: str) -> None:
        """A loader with counters of 0 begins; `first` names its stages."""
        with self._lock:
            self._end_run(())
            self._last = None
            for name, labels, _ in counters(first, action):
                self._now.setdefault((name, labels), 0.0)
            for cause in causes(first):
                self._stalls.setdefault(cause, 0.0)

    def add(self, stats: Stats, action: str) -> None:
        """Add a snapshot; it is ignored if it is older than the last one."""
        with self._lock:
            last = self._last
            if last is None:
                rise = stats
            elif last.run == stats.run:
                if stats.now_s < last.now_s:
                    return
                rise = stats.since(last)
            elif stats.run < last.run:
                return
            else:
                rise = stats
                self._end_run({key for key in self._now if outlives_runs(key[0], stats)})
            self._last = stats
            # What an open wait was charged to may change. Only the rise between snapshots is sure to sum to the time.
            for cause, seconds in rise.stall_s.items():
                self._stalls[cause] = self._stalls.get(cause, 0.0) + seconds
            for name, labels, value in counters(stats, action):
                key = name, labels
                self._now[key] = max(self._now.get(key, 0.0), value)

    def _end_run(self, going_on: Iterable[_Key]) -> None:
        """Add the counters of a run that is over to the ended runs, except for those that continue in the next run."""
        kept = {key: self._now[key] for key in going_on}
        for key, value in self._now.items():
            if key not in kept:
                self._ended[key] = self._ended.get(key, 0.0) + value
        self._now = kept

    def points(self) -> list[Point]:
        """All counters, up to the last snapshot that was added."""
        with self._lock:
            stalls = [Point("stall_seconds", (cause,), seconds) for cause, seconds in self._stalls.items()]
            ended, now = self._ended, self._now
            return stalls + [Point(*key, ended.get(key, 0.0) + now.get(key, 0.0)) for key in {**ended, **now}]
