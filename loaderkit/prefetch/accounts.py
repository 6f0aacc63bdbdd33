"""One worker's account of its time: what it is doing now, and how long it has done what.

A worker writes its own account and nobody else's, without a lock; readers retry while a write is under way (a sequence
lock). An account entry costs about a microsecond.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time

Clock = Callable[[], float]

_RING_LENGTH = 256
_BUCKETS_PER_OCTAVE = 4
_NUM_BUCKETS = 40 * _BUCKETS_PER_OCTAVE  # from 1 ns to a quarter of an hour


class States:
    """The numbers of an account's states: stages 0 .. num_stages - 1, then what a worker does between them."""

    __slots__ = ("blocked", "idle", "num_stages", "num_states", "starved")

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.starved = num_stages  # waiting for input
        self.blocked = num_stages + 1  # waiting for room downstream
        self.idle = num_stages + 2  # not wanted
        self.num_states = num_stages + 3


class Histogram:
    """Durations in buckets a quarter of an octave wide: any percentile within 10 %, in bounded memory."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self.counts = counts or {}  # by bucket; most are empty, and 64 workers have 64 of these for every stage

    def add(self, seconds: float, count: int) -> None:
        bucket = int(math.log2(seconds * 1e9) * _BUCKETS_PER_OCTAVE) if seconds > 1e-9 else 0
        bucket = min(bucket, _NUM_BUCKETS - 1)
        self.counts[bucket] = self.counts.get(bucket, 0) + count

    def copy(self) -> Histogram:
        """As it is now; for any thread."""
        return Histogram(self.counts.copy())

    def plus(self, other: Histogram, sign: int = 1) -> Histogram:
        """Both together, or with `sign` -1 what came since `other`; for any thread."""
        counts = self.counts.copy()  # at once, while its worker may add to it
        for bucket, count in other.counts.copy().items():
            counts[bucket] = counts.get(bucket, 0) + sign * count
        return Histogram(counts)

    def percentile(self, share: float) -> float | None:
        """The duration in seconds below which `share` of all lie; None without any."""
        counts = self.counts.copy()
        total = sum(counts.values())
        if total == 0:
            return None
        reached = 0
        for bucket, count in sorted(counts.items()):
            reached += count
            if reached >= share * total:
                return float(2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE) * 1e-9)
        raise AssertionError("the counts sum to their total")


@dataclass
class StageTotals:
    """What one worker did in one stage."""

    num_items: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    cpu_s: float = 0.0
    services: Histogram = field(default_factory=Histogram)


class Account:
    """One worker's time by state, in seconds, with the interval that is still open."""

    __slots__ = (
        "_clock",
        "_cpu_since",
        "_sequence",
        "is_wanted",
        "marks",
        "num_stages",
        "open_state",
        "since_s",
        "stages",
        "state_s",
    )

    def __init__(self, states: States, clock: Clock, *, first_state: int) -> None:
        self._clock = clock
        self._sequence = 0
        self._cpu_since = 0.0
        self.is_wanted = True  # False: its worker is to rest, since there are to be fewer
        self.num_stages = states.num_stages
        self.state_s = [0.0] * states.num_states
        self.stages = [StageTotals() for _ in range(states.num_stages)]
        self.open_state = first_state
        self.since_s = clock()
        self.marks: deque[tuple[float, int]] = deque([(self.since_s, first_state)], maxlen=_RING_LENGTH)

    def enter(self, state: int) -> float:
        """End what the worker was doing and begin `state`; returns the time. To be called by the worker itself."""
        now = self._clock()
        before = self.open_state
        self._sequence += 1
        self.state_s[before] += now - self.since_s
        self.open_state = state
        self.since_s = now
        self._sequence += 1
        self.marks.append((now, state))
        if before < self.num_stages or state < self.num_stages:
            cpu_now = thread_time()
            if before < self.num_stages:
                self.stages[before].cpu_s += cpu_now - self._cpu_since
            self._cpu_since = cpu_now
        return now

    def served(self, stage: int, num_items: int, num_bytes: int) -> None:
        """Count what the open interval, in `stage`, was spent on."""
        totals = self.stages[stage]
        totals.num_items += num_items
        totals.num_bytes += num_bytes
        if num_items:
            totals.services.add((self._clock() - self.since_s) / num_items, num_items)

    def read(self, now: float) -> list[float]:
        """Seconds by state up to `now`, the open interval included; for any thread."""
        while True:
            sequence = self._sequence
            totals, state, since = list(self.state_s), self.open_state, self.since_s
            if sequence == self._sequence and sequence % 2 == 0:
                totals[state] += max(0.0, now - since)
                return totals

    def timeline(self, start_s: float, end_s: float) -> list[tuple[int, float, float]]:
        """(state, since, until) of what was done within [start_s, end_s), latest first, as far back as the marks go."""
        found = []
        until = end_s
        # From the latest mark back, and no further than needed: all 256 of them cost 140 us, and it is asked twice a batch.
        for since, state in reversed(self.marks.copy()):
            low, high = max(since, start_s), min(until, end_s)
            if high > low:
                found.append((state, low, high))
            if since <= start_s:
                break
            until = since
        return found
