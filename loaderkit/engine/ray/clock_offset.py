"""Converts times of another machine to times of this one.

`time.perf_counter` counts from a machine's boot. Two processes of one boot read the same clock; of another machine the
difference is measured by a round trip, to within half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.trace import Lane
from loaderkit.engine.remote.delivery import Delivered

_NUM_TRIPS = 5


def measure(ask: Callable[[], float], clock: Callable[[], float]) -> tuple[float, float]:
    """The shortest of several round trips, and by it how far the clock that `ask` reads is ahead of `clock`; in s."""
    trips = []
    for _ in range(_NUM_TRIPS):
        begin_s = clock()
        theirs_s = ask()
        end_s = clock()
        trips.append((end_s - begin_s, theirs_s - (begin_s + end_s) / 2))
    return min(trips)


def batch_here(batch: Delivered, offset_s: float) -> Delivered:
    """A batch with its times on this machine's clock. The clock of the batch's maker is `offset_s` ahead of it."""
    if not offset_s:
        return batch
    segments = [
        segment._replace(
            since_s=segment.since_s - offset_s,
            until_s=segment.until_s - offset_s,
            work=tuple((stage, since_s - offset_s, until_s - offset_s) for stage, since_s, until_s in segment.work),
        )
        for segment in batch.segments
    ]
    return replace(batch, done_s=batch.done_s - offset_s, segments=segments)


def stats_here(stats: Snapshot, offset_s: float) -> Snapshot:
    """The same for counters."""
    if not offset_s:
        return stats
    slowest = {stage: table.copy() for stage, table in stats.slowest.items()}
    for table in slowest.values():
        table["at_s"] -= offset_s
    return replace(stats, now_s=stats.now_s - offset_s, slowest=slowest)


def lane_here(lane: Lane, offset_s: float) -> Lane:
    """The same for a page of a trace."""
    if not offset_s:
        return lane
    entries = [(since_s - offset_s, state, item) for since_s, state, item in lane.entries]
    return lane._replace(entries=entries, until_s=lane.until_s - offset_s)
