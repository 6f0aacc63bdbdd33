"""An interval of the counters as the rules read it: waits, pools and their workers, CPUs and memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.engine.metrics.stalls import START
from loaderkit.engine.metrics.tuning import PoolTuning

WAITING = 0.25  # share of the time; workers that wait for less are not held up
SPARE = 0.6  # share of their time; workers that are busy for less have time to spare
_SHORT = 0.2  # share of the busy time ready to run without a free CPU, above which CPUs are short
_IDLE = 0.5  # idle CPUs, above which a thread that is ready to run finds one
_THROTTLED = 0.2  # share of the time that a quota holds the process back, above which CPUs are short
_FULL = 0.8  # share of the CPUs in use, above which none is free
_NUM_SURE = 8  # batches; more do not raise the confidence


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
    """An interval. `waited_s` counts every wait of the loop; `wall_s` is the time after the start, when workers could run."""

    stats: Snapshot
    waited_s: float
    wall_s: float
    pools: list[PoolUse]

    @classmethod
    def of(cls, stats: Snapshot) -> Interval:
        wall_s = max(stats.wall_s - stats.stall_s.get(START, 0.0), 1e-9)
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
        return min(1.0, max(0.0, self.waited_s - self.stats.stall_s.get(START, 0.0)) / self.wall_s)

    @property
    def is_inline(self) -> bool:
        """True if the loop's thread makes the batches, and not workers."""
        return self.stats.tuning.executor == "inline"

    @property
    def is_inline_by_rule(self) -> bool:
        """True if a rule chose `inline`: the batches are so small that a hand-off would take longer."""
        return self.stats.tuning.executor_reason is not None

    @property
    def is_short_of_memory(self) -> bool:
        """True if the memory budget holds fewer batches than `prefetch.batches` asks for."""
        return self.num_in_memory < self.num_wanted

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
    def num_processes(self) -> int:
        """Processes that load, each with a GIL of its own."""
        return self.stats.tuning.processes or 1

    @property
    def cpus_used(self) -> float:
        """CPUs that the workers use on average."""
        return sum(row.cpu_s for row in self.stats.stages) / self.wall_s

    @property
    def num_idle_cpus(self) -> float | None:
        """CPUs that this process may use and that were idle, on average; None: not known."""
        idle_s = self.stats.host.idle_s
        return None if idle_s is None else idle_s / self.stats.wall_s

    @property
    def has_idle_cpus(self) -> bool:
        """True if a thread that is ready to run finds a CPU. On virtual machines it may still wait behind another thread while
        that one holds the GIL: then it waits for the GIL."""
        return self.num_idle_cpus is not None and self.num_idle_cpus > _IDLE

    @property
    def others_cpus(self) -> float | None:
        """CPUs of those this process may use that other programs used, on average; None: not known."""
        if self.num_cpus is None or self.num_idle_cpus is None:
            return None
        return max(0.0, self.num_cpus - self.num_idle_cpus - self.stats.host.cpu_s / self.stats.wall_s)

    @property
    def throttled_share(self) -> float:
        """The share of the time in which a CPU quota kept this process from running."""
        return min(1.0, (self.stats.host.throttled_s or 0.0) / self.stats.wall_s)

    @property
    def is_short_of_cpus(self) -> bool:
        """True if the workers use nearly all CPUs, wait for one while none is idle, or are held back by a quota."""
        rows = self.stats.stages
        is_delayed = sum(row.delayed_s for row in rows) > _SHORT * sum(row.busy_s for row in rows)
        is_full = self.num_cpus is not None and self.cpus_used > _FULL * self.num_cpus
        return is_full or self.throttled_share > _THROTTLED or (is_delayed and not self.has_idle_cpus)

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

    def suggested_workers(self, workers: int) -> int:
        """The number that would be enough if throughput grew with the workers; at most four times as many as there are."""
        share = self.share_after_start
        enough = ceil(workers / max(1e-9, 1 - share)) if share < 1 else 2 * workers
        return max(workers + 1, min(4 * workers, enough))


def _pools_of(stats: Snapshot) -> list[PoolUse]:
    rows = {row.name: row for row in stats.stages}
    pools = stats.tuning.pools or (PoolTuning(tuple(rows), 1),)
    return [
        PoolUse(
            [rows[name] for name in pool.stages], stats.trials.get(pool.stages[0], ContentionResult()), pool.is_trainers
        )
        for pool in pools
    ]
