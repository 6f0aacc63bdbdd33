"""The facts of a stage, computed once from the counters: how its workers spend their time, and how one compares with all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from loaderkit.engine.metrics.interval import WAITING, Interval, PoolUse
from loaderkit.engine.metrics.snapshot import StageStats

COMPUTING = 0.6  # share of the busy time on a CPU or ready for one, above which a stage computes
ALL_ALONE = 0.9  # share of the throughput of all, above which one worker alone does as much
PLAINLY = 1.2  # ratio from which on a difference is more than chance
_SEVERAL = 1.5  # workers, on average


@dataclass(frozen=True)
class StageFacts:
    """One stage and its pool in an interval. None: the contention probe has not compared one worker with all of them."""

    stage: StageStats
    pool: PoolUse
    cpu_share: float  # share of the busy time on a CPU
    needs_cpu: float  # share of the busy time on a CPU, or ready to run while none was free
    contended_share: float  # waiting for something else, of the time in which workers side by side could have had a CPU
    would_compute: bool  # its workers wait for nothing but a CPU
    num_in_process: int  # workers that share a GIL
    num_compared: float  # of these, how many were side by side on average when one alone was compared with them
    alone_share: float | None  # throughput of one worker alone, as a share of that of all
    slowdown: float | None  # time of an item side by side / with one worker alone
    serial_slowdown: float  # a slowdown above it: items pass one at a time; below: each worker at its own pace
    is_as_fast_alone: bool | None  # its throughput is nearer to that of all than to one worker's share
    is_serial: bool  # workers block one another
    is_held_up: bool  # an item takes plainly longer side by side, whoever is in the way


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
    serial_slowdown = max(math.cbrt(num_in_stage), PLAINLY)
    slowdown, alone_share = trial.slowdowns.get(stage.name), trial.alone_share
    if pool.works_one_at_a_time:
        is_serial = needs_cpu <= COMPUTING  # else one alone is faster for another reason than a lock: caches, say
    elif alone_share is None or waiting_share <= WAITING:
        is_serial = False
    else:
        # One worker alone does as much as all if it takes an unfair lock again and again while the others wait.
        does_all = alone_share > ALL_ALONE and num_inside > _SEVERAL
        is_held_up = num_in_stage > 1 and slowdown is not None and slowdown > serial_slowdown
        is_serial = does_all or (is_held_up and alone_share * num_inside > PLAINLY)
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
        is_held_up=slowdown is not None and slowdown > PLAINLY,
    )
