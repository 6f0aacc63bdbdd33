"""Charges each wait of the consumer to the stage that caused it.

While the consumer waits, exactly one batch is awaited, and it is complete when its last chunk has landed. So the wait is cut
along that chunk's path: before its batch was opened it is `memory` (no room in the budget) or `start` (nothing could run
yet); in a stage it is that stage's; in a queue for a pool it is charged to what that pool's workers executed meanwhile;
after it had landed it is `wakeup`, or, until it has come from another node, `network`. Where a worker process has died,
the time until another one opens its batch is `worker restart`. The parts sum to the wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loaderkit.engine.metrics.worker_clock import MOMENT_S, WorkerClock

START = "start"
MEMORY = "memory"
WAKEUP = "wakeup"
NETWORK = "network"  # a batch that is complete on another node has not arrived yet
RESTART = "worker restart"  # a worker process that made the batch has died, and another one is not ready yet
EPOCH = "epoch change"  # of a loop that is only watched: its workers end, start, or have nothing ready between epochs
RELEASE = "release"  # not seen by the engine: the report measures how long the loop takes to drop its batches

QUEUED = -1
"""A chunk that waits for pool number n has the mark QUEUED - n."""

_ARRIVED = -1_000_000  # ends the marks; no number of a queue


class ChunkPath(NamedTuple):
    """The path of a batch: when it was opened, when its last chunk entered which state, and when the batch was complete
    (in s)."""

    opened_s: float
    marks: list[tuple[float, int]]
    done_s: float


class WaitFacts(NamedTuple):
    """The engine's state that a charge depends on: `pools` are the clocks of each pool's workers."""

    was_short_of_memory: bool
    stage_names: list[str]
    pools: Sequence[Sequence[WorkerClock]]


class WaitSegment(NamedTuple):
    """A part of a batch's path, [since_s, until_s): spent on `cause` or, if that is None, in a queue for a pool.

    In a queue, `work` is what the pool's workers executed meanwhile, (stage, since_s, until_s) each.
    """

    since_s: float
    until_s: float
    cause: str | None
    work: tuple[tuple[str, float, float], ...] = ()


def segments_of(begin: float, end: float, path: ChunkPath, engine: WaitFacts) -> list[WaitSegment]:
    """The path within [begin, end), gapless and in order."""
    return [
        WaitSegment(since, until, cause, () if cause is not None else _work(engine, QUEUED - queue, since, until))
        for since, until, cause, queue in _cut(begin, end, path, engine)
    ]


def attribute(begin: float, end: float, path: ChunkPath, engine: WaitFacts) -> dict[str, float]:
    """Seconds of the wait [begin, end) by cause."""
    charged: dict[str, float] = {}
    for since, until, cause, queue in _cut(begin, end, path, engine):
        if cause is not None:  # without a segment: 1.4 us a wait instead of 3.4
            charged[cause] = charged.get(cause, 0.0) + until - since
            continue
        work = _work(engine, QUEUED - queue, since, until)
        for stage, seconds in charge([WaitSegment(since, until, None, work)], since, until).items():
            charged[stage] = charged.get(stage, 0.0) + seconds
    return charged


def _cut(begin: float, end: float, path: ChunkPath, engine: WaitFacts) -> list[tuple[float, float, str | None, int]]:
    """(since, until, cause, queue) of every segment of the path; in a queue the cause is None."""
    segments: list[tuple[float, float, str | None, int]] = []
    since, queue = min(begin, path.opened_s), 0
    cause: str | None = MEMORY if engine.was_short_of_memory else START
    for until, state in ((path.opened_s, QUEUED), *path.marks, (path.done_s, _ARRIVED), (end, _ARRIVED)):
        following = engine.stage_names[state] if state >= 0 else WAKEUP if state == _ARRIVED else None
        if cause is None and following is None and state == queue:
            continue  # taken out of the queue: it enters its first stage at once
        low = since if since > begin else begin  # as calls of max and min this takes twice as long
        high = until if until < end else end
        if high > low:
            # A hand-off is charged to the stage it led to: reading the workers' timelines takes 10 us a batch.
            segments.append((low, high, following if cause is None and until - since < MOMENT_S else cause, queue))
        since, cause, queue = until, following, state
    return segments


def _work(engine: WaitFacts, pool: int, since: float, until: float) -> tuple[tuple[str, float, float], ...]:
    stages = engine.stage_names
    clocks = engine.pools[pool]
    timeline = [entry for worker_clock in clocks for entry in worker_clock.timeline(since, until)]
    return tuple((stages[state], first, last) for state, first, last in timeline if state < len(stages))


def charge(segments: Iterable[WaitSegment], begin: float, end: float) -> dict[str, float]:
    """Seconds of [begin, end) by cause; what no segment covers is not charged."""
    charged: dict[str, float] = {}
    for segment in segments:
        since, until = max(segment.since_s, begin), min(segment.until_s, end)
        if until <= since:
            continue
        if segment.cause is not None:
            charged[segment.cause] = charged.get(segment.cause, 0.0) + until - since
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
            charged[stage] = charged.get(stage, 0.0) + (until - since) * seconds / total
    return charged
