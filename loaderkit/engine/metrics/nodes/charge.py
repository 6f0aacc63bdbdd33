"""Charges waits for complete batches to the workers, if the workers are the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from loaderkit.engine.metrics.stalls import NETWORK, WAKEUP

_BUSY = {NETWORK: 0.75, WAKEUP: 0.9}  # share of their time; workers that are busy for more are the limit


class PoolTime(Protocol):
    """The times of one stage, in s of its pool's workers."""

    name: str
    busy_s: float
    starved_s: float
    blocked_s: float


def charged_to_workers(
    waits_s: Mapping[str, float], pools: Sequence[Sequence[PoolTime]], cause: str
) -> dict[str, float]:
    """The loop's waits by cause: its waits for batches that were complete, but on their way (`NETWORK`, if that is not
    full) or not taken yet (`WAKEUP`), are charged to the stages of the busiest pool, in proportion to their time, if
    its workers had no time to spare. The sum stays.

    Where workers are always busy, the loop would also wait if batches took no time on their way. Where the loop itself
    is the limit, workers run out of work.
    """
    charged = dict(waits_s)
    use = {number: _use(pool) for number, pool in enumerate(pools)}
    busiest = max(use, key=use.__getitem__, default=None)
    if busiest is None or use[busiest] < _BUSY[cause]:
        return charged
    moved_s, rows = charged.pop(cause, 0.0), pools[busiest]
    busy_s = sum(row.busy_s for row in rows)
    for row in rows:
        charged[row.name] = charged.get(row.name, 0.0) + moved_s * row.busy_s / busy_s
    return charged


def _use(rows: Sequence[PoolTime]) -> float:
    busy_s = sum(row.busy_s for row in rows)
    whole_s = busy_s + sum(row.starved_s + row.blocked_s for row in rows)
    return busy_s / whole_s if whole_s > 0 else 0.0
