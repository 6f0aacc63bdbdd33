"""Which stage is the bottleneck, how sure that is, what says so, and what to change: read from the accounts alone.

    the loop hardly waited ──> training is the limit
    it waited for the start, for memory, to be woken up ──> that
    it waited for a stage:
        Python's lock is held, and no more than one CPU is used ──> gil, in the stage that computes most
        no CPU is free ──> computing, in the stage that computes most
        a few items take all the time ──> stragglers
        its workers stand still although the loop waits ──> memory, depth
        an item takes longer side by side than one alone, waiting ──> lock; in `read` and `transfer` bandwidth
        on a CPU ──> computing
        waiting ──> latency

What waits cannot be told apart by looking at it, so it is measured: `turns` lets one worker alone try for a few chunks, and
asks how long a thread that wakes up waits for Python's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.prefetch.case import SPARE, Case, Verdict, say_seconds
from loaderkit.prefetch.limit import Limit, memory_verdict
from loaderkit.prefetch.stalls import MEMORY, START, WAKEUP

if TYPE_CHECKING:
    from loaderkit.prefetch.stats import StageStats, Stats

__all__ = ["Verdict", "verdict"]

_HARMLESS = 0.05  # of the time: such waits are not worth a change
_OCCASIONAL = 0.15  # as well, where the workers have time to spare


def verdict(stats: Stats) -> Verdict:
    """The verdict on an interval, `loader.stats()` or `loader.stats(since=earlier)`; in about 0.1 ms, from any thread."""
    if stats.wall_s <= 0:
        evidence = "nobody has waited for a batch in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over the loader", "unknown")
    case = Case.of(stats)
    return _without_a_stage(case) or _of_a_stage(case)


def _without_a_stage(case: Case) -> Verdict | None:
    stats = case.stats
    if case.start_s > case.waited_s and case.start_s > _HARMLESS * stats.wall_s:
        return _start(case)
    if case.share < _HARMLESS or (case.share < _OCCASIONAL and case.has_time_to_spare):
        return _training(case)
    if case.stall_s.get(MEMORY, 0.0) > case.waited_s / 2:
        return memory_verdict(case)
    return None


def _of_a_stage(case: Case) -> Verdict:
    stats = case.stats
    busiest = _limit(case, max(stats.stages, key=lambda row: row.cpu_s))
    if busiest.is_gil:  # whoever is waited for waits for the lock: what matters is who has it
        return busiest.gil()
    if case.stall_s.get(WAKEUP, 0.0) > case.waited_s / 2:
        return _wakeup(case)
    awaited = _limit(case, max(stats.stages, key=lambda row: case.stall_s.get(row.name, 0.0)))
    if case.is_short_of_cpus and awaited.would_compute:
        return busiest.computing()  # chunks wait for a CPU wherever they are: what matters is who uses them
    return awaited.verdict()


def _limit(case: Case, row: StageStats) -> Limit:
    return Limit(case, row, case.pool_of(row))


def _training(case: Case) -> Verdict:
    stats = case.stats
    use = max(pool.use for pool in case.pools)
    evidence = f"the loop waited {100 * case.share:.1f} % of {say_seconds(case.wall_s)}"
    change = "nothing in loading: make the training step faster"
    if not case.is_inline:
        evidence += f"; the workers were busy for {100 * use:.0f} % of their time"
        workers = sum(pool.rows[0].workers for pool in case.pools)
        if use < SPARE and workers > len(case.pools):
            change += "; fewer workers would do, if you need the CPUs"
    sure = case.confidence(1.0 if case.share < _HARMLESS / 2 else 0.9 if case.share < _HARMLESS else 0.75)
    return Verdict(
        None, round(100.0 - case.percent(sum(stats.stall_s.values())), 1), sure, evidence, change, "training"
    )


def _start(case: Case) -> Verdict:
    stats = case.stats
    evidence = (
        f"of {say_seconds(stats.wall_s)}, {say_seconds(case.start_s)} went by before the first chunk could run, and "
        f"{say_seconds(case.waited_s)} were waited after that"
    )
    change = (
        "call loader.start() while the model is made; look at stats(since=...) of a later moment for the steady state"
    )
    return Verdict(START, case.percent(case.start_s), case.confidence(), evidence, change, "start")


def _wakeup(case: Case) -> Verdict:
    seconds = case.stall_s[WAKEUP]
    each = f", {say_seconds(seconds / case.stats.num_batches)} a batch" if case.stats.num_batches else ""
    lost = f"{say_seconds(seconds)} of {say_seconds(case.wall_s)}{each}"
    evidence = f"batches were ready, and the loop's thread was not running: {lost}"
    change = (
        "prefetch.executor: process, so that loading does not hold Python's lock when the loop needs it; or fewer workers; "
        "where a batch takes less than a millisecond, larger batches or executor: inline"
    )
    return Verdict(WAKEUP, case.percent(seconds), case.confidence(0.8), evidence, change, "wakeup")
