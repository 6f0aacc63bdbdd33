"""A clock to set, what a worker clock says, and the same accounts kept plainly."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.slow_samples import SlowItems
from loaderkit.engine.metrics.trace import Entry, Item
from loaderkit.engine.metrics.worker_clock import ClockTotals, WorkerClock, WorkerStates
from loaderkit.engine.work import Chunk

_NUM_MARKS = 256  # that a worker clock remembers


class HandClock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class PlainClock:
    """A worker's accounts, made from a list of all that happened; of CPU time it knows nothing."""

    def __init__(self, states: WorkerStates, clock: HandClock, *, first_state: int) -> None:
        self._states, self._clock = states, clock
        self._marks = [(clock(), first_state)]
        self._totals = [(0, 0, 0)] * states.num_stages
        self._services = [Histogram() for _ in range(states.num_stages)]
        self.slow_items = SlowItems(states.num_stages)
        self.trace: deque[Entry] = deque()
        self.item: Item | None = None

    @property
    def since_s(self) -> float:
        return self._marks[-1][0]

    @property
    def open_state(self) -> int:
        return self._marks[-1][1]

    def enter(self, state: int) -> float:
        self._marks.append((self._clock(), state))
        self.trace.append((*self._marks[-1], self.item if state < self._states.num_stages else None))
        return self.since_s

    def served(self, stage: int, num_items: int, num_bytes: int, chunk: Chunk) -> None:
        items, size, failed = self._totals[stage]
        self._totals[stage] = items + num_items, size + num_bytes, failed
        if num_items:
            each_s = (self._clock() - self.since_s) / num_items
            slowest_s = min(max(each_s, chunk.slowest[0] if chunk.slowest else 0.0), each_s * num_items)
            self._services[stage].add(slowest_s, 1)
            if num_items > 1:
                self._services[stage].add((each_s * num_items - slowest_s) / (num_items - 1), num_items - 1)
            if chunk.slowest is not None or each_s > self.slow_items.least_s[stage]:
                self.slow_items.note(stage, chunk, each_s, self._clock())

    def failed(self, stage: int, count: int) -> None:
        items, size, failed = self._totals[stage]
        self._totals[stage] = items, size, failed + count

    def counted(self) -> list[ClockTotals]:
        rows = zip(self._totals, self._services, strict=True)
        return [ClockTotals(*counts, cpu_s=0.0, delayed_s=0.0, services=of.counts) for counts, of in rows]

    def state_s(self, now: float) -> list[float]:
        found = [0.0] * self._states.num_states
        for (since, state), (until, _) in pairwise(self._marks):
            found[state] += until - since
        found[self.open_state] += max(0.0, now - self.since_s)
        for state, since, until in self.timeline(now, self.since_s):
            found[state] -= until - since
        return found

    def timeline(self, start_s: float, end_s: float) -> list[tuple[int, float, float]]:
        marks = self._marks[-_NUM_MARKS:]
        ends = [since for since, _ in marks[1:]] + [end_s]
        parts = [(state, max(since, start_s), min(end, end_s)) for (since, state), end in zip(marks, ends, strict=True)]
        return [part for part in reversed(parts) if part[2] > part[1]]


def state_s(one: WorkerClock, now: float) -> list[float]:
    """Its seconds by state."""
    return type(one).summed([one], now)[0]


def cpu_s(one: WorkerClock) -> list[float]:
    """Its CPU seconds by stage."""
    return [ClockTotals._make(row).cpu_s for row in type(one).summed([one], 0.0)[1]]
