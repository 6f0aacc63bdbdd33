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

from loaderkit._internal.units import say_seconds
from loaderkit.engine.metrics.bottleneck_rules import BottleneckRules, memory_verdict
from loaderkit.engine.metrics.interval import SPARE, Interval, Verdict
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.engine.metrics.stalls import MEMORY, START, WAKEUP

__all__ = ["Verdict", "diagnose"]

_HARMLESS = 0.05  # of the time: such waits are not worth a change
_OCCASIONAL = 0.15  # as well, where the workers have time to spare


def diagnose(stats: Snapshot) -> Verdict:
    """The verdict on an interval, `loader.stats()` or `loader.stats(since=earlier)`; in about 0.1 ms, from any thread."""
    if stats.wall_s <= 0:
        evidence = "nobody has waited for a batch in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over the loader", "unknown")
    interval = Interval.of(stats)
    return _without_a_stage(interval) or _of_a_stage(interval)


def _without_a_stage(interval: Interval) -> Verdict | None:
    stats = interval.stats
    if interval.start_s > interval.waited_s and interval.start_s > _HARMLESS * stats.wall_s:
        return _start(interval)
    if interval.share < _HARMLESS or (interval.share < _OCCASIONAL and interval.has_time_to_spare):
        return _training(interval)
    if interval.stall_s.get(MEMORY, 0.0) > interval.waited_s / 2:
        return memory_verdict(interval)
    return None


def _of_a_stage(interval: Interval) -> Verdict:
    stats = interval.stats
    busiest = _limit(interval, max(stats.stages, key=lambda row: row.cpu_s))
    if busiest.is_gil:  # whoever is waited for waits for the lock: what matters is who has it
        return busiest.gil()
    if interval.stall_s.get(WAKEUP, 0.0) > interval.waited_s / 2:
        return _wakeup(interval)
    awaited = _limit(interval, max(stats.stages, key=lambda row: interval.stall_s.get(row.name, 0.0)))
    if interval.is_short_of_cpus and awaited.would_compute:
        return busiest.computing()  # chunks wait for a CPU wherever they are: what matters is who uses them
    return awaited.verdict()


def _limit(interval: Interval, row: StageStats) -> BottleneckRules:
    return BottleneckRules(interval, row, interval.pool_of(row))


def _training(interval: Interval) -> Verdict:
    stats = interval.stats
    use = max(pool.use for pool in interval.pools)
    evidence = f"the loop waited {100 * interval.share:.1f} % of {say_seconds(interval.wall_s)}"
    change = "nothing in loading: make the training step faster"
    if not interval.is_inline:
        evidence += f"; the workers were busy for {100 * use:.0f} % of their time"
        workers = sum(pool.rows[0].workers for pool in interval.pools)
        if use < SPARE and workers > len(interval.pools):
            change += "; fewer workers would do, if you need the CPUs"
    sure = interval.confidence(1.0 if interval.share < _HARMLESS / 2 else 0.9 if interval.share < _HARMLESS else 0.75)
    return Verdict(
        None, round(100.0 - interval.percent(sum(stats.stall_s.values())), 1), sure, evidence, change, "training"
    )


def _start(interval: Interval) -> Verdict:
    stats = interval.stats
    evidence = (
        f"of {say_seconds(stats.wall_s)}, {say_seconds(interval.start_s)} went by before the first chunk could run, and "
        f"{say_seconds(interval.waited_s)} were waited after that"
    )
    change = (
        "call loader.start() while the model is made; look at stats(since=...) of a later moment for the steady state"
    )
    return Verdict(START, interval.percent(interval.start_s), interval.confidence(), evidence, change, "start")


def _wakeup(interval: Interval) -> Verdict:
    seconds = interval.stall_s[WAKEUP]
    each = f", {say_seconds(seconds / interval.stats.num_batches)} a batch" if interval.stats.num_batches else ""
    lost = f"{say_seconds(seconds)} of {say_seconds(interval.wall_s)}{each}"
    evidence = f"batches were ready, and the loop's thread was not running: {lost}"
    change = (
        "prefetch.executor: process, so that loading does not hold Python's lock when the loop needs it; or fewer workers; "
        "where a batch takes less than a millisecond, larger batches or executor: inline"
    )
    return Verdict(WAKEUP, interval.percent(seconds), interval.confidence(0.8), evidence, change, "wakeup")
