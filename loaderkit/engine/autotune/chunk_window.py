"""Measures a pool's chunks: the time of each, the sums of a window, and how long workers overlapped."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import sub
from statistics import median
from typing import NamedTuple

from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock

NUM_CHUNKS = 12  # by which a way of working is judged
# The shortest window of short chunks: a thread keeps the GIL for 5 ms, and may finish twenty of them meanwhile.
LEAST_S = 0.05
# It also lasts for ten of its longest chunks, since one in a hundred may have waited for a disk.
_NUM_LONGEST, _MOST_S = 10, 0.5


class Started(NamedTuple):
    """A chunk that a worker has begun, and what its clocks showed then."""

    worker_clock: WorkerClock
    stages_s: Sequence[float]
    since_s: float
    cpu_s: float
    delayed_s: float


class ChunkTimes(NamedTuple):
    """The time that one chunk took its worker."""

    seconds: float
    # Without the time that the thread was ready to run with no CPU free: one worker alone would be no better off then.
    undelayed_s: float
    cpu_s: float
    stages_s: Sequence[float]  # undelayed, by stage


class ChunkMeter:
    """Reads the clocks of the calling worker before and after a chunk."""

    def __init__(self, clock: Clock, cpu_clock: Clock, delay_clock: Clock) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._delay_clock = delay_clock

    def start(self, worker_clock: WorkerClock) -> Started:
        """The worker begins with a chunk."""
        stages_s = self._stages_s(worker_clock)
        return Started(worker_clock, stages_s, self._clock(), self._cpu_clock(), self._delay_clock())

    def stop(self, started: Started) -> ChunkTimes:
        """The worker is done with it."""
        cpu_s, delayed_s = self._cpu_clock() - started.cpu_s, self._delay_clock() - started.delayed_s
        seconds = max(self._clock() - started.since_s, 1e-9)
        stages_s = list(map(sub, self._stages_s(started.worker_clock), started.stages_s))
        return ChunkTimes(seconds, max(seconds - delayed_s, cpu_s, 1e-9), cpu_s, stages_s)

    def _stages_s(self, worker_clock: WorkerClock) -> list[float]:
        """Undelayed seconds that this worker has spent in each stage so far."""
        states_s, totals = worker_clock.summed([worker_clock], self._clock())
        return [seconds - delayed_s for seconds, (_, _, _, _, delayed_s, _) in zip(states_s, totals, strict=False)]


@dataclass
class ChunkWindow:
    """The chunks by which one way of working is judged, begun at `begin_s` or later.

    Long chunks are judged by medians: a chunk during which the whole process stood still says nothing. Short ones are judged
    by sums: one in twenty may have waited for the GIL longer than all others took.
    """

    begin_s: float
    longest_s: float = 0.0  # chunk, also in the window that this one is compared with
    first_s: float = 0.0  # when the first chunk was begun
    num_samples: int = 0
    seconds: float = 0.0
    undelayed_s: float = 0.0
    cpu_s: float = 0.0
    stages_s: Sequence[float] = ()
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_CHUNKS))  # samples/s of the pool
    undelayed_speeds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_CHUNKS))  # samples/s of the worker
    cpu_shares: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_CHUNKS))

    def __len__(self) -> int:
        return len(self.speeds)

    def add(self, times: ChunkTimes, since_s: float, num_samples: int, num_inside: float) -> None:
        """Add a chunk that was begun at `since_s`, with `num_inside` workers side by side."""
        if not self.speeds:
            self.first_s = since_s
        self.longest_s = max(self.longest_s, times.seconds)
        self.num_samples += num_samples
        self.seconds += times.seconds
        self.undelayed_s += times.undelayed_s
        self.cpu_s += times.cpu_s
        self.stages_s = [sum(pair) for pair in zip_longest(self.stages_s, times.stages_s, fillvalue=0.0)]
        self.speeds.append(num_inside * num_samples / times.seconds)
        self.undelayed_speeds.append(num_samples / times.undelayed_s)
        self.cpu_shares.append(times.cpu_s / times.undelayed_s)

    def speed(self, by_sums: bool) -> float:
        """Samples/s of the pool; by sums only while one worker works alone."""
        return self.num_samples / self.seconds if by_sums else median(self.speeds)

    def undelayed_speed(self, by_sums: bool) -> float:
        """Samples/s of one worker, if it always had a CPU."""
        return self.num_samples / self.undelayed_s if by_sums else median(self.undelayed_speeds)

    def cpu_share(self, by_sums: bool) -> float:
        """Of the time in which a worker could have had a CPU, the share that it spent on one."""
        return self.cpu_s / self.undelayed_s if by_sums else median(self.cpu_shares)

    def sample_stages_s(self) -> list[float]:
        """Undelayed seconds that a sample took in each stage."""
        return [seconds / self.num_samples for seconds in self.stages_s]

    def is_long_enough(self, now: float) -> bool:
        """True if a window of short chunks has lasted long enough to be typical."""
        return now - self.first_s >= max(LEAST_S, min(_NUM_LONGEST * self.longest_s, _MOST_S))


@dataclass
class Overlap:
    """How long two workers or more have been inside a chunk at once, and what they got done in that time.

    This is not the sum of what each worker does at its own speed: where workers share a lock, one may take it many
    times while another waits.
    """

    num_inside: int = 0
    seconds: float = 0.0
    _num_samples: float = 0.0  # since the last restart
    _since_s: float = 0.0  # `seconds` at the last restart
    _worker_s: float = 0.0  # since the last restart: the seconds times the workers inside
    _ticked_s: float = 0.0

    def tick(self, now: float) -> None:
        """Count the time up to now; to be called before `num_inside` changes."""
        if self.num_inside > 1:
            self.seconds += now - self._ticked_s
            self._worker_s += self.num_inside * (now - self._ticked_s)
        self._ticked_s = now

    def add(self, num_samples: int, seconds: float, overlap_since_s: float) -> None:
        """A chunk of `seconds` ends that was begun when `self.seconds` was `overlap_since_s`."""
        self._num_samples += num_samples * (self.seconds - max(overlap_since_s, self._since_s)) / seconds

    def restart(self) -> None:
        """Start counting from 0."""
        self._num_samples, self._since_s, self._worker_s = 0.0, self.seconds, 0.0

    @property
    def speed(self) -> float:
        """Samples/s that the workers finished while they overlapped."""
        return self._num_samples / max(self.seconds - self._since_s, 1e-9)

    @property
    def mean_inside(self) -> float | None:
        """The workers that were inside on average while they overlapped; None if they never did."""
        seconds = self.seconds - self._since_s
        return self._worker_s / seconds if seconds > 0 else None
