"""Whose fault a wait of the consumer was.

While the consumer waits, exactly one destination is awaited, and it is complete when its last chunk has landed. So the
wait is cut along that chunk's way: before its destination was opened it is `memory` (no room in the budget) or `start`
(nothing could run yet); in a stage it is that stage's; in a queue for a pool it is charged to what that pool's workers
executed meanwhile; after it had landed it is `wakeup`. The parts sum to the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loaderkit.engine.metrics.trace import Handoff
from loaderkit.engine.metrics.worker_clock import MOMENT_S, Clock, WorkerClock
from loaderkit.native import kernels

START = "start"
MEMORY = "memory"
WAKEUP = "wakeup"

QUEUED = -1
"""The mark of a chunk that begins to wait for the pool numbered QUEUED - mark."""

_ARRIVED = -1_000_000  # ends the marks; no number of a queue


class Waits:
    """The consumer's waits: those that ended, by cause, and since when it has been in one.

    Its thread writes both at once, so that no reader finds a wait twice, or not at all while it is being charged.
    """

    __slots__ = ("_state", "tape")

    def __init__(self) -> None:
        self._state: tuple[dict[str, float], float | None] = ({}, None)
        self.tape: deque[Handoff] | None = None  # while it is recorded

    @property
    def ended_s(self) -> dict[str, float]:
        """Seconds by cause of the waits that ended."""
        return self._state[0]

    @property
    def since_s(self) -> float | None:
        """Since when there is a wait; None: there is none."""
        return self._state[1]

    def begin(self, now: float | None) -> None:
        """A wait begins; None: there is none, or one ended that does not count."""
        self._state = (self._state[0], now)

    def end(self, causes: Mapping[str, float]) -> None:
        """The wait has ended in a batch: its seconds by cause."""
        ended = dict(self._state[0])
        for cause, seconds in causes.items():
            ended[cause] = ended.get(cause, 0.0) + seconds
        self._state = (ended, None)

    def record(self, num_handovers: int) -> None:
        """Keep the last so many waits from now on."""
        self.tape = deque(maxlen=num_handovers)

    def recorded(self) -> list[Handoff]:
        """What was kept; nothing more is."""
        tape, self.tape = self.tape, None
        return [] if tape is None else list(tape.copy())

    def read(self, clock: Clock) -> tuple[dict[str, float], float | None, float]:
        """What ended, since when there is a wait, and a time at which both were so; for any thread."""
        while True:
            state = self._state
            now = clock()
            if state is self._state:
                return dict(state[0]), state[1], now


class Way(NamedTuple):
    """When a destination was opened, what became of its last chunk from when on, and when it was complete (in s)."""

    opened_s: float
    marks: list[tuple[float, int]]
    done_s: float


class WaitFacts(NamedTuple):
    """What the engine knows besides: `pools` are the accounts of each pool's workers."""

    was_short_of_memory: bool
    stage_names: list[str]
    pools: Sequence[Sequence[WorkerClock]]


class WaitSegment(NamedTuple):
    """A part of a destination's way, [since_s, until_s): spent on `cause`, or, where that is None, in a queue for a pool.

    `work` is then what the pool's workers executed meanwhile, (stage, since_s, until_s) each.
    """

    since_s: float
    until_s: float
    cause: str | None
    work: tuple[tuple[str, float, float], ...] = ()


def trace(begin: float, end: float, way: Way, engine: WaitFacts) -> list[WaitSegment]:
    """The way within [begin, end), gapless and in order."""
    found = []
    for since, until, cause, queue in _cuts(begin, end, way, engine):
        work = () if cause is not None else tuple(_work(engine, QUEUED - queue, since, until))
        found.append(WaitSegment(since, until, cause, work))
    return found


def attribute(begin: float, end: float, way: Way, engine: WaitFacts) -> dict[str, float]:
    """Seconds of the wait [begin, end) by cause: the trace, charged to it."""
    if kernels is not None:  # 1 us instead of 4
        first = MEMORY if engine.was_short_of_memory else START
        told: dict[str, float] | None = kernels.attribute(
            begin, end, way.opened_s, way.marks, way.done_s, engine.stage_names, first, WAKEUP
        )
        if told is not None:
            return told
    found: dict[str, float] = {}
    for since, until, cause, queue in _cuts(begin, end, way, engine):
        if cause is not None:
            found[cause] = found.get(cause, 0.0) + until - since
        else:
            work = tuple(_work(engine, QUEUED - queue, since, until))
            for stage, seconds in charge([WaitSegment(since, until, None, work)], since, until).items():
                found[stage] = found.get(stage, 0.0) + seconds
    return found


def _cuts(begin: float, end: float, way: Way, engine: WaitFacts) -> list[tuple[float, float, str | None, int]]:
    """(since, until, cause, queue) of every part of the way; where it was in a queue the cause is None."""
    found: list[tuple[float, float, str | None, int]] = []
    since, queue = min(begin, way.opened_s), 0
    cause: str | None = MEMORY if engine.was_short_of_memory else START
    for until, state in ((way.opened_s, QUEUED), *way.marks, (way.done_s, _ARRIVED), (end, _ARRIVED)):
        following = engine.stage_names[state] if state >= 0 else WAKEUP if state == _ARRIVED else None
        if cause is None and following is None and state == queue:
            continue  # taken out of the queue: it goes into its first stage at once
        low = since if since > begin else begin  # as calls of max and min this takes twice as long
        high = until if until < end else end
        if high > low:
            # A hand-off is charged to where it led: to look at what the workers did takes 10 us a batch.
            found.append((low, high, following if cause is None and until - since < MOMENT_S else cause, queue))
        since, cause, queue = until, following, state
    return found


def _work(engine: WaitFacts, pool: int, since: float, until: float) -> Iterator[tuple[str, float, float]]:
    for worker_clock in engine.pools[pool]:
        for state, first, last in worker_clock.timeline(since, until):
            if state < len(engine.stage_names):
                yield engine.stage_names[state], first, last


def charge(segments: Iterable[WaitSegment], begin: float, end: float) -> dict[str, float]:
    """Seconds of [begin, end) by cause; what no segment covers is not charged."""
    found: dict[str, float] = {}
    for segment in segments:
        since, until = max(segment.since_s, begin), min(segment.until_s, end)
        if until <= since:
            continue
        if segment.cause is not None:
            found[segment.cause] = found.get(segment.cause, 0.0) + until - since
            continue
        executed: dict[str, float] = {}
        for stage, first, last in segment.work:
            seconds = min(last, until) - max(first, since)
            if seconds > 0:
                executed[stage] = executed.get(stage, 0.0) + seconds
        total = sum(executed.values())
        if total <= 0:
            executed, total = {START: 1.0}, 1.0
        for stage, seconds in executed.items():
            found[stage] = found.get(stage, 0.0) + (until - since) * seconds / total
    return found
