"""The figures of a stage in an interval that the rules read: how its workers spend their time, and how one worker
compares with all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cbrt
from typing import Literal, NamedTuple

from loaderkit.diagnosis.interval import WAITING, Interval, PoolUse
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.slow_samples import NOTHING_SLOW, Slow, rows_of
from loaderkit.engine.metrics.snapshot import StageStats

COMPUTING = 0.6  # share of the busy time on a CPU or ready for one, above which a stage computes
SCALES = 0.6  # throughput of all / (of one worker alone x workers); of waits for latency 0.63 to 1 was recorded
ALL_ALONE = 0.9  # share of the throughput of all, above which one worker alone does as much
PLAINLY = 1.2  # ratio from which on a difference is more than chance
_SEVERAL = 1.5  # workers, on average
LITTLE_CPU = 0.3  # CPUs; what uses less does not hold the GIL for long
_LOOP_COMPUTES = 0.5  # share of the time; a loop that computes for less does not keep others from the GIL
_USUAL_CPU = 2.0  # times what it computes in the mean; a usual item that takes longer waits for something
MOST_FOR_GIL_S = 0.05  # ten times the 5 ms after which a thread that computes gives it away
_PAID, _IN_VAIN = 1 / 2, 1 / 4  # of the gain that workers at their own pace bring: more of them pay, or are in vain
_WORTH = 0.2  # gain that such workers have to bring, else less than half of it is not told from nothing
_SLOW = 4.0  # times the usual time
_ALL_SLOW = 0.05  # share of the time in which every worker is with a slow item: under a lock one of them gets on


@dataclass(frozen=True)
class StageFacts:
    """One stage and its pool in an interval. A figure is None if the contention probe has not compared one worker with
    all of them."""

    stage: StageStats
    pool: PoolUse
    cpu_share: float  # share of the busy time on a CPU
    needs_cpu: float  # share of the busy time on a CPU, or ready to run while none was free
    contended_share: float  # waiting for something else, of the time in which workers side by side could have had a CPU
    would_compute: bool  # its workers wait for nothing but a CPU
    num_in_process: int  # workers that share a GIL
    num_compared: float  # of these, how many were side by side on average when one alone was compared with them
    alone_share: float | None  # throughput of one worker alone, as a share of all workers'
    slowdown: float | None  # time of an item side by side / with one worker alone
    serial_slowdown: float  # a slowdown above it: items pass one at a time; below: each worker at its own pace
    is_as_fast_alone: bool | None  # its throughput is nearer to all workers' than to one worker's share
    is_serial: bool  # workers block one another
    is_held_up: bool  # an item takes plainly longer side by side, for whatever reason
    is_limited: bool  # so, and all workers get hardly more done than a few would: a server may answer a few at a time
    may_hold_gil: bool  # with more threads, its workers may only wait for one another
    loop_holds_gil: bool  # its workers wait for the GIL, and the loop has it
    tuned: TunedWorkers | None  # more workers, as the tuner tried them; None if not tried, or without a result


class TunedWorkers(NamedTuple):
    """More workers for a pool, as the running tuner tried them."""

    before: int
    after: int
    gain: float  # in throughput, as a share
    has_paid: bool  # as where each works at its own pace; else hardly at all, as where they wait for one another


_USERS = frozenset({"call", "filter"})
"""Stages whose functions may hold the GIL all the time; the other stages' kernels do not."""


class Facts(NamedTuple):
    """All that the rules read."""

    interval: Interval
    awaited: StageFacts  # the stage that the loop waited for most
    busiest: StageFacts  # the stage with the most CPU time


def measure(interval: Interval, cause: str) -> Facts:
    """The facts of an interval whose longest wait is for the stage `cause`."""
    stages = interval.stats.stages
    awaited = next(row for row in stages if row.name == cause)
    busiest = max(stages, key=lambda row: row.cpu_s)
    return Facts(interval, _measure_stage(interval, awaited), _measure_stage(interval, busiest))


More = Literal["executor", "workers", "processes"]


def more_of(interval: Interval, facts: StageFacts, *, computing: bool = False) -> More | None:
    """What allows more of a stage's items at a time: an executor with workers, more workers, or more processes. None if
    no setting would help. Both the words of a verdict and its settings are made from this."""
    if interval.stats.full_turn is not None:
        return None
    if interval.is_inline:  # what computes and is so small would take longer with workers
        return None if computing and interval.is_inline_by_rule else "executor"
    if facts.pool.is_in_trainer or facts.stage.kind == "transfer" or facts.stage.in_turn:
        return None
    if not computing:
        return None if facts.is_limited else "workers"
    if interval.is_short_of_cpus or facts.pool.works_one_at_a_time:
        return None
    return "processes" if facts.may_hold_gil else "workers"


def are_slow_together(interval: Interval, stage: StageStats, usual_s: float) -> bool:
    """True if all workers of a stage were with slow items at once for some of the time, which a lock explains for all of them
    but the one that has it. False also where too few of the slow items are known."""
    slow = [
        one
        for one in rows_of(interval.stats.slowest.get(stage.name, NOTHING_SLOW))
        if one.chunk_s > _SLOW * one.chunk * usual_s
    ]
    together_s = _overlap_s(slow, stage.workers) - sum(one.chunk * usual_s for one in slow)
    return stage.workers > 1 and together_s > _ALL_SLOW * interval.wall_s


def _overlap_s(slow: Sequence[Slow], num_together: int) -> float:
    """How long at least `num_together` of the chunks were in work at once."""
    ends = [(one.at_s - one.chunk_s, 1) for one in slow] + [(one.at_s, -1) for one in slow]
    overlap_s, num_inside, since_s = 0.0, 0, 0.0
    for at_s, step in sorted(ends):
        if num_inside >= num_together:
            overlap_s += at_s - since_s
        num_inside, since_s = num_inside + step, at_s
    return overlap_s


def _measure_stage(interval: Interval, stage: StageStats) -> StageFacts:
    pool, busy_s = interval.pool_of(stage), stage.busy_s
    trial = pool.trial
    needs_cpu = min(1.0, (stage.cpu_s + stage.delayed_s) / busy_s) if busy_s > 0 else 0.0
    # Ready to run although CPUs were idle, and not only between two bursts of work: the delay is no lack of CPUs.
    is_delayed_by_others = interval.has_idle_cpus and pool.total("blocked_s") < WAITING * pool.total("slot_s")
    could_compute_s = busy_s - (0.0 if is_delayed_by_others else stage.delayed_s)
    waiting_share = max(0.0, 1 - stage.cpu_s / could_compute_s) if could_compute_s > 0 else 0.0
    if trial.waiting_share is None:
        contended_share = waiting_share
    else:  # measured when they were last side by side; the probe takes every delay for a lack of CPUs
        contended_share = max(trial.waiting_share, waiting_share) if is_delayed_by_others else trial.waiting_share
    num_in_process = max(1, stage.workers // interval.num_processes)
    num_inside = max(1.0, trial.num_inside or num_in_process)  # when it was tried; there may be other workers by now
    num_compared = min(num_inside, num_in_process)
    pool_busy_s = pool.total("busy_s")
    num_in_stage = num_inside * busy_s / pool_busy_s if pool_busy_s > 0 else num_inside
    # Between 1 and `num_in_stage`, nearer to 1 by ratio: each at its own pace is seen within a tenth, while one alone is
    # slowed by what comes between two items as well.
    serial_slowdown = max(cbrt(num_in_stage), PLAINLY)
    slowdown, alone_share = trial.slowdowns.get(stage.name), trial.alone_share
    if stage.in_turn:
        is_serial = False  # its workers wait for their turn; only the one that has it counts as busy
    elif pool.works_one_at_a_time:
        is_serial = needs_cpu <= COMPUTING  # else one alone is faster for another reason than a lock: caches, say
    elif alone_share is None or waiting_share <= WAITING:
        is_serial = False
    else:
        # One worker alone does as much as all if it takes an unfair lock again and again while the others wait.
        does_all = alone_share > ALL_ALONE and num_inside > _SEVERAL
        is_slowed = num_in_stage > 1 and slowdown is not None and slowdown > serial_slowdown
        # What computes when it is alone waits for no lock, or for one under which it computes: on one CPU at most.
        computes_alone = busy_s > 0 and stage.cpu_s / busy_s * (slowdown or 1.0) > COMPUTING
        uses_several = computes_alone and interval.cpus_used > interval.num_processes
        is_serial = not uses_several and (does_all or (is_slowed and alone_share * num_inside > PLAINLY))
    tuned = _tuned(interval, stage)
    if tuned is not None and alone_share is not None and waiting_share > WAITING and not stage.in_turn:
        is_serial = not tuned.has_paid  # tried, where one worker alone is only compared
    is_held_up = slowdown is not None and slowdown > PLAINLY
    return StageFacts(
        stage=stage,
        pool=pool,
        cpu_share=stage.cpu_s / busy_s if busy_s > 0 else 0.0,
        needs_cpu=needs_cpu,
        contended_share=contended_share,
        would_compute=needs_cpu > COMPUTING or (trial.waiting_share is not None and trial.waiting_share < WAITING),
        num_in_process=num_in_process,
        num_compared=num_compared,
        alone_share=alone_share,
        slowdown=slowdown,
        serial_slowdown=serial_slowdown,
        is_as_fast_alone=None if alone_share is None else alone_share >= num_compared**-0.5,
        is_serial=is_serial,
        is_held_up=is_held_up,
        is_limited=is_held_up
        and not (tuned is not None and tuned.has_paid)
        and alone_share is not None
        and alone_share * num_compared * SCALES > 1,
        may_hold_gil=_may_hold_gil(stage, trial, num_in_process),
        loop_holds_gil=_loop_holds_gil(interval, stage, trial),
        tuned=tuned,
    )


def _tuned(interval: Interval, stage: StageStats) -> TunedWorkers | None:
    """The last time that the tuner gave the stage more workers. Workers at their own pace bring a speed-up equal to the
    increase in workers, as far as the loop waits and CPUs are free."""
    tried = [
        one
        for one in interval.stats.tuning.decisions
        if stage.name in one.get("stages", ()) and one["after"] > one["before"] and one.get("gain") is not None
    ]
    if not tried or interval.is_short_of_cpus:
        return None
    before, after, gain = tried[-1]["before"], tried[-1]["after"], tried[-1]["gain"]
    worth = after / before - 1
    if not tried[-1]["kept"]:  # the loop waits now as it did then
        worth = min(worth, 1 / max(1 - interval.share_after_start, 1e-9) - 1)
    if _IN_VAIN * worth < gain < _PAID * worth or worth < _WORTH:
        return None
    return TunedWorkers(before, after, gain, has_paid=gain >= _PAID * worth)


def _loop_holds_gil(interval: Interval, stage: StageStats, trial: ContentionResult) -> bool:
    """Workers that hardly compute find the GIL taken, while the loop computes; its usual items wait for nothing, and no
    item waits for longer than it takes until the GIL is given away."""
    if not trial.holds_gil or interval.cpus_used > LITTLE_CPU or interval.loop_share < _LOOP_COMPUTES:
        return False
    usual_s, slow_s = stage.services.percentile(0.5), stage.services.percentile(0.99)
    if usual_s is None or slow_s is None or not stage.num_items:
        return False
    return usual_s < _USUAL_CPU * stage.cpu_s / stage.num_items and slow_s < MOST_FOR_GIL_S


def is_of_user(stage: StageStats) -> bool:
    """True if it runs a function or a data set of the user's."""
    return stage.kind in _USERS or (stage.kind == "read" and not stage.num_bytes)


def _may_hold_gil(stage: StageStats, trial: ContentionResult, num_in_process: int) -> bool:
    if trial.holds_gil is not None or num_in_process > 1:
        return bool(trial.holds_gil)
    return is_of_user(stage)
