"""Measures how many CPUs the steps of a watched loop use, so that they can be imitated beside another loader. Takes 1
us a step, and 20 us each 5 ms."""

from __future__ import annotations

import time
from collections.abc import Callable

from loaderkit._internal.system.processes import thread_delayed_s

_DELAYS_S = 0.005  # how often it is read for how long the thread had no CPU: that takes 10 us


class StepCpu:
    """Sums over steps, from `begin` to `end` of each, in the loop's own thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.cpu_s = 0.0  # of all threads of the process
        self._read_s = self._delayed_s = 0.0  # of steps whose delays were read
        self._begin: tuple[float, float, float | None] | None = None
        self._next_s = 0.0

    @property
    def delayed_share(self) -> float:
        """The share of the steps' time in which their thread was ready to run and had no CPU."""
        return self._delayed_s / self._read_s if self._read_s else 0.0

    def begin(self) -> None:
        """The loop has a batch."""
        now_s, delayed_s = self._clock(), None
        if now_s >= self._next_s:
            self._next_s, delayed_s = now_s + _DELAYS_S, thread_delayed_s()
        self._begin = now_s, time.process_time(), delayed_s

    def end(self) -> None:
        """It asks for the next one."""
        if self._begin is None:
            return
        begin_s, begin_cpu_s, delayed_s = self._begin
        self._begin = None
        self.cpu_s += time.process_time() - begin_cpu_s
        if delayed_s is not None:
            self._read_s += self._clock() - begin_s
            self._delayed_s += thread_delayed_s() - delayed_s
