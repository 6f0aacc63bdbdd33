"""Counts what the processes that load for a DataLoader use, over all epochs."""

from __future__ import annotations

import time
from dataclasses import replace

from loaderkit._internal.system.processes import ProcessCounters, process_counters, process_started_s, thread_times

_NEW_S = 1.0  # a process that began no longer ago was begun for this epoch


class WorkerProcesses:
    """The counters of the processes that load: of the present ones, and of those that have ended."""

    def __init__(self) -> None:
        self._ended = ProcessCounters()
        self._now: dict[int, tuple[ProcessCounters, ProcessCounters]] = {}  # as they were at first, and last
        self._pin: tuple[int | None, float, float] = (None, 0.0, 0.0)

    def begin(self, pids: tuple[int, ...], pin_thread: int | None) -> None:
        """Other processes, or the same as before, load from now on."""
        if {*pids} == self._now.keys():
            return
        self._ended, self._now = self._without_memory(), {}
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        for pid in pids:
            started_s = process_started_s(pid)
            is_new = started_s is not None and now_s - started_s < _NEW_S
            first = ProcessCounters() if is_new else process_counters(pid) or ProcessCounters()
            self._now[pid] = (first, first)
        self._pin = (pin_thread, 0.0, self._pin[1] + self._pin[2])

    def read(self) -> None:
        """Read the counters. A process that has ended keeps its last ones."""
        for pid, (first, _) in list(self._now.items()):
            counters = process_counters(pid)
            if counters is not None:
                self._now[pid] = (first, counters)
        thread, _, past_s = self._pin
        if thread is not None and (ran_s := thread_times("self", thread)[0]):
            self._pin = (thread, ran_s, past_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of now."""
        return tuple(self._now)

    @property
    def pin_cpu_s(self) -> float:
        """The CPU time of the threads that pin memory."""
        return self._pin[1] + self._pin[2]

    def total(self) -> ProcessCounters:
        """The counters of all, from their beginning, as they were last read."""
        found = self._ended
        for first, last in list(self._now.values()):
            found = found.plus(last.minus(first))
        return found

    def _without_memory(self) -> ProcessCounters:
        return replace(self.total(), rss_bytes=0)
