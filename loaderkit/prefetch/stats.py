"""The loader's accounts at one moment, and the difference of two moments.

Slot time: for every stage, workers x wall time = busy + starved + blocked + idle. Stages fused into one pool are listed
singly; `slot_s` is then their own busy time, with starved and idle at the pool's first stage and blocked at its last, so
that the rows of a pool sum to its workers' time. Stall time: what the consumer waited for, by stage.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from loaderkit.prefetch.accounts import Account, Histogram, States

if TYPE_CHECKING:
    from loaderkit.prefetch.engine import Engine


@dataclass
class StageStats:
    """One stage's counters. Times in seconds, summed over its workers."""

    name: str
    workers: int
    num_items: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    starved_s: float = 0.0
    blocked_s: float = 0.0
    idle_s: float = 0.0
    services: Histogram = field(default_factory=Histogram)

    @property
    def slot_s(self) -> float:
        return self.busy_s + self.starved_s + self.blocked_s + self.idle_s

    def minus(self, earlier: StageStats) -> StageStats:
        return StageStats(
            self.name,
            self.workers,
            self.num_items - earlier.num_items,
            self.num_bytes - earlier.num_bytes,
            self.num_failed - earlier.num_failed,
            self.busy_s - earlier.busy_s,
            self.cpu_s - earlier.cpu_s,
            self.starved_s - earlier.starved_s,
            self.blocked_s - earlier.blocked_s,
            self.idle_s - earlier.idle_s,
            Histogram([a - b for a, b in zip(self.services.counts, earlier.services.counts, strict=True)]),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "workers": self.workers,
            "num_items": self.num_items,
            "num_bytes": self.num_bytes,
            "busy_s": self.busy_s,
            "cpu_s": self.cpu_s,
            "starved_s": self.starved_s,
            "blocked_s": self.blocked_s,
            "idle_s": self.idle_s,
            "slot_s": self.slot_s,
            "p50_s": self.services.percentile(0.5),
            "p99_s": self.services.percentile(0.99),
            "num_failed": self.num_failed,
        }


@dataclass
class Stats:
    """What `loader.stats()` returns. `wall_s` counts from the first wait for a batch, or from the earlier moment."""

    run: int  # counters begin anew with every run: after an error, say
    now_s: float
    wall_s: float
    num_batches: int
    num_samples: int
    stall_s: dict[str, float]
    stages: list[StageStats]
    memory: dict[str, int]
    tuning: dict[str, Any]

    def since(self, earlier: Stats) -> Stats:
        """What happened between `earlier` and this moment."""
        if earlier.run != self.run:
            raise ValueError("`since` is a moment before an error or Ctrl-C ended that run; counters have begun anew")
        causes = {**earlier.stall_s, **self.stall_s}
        return Stats(
            run=self.run,
            now_s=self.now_s,
            wall_s=self.wall_s - earlier.wall_s,
            num_batches=self.num_batches - earlier.num_batches,
            num_samples=self.num_samples - earlier.num_samples,
            # An open wait is attributed anew when it ends, so a cause may shrink a little between two moments.
            stall_s={
                cause: max(0.0, self.stall_s.get(cause, 0.0) - earlier.stall_s.get(cause, 0.0)) for cause in causes
            },
            stages=[stage.minus(before) for stage, before in zip(self.stages, earlier.stages, strict=True)],
            memory=self.memory,
            tuning=self.tuning,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        total_s = sum(self.stall_s.values())
        wall_s = max(self.wall_s, 1e-12)
        return {
            "wall_s": self.wall_s,
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "stall": {
                "total_s": total_s,
                "percent": min(100.0, 100.0 * total_s / wall_s) if self.wall_s > 0 else 0.0,
                "by_stage": dict(sorted(self.stall_s.items(), key=lambda item: -item[1])),
            },
            "stages": [stage.to_dict() for stage in self.stages],
            "throughput": {
                "samples_per_s": self.num_samples / wall_s if self.wall_s > 0 else 0.0,
                "bytes_per_s": sum(stage.num_bytes for stage in self.stages) / wall_s if self.wall_s > 0 else 0.0,
            },
            "memory": self.memory,
            "tuning": self.tuning,
        }


def blank(rows: Sequence[StageStats], memory_bytes: int) -> Stats:
    """The accounts before anything has run. `rows` name the stages and their workers."""
    memory = dict.fromkeys(("slab_bytes", "open_bytes", "live_bytes", "allocated_bytes"), 0)
    return Stats(
        run=0,
        now_s=0.0,
        wall_s=0.0,
        num_batches=0,
        num_samples=0,
        stall_s={},
        stages=list(rows),
        memory={"budget_bytes": memory_bytes, **memory, "rss_peak_bytes": 0},
        tuning={},
    )


def merged(parts: Sequence[Stats]) -> Stats:
    """The accounts of engines that work side by side on the same stages, as those of one: what can be summed is, the rest
    is the first one's."""
    first = parts[0]
    if len(parts) == 1:
        return first
    stall_s: dict[str, float] = {}
    for part in parts:
        for cause, seconds in part.stall_s.items():
            stall_s[cause] = stall_s.get(cause, 0.0) + seconds
    return replace(
        first,
        num_batches=sum(part.num_batches for part in parts),
        num_samples=sum(part.num_samples for part in parts),
        stall_s=stall_s,
        stages=[_sum(rows) for rows in zip(*(part.stages for part in parts), strict=True)],
        memory={
            name: (max if name == "slab_bytes" else sum)(part.memory[name] for part in parts)  # the size of one slab
            for name in first.memory
        },
    )


def _sum(rows: Sequence[StageStats]) -> StageStats:
    """The rows of one stage as one row."""
    counters = [f.name for f in fields(StageStats) if f.name not in ("name", "services")]
    summed = {name: sum(getattr(row, name) for row in rows) for name in counters}
    services = [sum(counts) for counts in zip(*(row.services.counts for row in rows), strict=True)]
    return replace(rows[0], **summed, services=Histogram(services))


def peak_rss_bytes() -> int:
    """The most resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def add_account(
    rows: Sequence[StageStats], ends: tuple[StageStats, StageStats], account: Account, states: States, now: float
) -> None:
    """Add one worker's time to the rows of its stages, by number; what it waited for to those of its pool's `ends`."""
    state_s = account.read(now)
    first, last = ends
    first.starved_s += state_s[states.starved]
    first.idle_s += state_s[states.idle]
    last.blocked_s += state_s[states.blocked]
    for number, totals in enumerate(account.stages):
        row = rows[number]
        row.busy_s += state_s[number]
        row.cpu_s += totals.cpu_s
        row.num_items += totals.num_items
        row.num_bytes += totals.num_bytes
        row.num_failed += totals.num_failed
        row.services = Histogram([a + b for a, b in zip(row.services.counts, totals.services.counts, strict=True)])


def collect(engine: Engine, tuning: dict[str, Any], run: int) -> Stats:
    """The accounts of an engine, up to now; from any thread, in well under a millisecond."""
    now = engine.clock()
    rows = [StageStats(stage.name, 0) for stage in engine.stages]
    for pool in engine.pools:
        numbers = pool.plan.stages
        first, last = rows[numbers[0]], rows[numbers[-1]]
        for number in numbers:
            rows[number].workers = pool.num_workers
        for account in pool.accounts:
            # Inline, one account serves all pools; threads only ever enter their own pool's stages.
            add_account(rows, (first, last), account, engine.states, now)
    stall_s = dict(engine.stall_s)
    for cause, seconds in engine.open_wait(now).items():
        stall_s[cause] = stall_s.get(cause, 0.0) + seconds
    slabs = engine.plan.slabs
    slab_bytes = slabs.layout.num_bytes if slabs is not None else 0
    return Stats(
        run=run,
        now_s=now,
        wall_s=0.0 if engine.first_wait_s is None else now - engine.first_wait_s,
        num_batches=engine.num_delivered,
        num_samples=engine.num_samples,
        stall_s=stall_s,
        stages=rows,
        memory={
            "budget_bytes": engine.plan.memory_bytes,
            "slab_bytes": slab_bytes,
            "open_bytes": engine.intake.num_open * engine.plan.batch_bytes,
            "live_bytes": slabs.num_live * slab_bytes if slabs is not None else 0,
            "allocated_bytes": slabs.num_allocated * slab_bytes if slabs is not None else 0,
            "rss_peak_bytes": peak_rss_bytes(),
        },
        tuning=tuning,
    )
