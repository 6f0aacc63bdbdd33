"""Whose fault a wait of the consumer was.

While the consumer waits, exactly one destination is awaited, and it is complete when its last chunk has landed. So the
wait is cut along that chunk's way: before its destination was opened it is `memory` (no room in the budget) or `start`
(nothing could run yet); in a stage it is that stage's; in a queue for a pool it is charged to what that pool's workers
executed meanwhile; after it had landed it is `wakeup`. The parts sum to the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from loaderkit.prefetch.accounts import Account

START = "start"
MEMORY = "memory"
WAKEUP = "wakeup"

QUEUED = -1
"""The mark of a chunk that begins to wait for the pool numbered QUEUED - mark."""


class Way(NamedTuple):
    """When a destination was opened, what became of its last chunk from when on, and when it was complete (in s)."""

    opened_s: float
    marks: Sequence[tuple[float, int]]
    done_s: float


def attribute(
    begin: float,
    end: float,
    way: Way,
    *,
    was_short_of_memory: bool,
    stage_names: Sequence[str],
    pools: Sequence[Sequence[Account]],
) -> dict[str, float]:
    """Seconds of the wait [begin, end) by cause. `pools` are the accounts of each pool's workers."""
    found: dict[str, float] = {}

    def charge(cause: str, since: float, until: float) -> None:
        seconds = min(until, end) - max(since, begin)
        if seconds > 0:
            found[cause] = found.get(cause, 0.0) + seconds

    def charge_queue(pool: int, since: float, until: float) -> None:
        since, until = max(since, begin), min(until, end)
        if until <= since:
            return
        executed: dict[int, float] = {}
        total = 0.0
        for account in pools[pool]:
            for state, seconds in account.between(since, until).items():
                if state < len(stage_names):
                    executed[state] = executed.get(state, 0.0) + seconds
                    total += seconds
        if total <= 0:
            charge(START, since, until)
        for state, seconds in executed.items():
            name = stage_names[state]
            found[name] = found.get(name, 0.0) + (until - since) * seconds / total

    charge(MEMORY if was_short_of_memory else START, begin, way.opened_s)
    borders = [*way.marks, (way.done_s, QUEUED)]
    charge_queue(0, way.opened_s, borders[0][0])
    for (since, state), (until, _) in pairwise(borders):
        if state <= QUEUED:
            charge_queue(QUEUED - state, since, until)
        else:
            charge(stage_names[state], since, until)
    charge(WAKEUP, way.done_s, end)
    return found
