"""What the rules read, computed once from the counters: an interval with its waits, pools, CPUs and memory, and the facts of a
stage in it: how its workers spend their time, and how one compares with all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cbrt, ceil
from typing import Literal, NamedTuple

from loaderkit._internal.system.cgroups import free_memory
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.slow_samples import Slow
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.engine.metrics.stalls import START
from loaderkit.engine.metrics.tuning import PoolTuning

HARMLESS = 0.05  # share of the time; shorter waits are not worth a change
WAITING = 0.25  # share of the time; workers that wait for less are not held up
SPARE = 0.6  # share of their time; workers that are busy for less have time to spare
COMPUTING = 0.6  # share of the busy time on a CPU or ready for one, above which a stage computes
SCALES = 0.6  # throughput of all / (that of one worker alone x workers); of waits for latency 0.63 to 1 was recorded
ALL_ALONE = 0.9  # share of the throughput of all, above which one worker alone does as much
PLAINLY = 1.2  # ratio from which on a difference is more than chance
_SEVERAL = 1.5  # workers, on average
_SHORT = 0.2  # share of the busy time ready to run without a free CPU, above which CPUs are short
_IDLE = 0.5  # idle CPUs, above which a thread that is ready to run finds one
_NONE_IDLE = 0.1  # share of the CPUs; when fewer are idle, all are in use
_THROTTLED = 0.2  # share of the time that a quota holds the process back, above which CPUs are short
_FULL = 0.8  # share of the CPUs in use, above which none is free
_NUM_SURE = 8  # batches; more do not raise the confidence
_MIB = 2**20
LITTLE_CPU = 0.3  # CPUs; what uses less does not hold the GIL for long
_LOOP_COMPUTES = 0.5  # share of the time; a loop that computes for less does not keep others from the GIL
_USUAL_CPU = 2.0  # times what it computes in the mean; a usual item that takes longer waits for something
_MOST_FOR_GIL_S = 0.05  # ten times the 5 ms after which a thread that computes gives it away
_SLOW = 4.0  # times the usual time
_ALL_SLOW = 0.05  # share of the time in which every worker is with a slow item: under a lock one of them gets on


@dataclass(frozen=True)
class PoolUse:
    """The stages of one pool, and its workers' time."""

    rows: list[StageStats]
    trial: ContentionResult
    is_in_trainer: bool  # with `executor: process`: it runs in the trainer's process

    def total(self, name: str) -> float:
        return float(sum(getattr(row, name) for row in self.rows))

    @property
    def use(self) -> float:
        """The share of their time in which the pool's workers are busy; idle workers are left out."""
        whole = self.total("busy_s") + self.total("starved_s") + self.total("blocked_s")
        return self.total("busy_s") / whole if whole > 0 else 0.0

    @property
    def works_one_at_a_time(self) -> bool:
        """True if only one worker ran for much of the time, since that was measured to be faster."""
        alone = self.trial.alone_share
        return alone is not None and alone >= 1.0 and self.total("idle_s") > WAITING * self.total("slot_s")


@dataclass(frozen=True)
class Interval:
    """An interval. `waited_s` counts every wait of the loop; `wall_s` is the time in which workers could run."""

    stats: Snapshot
    waited_s: float
    wall_s: float
    pools: list[PoolUse]

    @classmethod
    def of(cls, stats: Snapshot) -> Interval:
        wall_s = max(stats.wall_s - stats.stall_s.get(START, 0.0) + stats.started_s, 1e-9)
        return cls(stats, sum(stats.stall_s.values()), wall_s, _pools_of(stats))

    @property
    def cause(self) -> str | None:
        """What the loop waited for longest: a stage, or `start`, `memory`, `wakeup`; None: it did not wait."""
        stall_s = self.stats.stall_s
        longest = max(stall_s, key=stall_s.__getitem__, default=None)
        return longest if longest is not None and stall_s[longest] > 0 else None

    @property
    def share(self) -> float:
        """The share of all the time in which the loop waited."""
        return min(1.0, self.waited_s / self.stats.wall_s)

    @property
    def share_after_start(self) -> float:
        """The share of the time after the start in which the loop waited."""
        start_s = self.stats.stall_s.get(START, 0.0)
        return min(1.0, max(0.0, self.waited_s - start_s) / max(self.stats.wall_s - start_s, 1e-9))

    @property
    def is_inline(self) -> bool:
        """True if the loop's thread makes the batches, and not workers."""
        return self.stats.tuning.executor == "inline"

    @property
    def is_inline_by_rule(self) -> bool:
        """True if a rule chose `inline`: the batches are so small that a hand-off would take longer."""
        return self.is_inline and self.stats.tuning.executor_reason is not None

    @property
    def is_short_of_memory(self) -> bool:
        """True if the memory budget holds fewer batches than `prefetch.batches` asks for."""
        return self.num_in_memory < self.num_wanted

    def has_memory_for(self, budget_bytes: int) -> bool:
        """True if the machine has room for a larger budget, as far as it tells."""
        return has_memory_for(self.stats.memory, budget_bytes)

    def memory_for(self, num_batches: int) -> int:
        """The budget that holds so many batches, in whole MiB."""
        return -(-num_batches * int(self.stats.memory.get("batch_bytes", 0)) // _MIB) * _MIB

    @property
    def memory_wanted(self) -> int:
        """The budget for the batches to read ahead; twice as much as there is where that should be enough, and is not."""
        budget_bytes = self.stats.memory["budget_bytes"]
        wanted = self.memory_for(self.num_wanted)
        return wanted if wanted > budget_bytes else -(-2 * budget_bytes // _MIB) * _MIB

    @property
    def memory_to_double(self) -> int:
        """The budget for twice as many batches ahead; 0 if there is enough."""
        memory = self.stats.memory
        is_enough = 2 * self.num_wanted * memory.get("batch_bytes", 0) <= memory["budget_bytes"]
        return 0 if is_enough else self.memory_for(2 * self.num_wanted)

    @property
    def num_in_memory(self) -> int:
        """Batches that the memory budget holds."""
        memory = self.stats.memory
        return memory["budget_bytes"] // batch if (batch := memory.get("batch_bytes", 0)) else self.num_wanted

    @property
    def num_wanted(self) -> int:
        """Batches to read ahead."""
        return self.stats.tuning.batches or 1

    @property
    def num_cpus(self) -> int | None:
        return self.stats.tuning.cpus

    @property
    def cpus(self) -> float | None:
        """CPUs that this process may use; with a quota also a part of one."""
        quota = self.stats.host.quota_cpus
        return self.num_cpus if quota is None or self.num_cpus is None else min(self.num_cpus, quota)

    @property
    def num_processes(self) -> int:
        """Processes that load, each with a GIL of its own."""
        return self.stats.tuning.processes or 1

    @property
    def cpus_used(self) -> float:
        """CPUs that the workers use on average; at most all, as they also work while the loop pauses."""
        used = self.cpu_s / self.wall_s
        return used if self.cpus is None else min(used, self.cpus)

    @property
    def cpu_s(self) -> float:
        """CPU time of the workers."""
        return sum(row.cpu_s for row in self.stats.stages)

    @property
    def counted_s(self) -> float:
        """What the counters of CPUs are of: also the pauses of the loop."""
        return self.stats.wall_s + self.stats.paused_s

    @property
    def num_idle_cpus(self) -> float | None:
        """CPUs that this process may use and that were idle, on average; None: not known."""
        idle_s = self.stats.host.idle_s
        return None if idle_s is None else idle_s / self.counted_s

    @property
    def has_idle_cpus(self) -> bool:
        """True if a thread that is ready to run finds a CPU. On virtual machines it may still wait behind another thread while
        that one holds the GIL: then it waits for the GIL."""
        return self.num_idle_cpus is not None and self.num_idle_cpus > _IDLE

    @property
    def others_cpus(self) -> float | None:
        """CPUs of those this process may use that other programs used, on average; None: not known."""
        others_s = self.stats.host.others_s
        return None if others_s is None else max(0.0, others_s / self.counted_s)

    @property
    def cpus_left(self) -> float:
        """CPUs that other programs leave; at least a tenth of one, and one where it is not known what they use."""
        if self.others_cpus is None or self.cpus is None:
            return 1.0
        return max(0.1, self.cpus - self.others_cpus)

    @property
    def throttled_share(self) -> float:
        """How long a CPU quota kept threads from running, on all CPUs together, as a share of the time; some kernels count
        little of it."""
        return (self.stats.host.throttled_s or 0.0) / self.counted_s

    @property
    def is_held_back(self) -> bool:
        """True if a CPU quota keeps threads of this program from running."""
        return self.throttled_share > _THROTTLED or (self.stats.host.quota_cpus is not None and self.is_short_of_cpus)

    @property
    def is_short_of_cpus(self) -> bool:
        """True if the workers use nearly all CPUs, none is idle, they wait for one, or a quota holds them back."""
        rows = self.stats.stages
        is_delayed = sum(row.delayed_s for row in rows) > _SHORT * sum(row.busy_s for row in rows)
        is_full = self.cpus is not None and self.cpus_used > _FULL * self.cpus
        if self.num_idle_cpus is not None and self.num_cpus is not None:
            is_full = is_full or self.num_idle_cpus < _NONE_IDLE * self.num_cpus
        return is_full or self.throttled_share > _THROTTLED or (is_delayed and not self.has_idle_cpus)

    @property
    def loop_share(self) -> float:
        """The share of the time in which the loop's own thread computes, as far as its process tells."""
        own_s = self.stats.host.cpu_s - self.stats.host.native_s - self.cpu_s
        return 0.0 if self.stats.tuning.executor != "thread" else max(0.0, own_s) / self.counted_s

    def pool_of(self, row: StageStats) -> PoolUse:
        return next(pool for pool in self.pools if any(row is one for one in pool.rows))

    def percent(self, seconds: float) -> float:
        return round(min(100.0, 100.0 * seconds / self.stats.wall_s), 1)

    def confidence(self, *factors: float) -> float:
        """The product of `factors`, each at most 1, and of one that is smaller for a short interval."""
        confidence = 0.95 if self.stats.num_batches >= _NUM_SURE else 0.6 + 0.35 * self.stats.num_batches / _NUM_SURE
        for factor in factors:
            confidence *= factor
        return round(max(0.05, confidence), 2)

    def suggested_workers(self, workers: int, *, computing: bool = False) -> int:
        """The number that would be enough if throughput grew with the workers; at most four times as many as there are, and
        where they compute no more than there are CPUs for."""
        share = self.share_after_start
        enough = ceil(workers / max(1e-9, 1 - share)) if share < 1 else 2 * workers
        if computing and self.cpus is not None and workers * self.cpus < enough * self.cpus_used:
            enough = ceil(workers * self.cpus / self.cpus_used)
        return max(workers + 1, min(4 * workers, enough))

    def batches_for(self, workers: int) -> int:
        """How many batches ahead give each of `workers` a sample, and one more; 0 if as many are ahead already, or if the
        budget of memory is too small for them."""
        size = self.stats.num_samples / self.stats.num_batches if self.stats.num_batches else 0.0
        batches = 0 if self.is_inline or size < 1 else ceil(workers / size) + 1
        has_memory = batches * self.stats.memory.get("batch_bytes", 0) <= self.stats.memory["budget_bytes"]
        return batches if batches > self.num_wanted and has_memory else 0


def has_memory_for(memory: Mapping[str, int], budget_bytes: int) -> bool:
    """True if the machine has room for a larger budget than `memory` is of, as far as it tells."""
    free_bytes, _ = free_memory()
    return free_bytes is None or budget_bytes - memory.get("allocated_bytes", 0) < free_bytes


def _pools_of(stats: Snapshot) -> list[PoolUse]:
    rows = {row.name: row for row in stats.stages}
    pools = stats.tuning.pools or (PoolTuning(tuple(rows), 1),)
    return [
        PoolUse(
            [rows[name] for name in pool.stages], stats.trials.get(pool.stages[0], ContentionResult()), pool.is_trainers
        )
        for pool in pools
    ]


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
    is_held_up: bool  # an item takes plainly longer side by side, for whatever reason
    is_limited: bool  # so, and all workers get hardly more done than a few would: a server may answer a few at a time
    may_hold_gil: bool  # with more threads, its workers may only wait for one another
    loop_holds_gil: bool  # its workers wait for the GIL, and the loop has it


_USERS = frozenset(
    {"call", "filter"}
)  # whose functions may hold the GIL all the time; the other stages' kernels do not


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
    """What lets more of a stage's items be done at a time: an executor with workers, more workers, or more processes. None:
    nothing that can be set would help. Both the words of a verdict and its settings are made from this."""
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
    slow = [one for one in interval.stats.slowest.get(stage.name, ()) if one.chunk_s > _SLOW * one.chunk * usual_s]
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
        is_serial = False  # its workers wait for their turn, and its time is that of the one that has it
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
        is_limited=is_held_up and alone_share is not None and alone_share * num_compared * SCALES > 1,
        may_hold_gil=_may_hold_gil(stage, trial, num_in_process),
        loop_holds_gil=_loop_holds_gil(interval, stage, trial),
    )


def _loop_holds_gil(interval: Interval, stage: StageStats, trial: ContentionResult) -> bool:
    """Workers that hardly compute find the GIL taken, while the loop computes; its usual items wait for nothing, and no item
    waits for longer than the GIL is given away in."""
    if not trial.holds_gil or interval.cpus_used > LITTLE_CPU or interval.loop_share < _LOOP_COMPUTES:
        return False
    usual_s, slow_s = stage.services.percentile(0.5), stage.services.percentile(0.99)
    if usual_s is None or slow_s is None or not stage.num_items:
        return False
    return usual_s < _USUAL_CPU * stage.cpu_s / stage.num_items and slow_s < _MOST_FOR_GIL_S


def is_of_user(stage: StageStats) -> bool:
    """True if it runs a function or a data set of the user's."""
    return stage.kind in _USERS or (stage.kind == "read" and not stage.num_bytes)


def _may_hold_gil(stage: StageStats, trial: ContentionResult, num_in_process: int) -> bool:
    if trial.holds_gil is not None or num_in_process > 1:
        return bool(trial.holds_gil)
    return is_of_user(stage)
