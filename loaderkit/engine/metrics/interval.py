"""An interval of the accounts, as a verdict looks at it: waits, pools and what their workers do, what there is to be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from loaderkit.engine.metrics.concurrency import ContentionResult
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.engine.metrics.stalls import START

WAITING = 0.25  # of the time: where workers wait less, nobody is held up
SPARE = 0.6  # of their time: workers that are busy for less have time to spare
_SHORT = 0.2  # of the busy time, ready to run while no CPU was free: then CPUs are what is short
_IDLE = 0.5  # CPUs: with so many idle, there is one for whoever wants it
_FULL = 0.8  # of the CPUs in use: so it is then
_NUM_SURE = 8  # batches from which on an interval says as much as it ever will


@dataclass(frozen=True)
class PoolUse:
    """The stages of one pool, and its workers' time."""

    rows: list[StageStats]
    trial: ContentionResult
    is_in_trainer: bool  # with `executor: process`: not in the process that loads

    def total(self, name: str) -> float:
        return float(sum(getattr(row, name) for row in self.rows))

    @property
    def use(self) -> float:
        """The share of the time of workers that are to work in which they do."""
        whole = self.total("busy_s") + self.total("starved_s") + self.total("blocked_s")
        return self.total("busy_s") / whole if whole > 0 else 0.0

    @property
    def works_one_at_a_time(self) -> bool:
        """Whether only one worked for much of the time, since that was measured to be faster."""
        alone = self.trial.alone_share
        return alone is not None and alone >= 1.0 and self.total("idle_s") > WAITING * self.total("slot_s")


@dataclass(frozen=True)
class Interval:
    """An interval, but for the start of the first batch."""

    stats: Snapshot
    start_s: float
    stall_s: Mapping[str, float]
    waited_s: float
    wall_s: float
    pools: list[PoolUse]

    @classmethod
    def of(cls, stats: Snapshot) -> Interval:
        stall_s = {cause: seconds for cause, seconds in stats.stall_s.items() if cause != START}
        start_s = stats.stall_s.get(START, 0.0)
        wall_s = max(stats.wall_s - start_s, 1e-9)
        return cls(stats, start_s, stall_s, sum(stall_s.values()), wall_s, _pools_of(stats))

    @property
    def share(self) -> float:
        """Of the time, in which the loop waited."""
        return min(1.0, self.waited_s / self.wall_s)

    @property
    def is_inline(self) -> bool:
        """Whether batches are made in the loop's thread, and not by workers."""
        return self.stats.tuning.get("executor") == "inline"

    @property
    def is_inline_by_rule(self) -> bool:
        """True if nobody asked for `inline`: the batches are so small that to hand them over would take longer."""
        return "executor_reason" in self.stats.tuning

    @property
    def has_time_to_spare(self) -> bool:
        """Whether every pool could do more, if there were room for it."""
        return not self.is_inline and not self.is_short_of_memory and max(pool.use for pool in self.pools) < SPARE

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the budget holds fewer batches than are to be read ahead."""
        return self.num_in_memory < self.num_wanted

    @property
    def num_in_memory(self) -> int:
        memory = self.stats.memory
        return memory["budget_bytes"] // batch if (batch := memory.get("batch_bytes", 0)) else self.num_wanted

    @property
    def num_wanted(self) -> int:
        batches = self.stats.tuning.get("batches")
        return batches if isinstance(batches, int) else 1

    @property
    def num_cpus(self) -> int | None:
        return self.stats.tuning.get("cpus")

    @property
    def num_processes(self) -> int:
        """Processes that load, of which each has its own lock of Python's, and lets its own workers take turns."""
        processes = self.stats.tuning.get("processes")
        return processes if isinstance(processes, int) else 1

    @property
    def cpus_used(self) -> float:
        """By the workers, on average."""
        return sum(row.cpu_s for row in self.stats.stages) / self.wall_s

    @property
    def num_idle_cpus(self) -> float | None:
        """CPUs that this process may use and that had nothing to run, on average; None: not known."""
        idle_s = self.stats.host.idle_s
        return None if idle_s is None else idle_s / self.stats.wall_s

    @property
    def has_idle_cpus(self) -> bool:
        """Whether a thread that is ready to run could. On virtual machines it may wait behind another thread all the same, for
        as long as that has the GIL: then it is the GIL that it waits for."""
        return self.num_idle_cpus is not None and self.num_idle_cpus > _IDLE

    @property
    def is_short_of_cpus(self) -> bool:
        rows = self.stats.stages
        delayed = sum(row.delayed_s for row in rows) > _SHORT * sum(row.busy_s for row in rows)
        is_full = self.num_cpus is not None and self.cpus_used > _FULL * self.num_cpus
        return is_full or (delayed and not self.has_idle_cpus)

    def pool_of(self, row: StageStats) -> PoolUse:
        return next(pool for pool in self.pools if any(row is one for one in pool.rows))

    def percent(self, seconds: float) -> float:
        return round(min(100.0, 100.0 * seconds / self.stats.wall_s), 1)

    def confidence(self, *factors: float) -> float:
        """All that speaks against being sure, multiplied; how short the interval is, too."""
        found = 0.95 if self.stats.num_batches >= _NUM_SURE else 0.6 + 0.35 * self.stats.num_batches / _NUM_SURE
        for factor in factors:
            found *= factor
        return round(max(0.05, found), 2)

    def suggested_workers(self, workers: int) -> int:
        """How many would be enough, if twice as many did twice as much; no more than four times as many at a time."""
        return max(
            workers + 1, min(4 * workers, ceil(workers / max(1e-9, 1 - self.share)) if self.share < 1 else 2 * workers)
        )


def _pools_of(stats: Snapshot) -> list[PoolUse]:
    rows = {row.name: row for row in stats.stages}
    described: list[Mapping[str, Any]] = stats.tuning.get("pools") or [{"stages": list(rows)}]
    return [
        PoolUse(
            [rows[name] for name in pool["stages"]],
            stats.trials.get(pool["stages"][0], ContentionResult()),
            "process" in pool,
        )
        for pool in described
    ]
