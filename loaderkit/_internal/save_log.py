"""What saving checkpoints takes in this process, for the reports on its training loops.

A loop's thread stands still while it waits for the previous save and copies its state. What is written behind it is in a list
of the last saves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST_SAVES = 1024


class Pauses(threading.local):
    """Seconds that this thread has waited for a previous save, and copied states to host memory."""

    waiting_s = 0.0
    staging_s = 0.0


@dataclass(frozen=True)
class SaveRecord:
    """A save that is over at `end_s` of `time.perf_counter`. `stats` as in `Saving.stats`; `error` what it met."""

    step: int
    end_s: float
    stats: Mapping[str, Any]
    error: str | None


class SaveLog:
    """The pauses of every thread, and the last 1,024 saves."""

    def __init__(self) -> None:
        self.pauses = Pauses()
        self._saves: deque[SaveRecord] = deque(maxlen=_MOST_SAVES)

    def add(self, record: SaveRecord) -> None:
        """A save is over. Called by any thread."""
        self._saves.append(record)

    def between(self, begin_s: float, end_s: float) -> list[SaveRecord]:
        """The saves that were over in that time, in order."""
        return [record for record in tuple(self._saves) if begin_s <= record.end_s <= end_s]


SAVES = SaveLog()
