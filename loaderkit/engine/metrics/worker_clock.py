"""The clock of one worker: its present state, and its time in each state so far.

Only the worker itself writes to its clock, without a lock. The time by state is kept by the C module, or where there is none by
`PythonStateClock`, whose readers retry while a write is under way (a sequence lock).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import get_ident
from time import thread_time
from typing import TYPE_CHECKING, NamedTuple, Self

from loaderkit import native
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.slow_samples import SlowItems
from loaderkit.engine.metrics.trace import Entry, Item
from loaderkit.engine.work import Chunk

Clock = Callable[[], float]

_RING_LENGTH = 256
# A hand-off, not a wait. A shorter interval counts as computing unasked, since reading the CPU clock is a system call.
MOMENT_S = 50e-6
_LOOK_S = 1e-3  # reading a thread's run delay from the kernel takes 5 us: only done if it was off the CPU for longer
# An entry is written in microseconds; a reader gives up after 50 attempts, since an interrupted writer may never finish.
_MAX_READS = 50
_PAUSE_S = 1e-4


class WorkerStates:
    """The numbers of a worker's states: stages 0 .. num_stages - 1, then the states between stages."""

    __slots__ = ("blocked", "idle", "num_stages", "num_states", "starved")

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.starved = num_stages  # waiting for input
        self.blocked = num_stages + 1  # waiting for room downstream
        self.idle = num_stages + 2  # taken out of service
        self.num_states = num_stages + 3


class ClockTotals(NamedTuple):
    """The counters of one stage, summed over workers."""

    num_items: int
    num_bytes: int
    num_failed: int
    cpu_s: float
    delayed_s: float  # ready to run, and no CPU was free
    services: dict[int, int]  # durations of items: number by bucket of a Histogram


@dataclass(slots=True)
class _Running:
    """The totals of one worker while it writes to them."""

    num_items: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    cpu_s: float = 0.0
    delayed_s: float = 0.0
    services: Histogram = field(default_factory=Histogram)


class PythonStateClock:
    """Time by state in seconds, with the interval that is still open; the C module does the same ten times as fast."""

    __slots__ = (
        "_clock",
        "_cpu_clock",
        "_cpu_since",
        "_delayed_since",
        "_is_stale",
        "_marks",
        "_sequence",
        "_slow_items",
        "_stages",
        "_state_s",
        "_thread",
        "item",
        "num_stages",
        "open_state",
        "since_s",
        "trace",
    )

    def __init__(
        self, num_stages: int, num_states: int, clock: Clock, *, first_state: int, since_s: float, slow_items: SlowItems
    ) -> None:
        self._clock = clock
        self._sequence = 0
        self._cpu_since = 0.0
        self._delayed_since = 0.0
        self._is_stale = False
        self._thread = 0  # the thread that was in a stage last, and the clock of its CPU time for others to read
        self._cpu_clock: int | None = None
        self.num_stages = num_stages
        self._state_s = [0.0] * num_states
        self._stages = [_Running() for _ in range(num_stages)]
        self._slow_items = slow_items
        self.open_state = first_state
        self.since_s = since_s
        self._marks: deque[tuple[float, int]] = deque([(since_s, first_state)], maxlen=_RING_LENGTH)
        self.trace: deque[Entry] | None = None  # while the worker is traced
        self.item: Item | None = None  # the item in work, for the trace

    def enter(self, state: int) -> float:
        """End the open interval and begin `state`; returns the time. Only the worker itself may call it."""
        now = self._clock()
        before, since_s = self.open_state, self.since_s
        is_stage = before < self.num_stages
        begins = state < self.num_stages and not is_stage
        is_another = begins and self._is_another_thread()
        cpu_now = self._cpu_since
        if now - since_s < MOMENT_S and not is_another and not (begins and self._is_stale):
            cpu_now += now - since_s
        elif is_stage or begins:
            cpu_now = thread_time()
            self._is_stale = False
        else:  # from one wait to another: the CPU clock is read before the next stage
            self._is_stale = True
        cpu_s = min(max(0.0, cpu_now - self._cpu_since), max(0.0, now - since_s))
        self._marks.append((now, state))  # a call, in which Ctrl-C may be raised: so not in the middle of the entry
        self._sequence += 1
        self._state_s[before] += now - since_s
        if is_stage:
            self._stages[before].cpu_s += cpu_s
        self._cpu_since = cpu_now
        self.open_state = state
        self.since_s = now
        self._sequence += 1
        if self.trace is not None:
            self.trace.append((now, state, self.item if state < self.num_stages else None))
        if is_stage:
            off_cpu_s = now - since_s - cpu_s
            if off_cpu_s > _LOOK_S:
                self._count_delay(self._stages[before], off_cpu_s)
        elif is_another or (begins and now - since_s > _LOOK_S):
            self._delayed_since = native.delayed()
        return now

    def _is_another_thread(self) -> bool:
        """True if another thread was in a stage last; from now on it is the calling one."""
        thread = get_ident()
        if thread == self._thread:
            return False
        self._thread = thread
        # Asked for by the thread itself: with the id of a thread that has ended the C library may crash.
        self._cpu_clock = time.pthread_getcpuclockid(thread)
        return True

    def _count_delay(self, totals: _Running, most_s: float) -> None:
        delayed_s = native.delayed()
        totals.delayed_s += min(max(0.0, delayed_s - self._delayed_since), most_s)
        self._delayed_since = delayed_s

    def served(self, stage: int, num_items: int, num_bytes: int, chunk: Chunk | None = None) -> None:
        """Count the items of the open interval, in `stage`: a `chunk`, or without one a whole batch."""
        totals = self._stages[stage]
        totals.num_items += num_items
        totals.num_bytes += num_bytes
        if num_items:
            now = self._clock()
            each_s = (now - self.since_s) / num_items
            totals.services.add(each_s, num_items)
            if chunk is not None and (chunk.slowest is not None or each_s > self._slow_items.least_s[stage]):
                self._slow_items.note(stage, chunk, each_s, now)

    def failed(self, stage: int, count: int) -> None:
        """Count samples that failed in `stage`."""
        self._stages[stage].num_failed += count

    @classmethod
    def summed(cls, clocks: list[Self], now: float) -> tuple[list[float], list[ClockTotals]]:
        """Sums over these clocks: seconds by state up to `now`, with the open interval, and the totals of every stage. Any
        thread may call it."""
        state_s = [sum(column) for column in zip(*(one._read(now) for one in clocks), strict=True)]
        cpu_s = [sum(column) for column in zip(*(one._read_cpu() for one in clocks), strict=True)]
        stages = zip(*(one._stages for one in clocks), strict=True)
        return state_s, [_sum_of(running, cpu_s[number]) for number, running in enumerate(stages)]

    def _read(self, now: float) -> list[float]:
        for _ in range(_MAX_READS):
            sequence = self._sequence
            totals, state, since = list(self._state_s), self.open_state, self.since_s
            if self._is_whole(sequence):
                break
        if since <= now:
            totals[state] += now - since
        else:  # the worker has changed its state since `now`, while the reader waited for the GIL, say
            for later, first, last in self.timeline(now, since):
                totals[later] -= last - first
        return totals

    def _read_cpu(self) -> list[float]:
        for _ in range(_MAX_READS):
            sequence = self._sequence
            cpu_s = [totals.cpu_s for totals in self._stages]
            state, since = self.open_state, self._cpu_since
            open_s = 0.0
            if state < self.num_stages and self._cpu_clock is not None:
                with suppress(OSError):  # the thread has just ended
                    open_s = time.clock_gettime(self._cpu_clock) - since
            if self._is_whole(sequence):
                break
        if open_s > 0:
            cpu_s[state] += open_s
        return cpu_s

    def _is_whole(self, sequence: int) -> bool:
        """True if no entry was written since `sequence` was read; otherwise gives the writer time to finish."""
        is_whole = sequence == self._sequence and sequence % 2 == 0
        if not is_whole:
            time.sleep(_PAUSE_S)
        return is_whole

    def timeline(self, start_s: float, end_s: float) -> list[tuple[int, float, float]]:
        """(state, since, until) of every interval within [start_s, end_s), latest first, as far back as the marks go."""
        intervals = []
        until = end_s
        # From the latest mark back, no further than needed: all 256 marks cost 140 us, and this is called twice a batch.
        for since, state in reversed(self._marks.copy()):
            low, high = max(since, start_s), min(until, end_s)
            if high > low:
                intervals.append((state, low, high))
            if since <= start_s:
                break
            until = since
        return intervals


def _sum_of(stages: Sequence[_Running], cpu_s: float) -> ClockTotals:
    services = Histogram()
    for running in stages:
        services.merge(running.services)
    return ClockTotals(
        sum(running.num_items for running in stages),
        sum(running.num_bytes for running in stages),
        sum(running.num_failed for running in stages),
        cpu_s,
        sum(running.delayed_s for running in stages),
        services.counts,
    )


StateClock = PythonStateClock
if not TYPE_CHECKING and native.HAS_KERNELS:
    StateClock = native.StateClock


class WorkerClock(StateClock):
    """The time of one worker by state, and whether that worker is wanted."""

    __slots__ = ("is_wanted", "slow_items")

    def __init__(
        self,
        states: WorkerStates,
        clock: Clock,
        *,
        first_state: int,
        since_s: float | None = None,
        slow_items: SlowItems | None = None,
    ) -> None:
        """`since_s`: when the clock begins; default: now. `slow_items`: shared with the other workers; default: its own."""
        self.is_wanted = True  # False: the worker is taken out of service, since fewer are wanted
        self.slow_items = slow_items or SlowItems(states.num_stages)
        start_s = clock() if since_s is None else since_s
        sizes = (states.num_stages, states.num_states)
        super().__init__(*sizes, clock, first_state=first_state, since_s=start_s, slow_items=self.slow_items)
