"""The figures of an interval that the rules read, computed once from the counters: its waits, pools, CPUs and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from loaderkit._internal.system.cgroups import free_memory
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.engine.metrics.stalls import START
from loaderkit.engine.metrics.tuning import PoolTuning

HARMLESS = 0.05  # share of the time; shorter waits are not worth a change
WAITING = 0.25  # share of the time; workers that wait for less are not held up
SPARE = 0.6  # share of their time; workers that are busy for less have time to spare
_SHORT = 0.2  # share of the busy time ready to run without a free CPU, above which CPUs are short
_IDLE = 0.5  # idle CPUs, above which a thread that is ready to run finds one
_NONE_IDLE = 0.1  # share of the CPUs; when fewer are idle, all are in use
_THROTTLED = 0.2  # share of the time that a quota holds the process back, above which CPUs are short
_FULL = 0.8  # share of the CPUs in use, above which none is free
NUM_SURE = 8  # batches; more do not raise the confidence
_MIB = 2**20


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
    """An interval. `stall_s` are the waits of the loop by cause, `waited_s` all of them; `wall_s` is the time in which workers
    could run."""

    stats: Snapshot
    stall_s: Mapping[str, float]
    waited_s: float
    wall_s: float
    pools: list[PoolUse]

    @classmethod
    def of(cls, stats: Snapshot) -> Interval:
        stall_s = stats.stall_s  # computed anew at every call
        wall_s = max(stats.wall_s - stall_s.get(START, 0.0) + stats.started_s, 1e-9)
        return cls(stats, stall_s, sum(stall_s.values()), wall_s, _pools_of(stats))

    def with_stats(self, stats: Snapshot) -> Interval:
        """The same waits, with other figures for the workers."""
        return replace(self, stats=stats, pools=_pools_of(stats))

    @property
    def cause(self) -> str | None:
        """What the loop waited for longest: a stage, or `start`, `memory`, `wakeup`; None if it did not wait."""
        stall_s = self.stall_s
        longest = max(stall_s, key=stall_s.__getitem__, default=None)
        return longest if longest is not None and stall_s[longest] > 0 else None

    @property
    def share(self) -> float:
        """The share of all the time in which the loop waited."""
        return min(1.0, self.waited_s / self.stats.wall_s)

    @property
    def share_after_start(self) -> float:
        """The share of the time after the start in which the loop waited."""
        start_s = self.stall_s.get(START, 0.0)
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

    def memory_for(self, num_batches: int) -> int:
        """The budget that holds this many batches, in whole MiB."""
        return -(-num_batches * int(self.stats.memory.get("batch_bytes", 0)) // _MIB) * _MIB

    @property
    def memory_wanted(self) -> int:
        """The budget for the batches to read ahead; twice the present budget if that should be enough, and is not."""
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
        """The time that the counters of CPUs cover, which includes the pauses of the loop."""
        return self.stats.wall_s + self.stats.paused_s

    @property
    def num_idle_cpus(self) -> float | None:
        """CPUs that this process may use and that were idle, on average; None if that is not known."""
        idle_s = self.stats.host.idle_s
        return None if idle_s is None else idle_s / self.counted_s

    @property
    def has_idle_cpus(self) -> bool:
        """True if a thread that is ready to run finds a CPU. On virtual machines it may still wait behind another thread while
        that one holds the GIL: then it waits for the GIL."""
        return self.num_idle_cpus is not None and self.num_idle_cpus > _IDLE

    @property
    def others_cpus(self) -> float | None:
        """How many of the CPUs that this process may use other programs used, on average; None if that is not known."""
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
        """The share of the time in which the loop's own thread computes, as far as its process shows it."""
        own_s = self.stats.host.cpu_s - self.stats.host.native_s - self.cpu_s
        return 0.0 if self.stats.tuning.executor != "thread" else max(0.0, own_s) / self.counted_s

    def pool_of(self, row: StageStats) -> PoolUse:
        return next(pool for pool in self.pools if any(row is one for one in pool.rows))

    def percent(self, seconds: float) -> float:
        return round(min(100.0, 100.0 * seconds / self.stats.wall_s), 1)

    def confidence(self, *factors: float) -> float:
        """The product of `factors`, each at most 1, and of one that is smaller for a short interval."""
        confidence = 0.95 if self.stats.num_batches >= NUM_SURE else 0.6 + 0.35 * self.stats.num_batches / NUM_SURE
        for factor in factors:
            confidence *= factor
        return round(max(0.05, confidence), 2)

    def suggested_workers(self, workers: int, *, computing: bool = False) -> int:
        """The number of workers that would be enough if throughput grew with them; at most four times as many as there
        are, and, if they compute, no more than there are CPUs for."""
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
    """True if, as far as is known, the machine has room for a larger budget than the one that `memory` describes."""
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
