"""Records what saving checkpoints takes in this process, for the reports on its training loops.

A loop's thread stands still while it waits for the previous save and while it copies its state. The saves that are
written behind the loop are in a list of the last saves, and metrics show the sums of all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_MOST_SAVES = 1024


class Pauses(threading.local):
    """Seconds that this thread has waited for a previous save, and copied states to host memory."""

    waiting_s = 0.0
    staging_s = 0.0


@dataclass(frozen=True)
class SaveRecord:
    """A save that was over at `end_s` of `time.perf_counter`. `stats` are as in `Saving.stats`; `error` is the error
    that it met."""

    step: int
    end_s: float
    stats: Mapping[str, Any]
    error: str | None


@dataclass(frozen=True)
class SaveTotals:
    """The sums over all saves that are over, the pauses of all threads, and which save was committed last, and when."""

    num_committed: int = 0
    num_failed: int = 0
    waiting_s: float = 0.0
    staging_s: float = 0.0
    flush_s: float = 0.0
    num_bytes: int = 0  # at rank 0 of all ranks
    last_step: int | None = None
    last_unix_s: float = 0.0

    def plus(self, record: SaveRecord, unix_s: float) -> SaveTotals:
        """With one more save, which is over at `unix_s`."""
        is_committed, stats = record.error is None, record.stats
        files = [times for files in stats.get("ranks", {}).values() for times in files.values()]
        return replace(
            self,
            num_committed=self.num_committed + is_committed,
            num_failed=self.num_failed + (not is_committed),
            flush_s=self.flush_s + stats.get("flush_s", 0.0),
            num_bytes=self.num_bytes + sum(times.get("num_bytes", 0) for times in files),
            last_step=record.step if is_committed else self.last_step,
            last_unix_s=unix_s if is_committed else self.last_unix_s,
        )


class SaveLog:
    """The pauses of every thread, the last 1,024 saves, and the sums of all."""

    def __init__(self) -> None:
        self.pauses = Pauses()
        self.totals = SaveTotals()
        self._saves: deque[SaveRecord] = deque(maxlen=_MOST_SAVES)
        self._lock = threading.Lock()

    def add(self, record: SaveRecord) -> None:
        """A save is over. Called by any thread."""
        self._saves.append(record)
        with self._lock:
            self.totals = self.totals.plus(record, time.time())

    def add_pause(self, *, waiting_s: float = 0.0, staging_s: float = 0.0) -> None:
        """Add a time for which this thread stood still for a save."""
        self.pauses.waiting_s += waiting_s
        self.pauses.staging_s += staging_s
        with self._lock:
            totals = self.totals
            self.totals = replace(
                totals, waiting_s=totals.waiting_s + waiting_s, staging_s=totals.staging_s + staging_s
            )

    def between(self, begin_s: float, end_s: float) -> list[SaveRecord]:
        """The saves that were over in that time, in order."""
        return [record for record in tuple(self._saves) if begin_s <= record.end_s <= end_s]


SAVES = SaveLog()
