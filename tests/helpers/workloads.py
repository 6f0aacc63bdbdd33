"""Workloads as arithmetic: what the accounts of a loader would say, without a loader and without time passing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from loaderkit.engine.autotune.tuned_setting import Move, TunedSetting
from loaderkit.engine.autotune.tuner import Tuner
from loaderkit.engine.metrics import Stats
from loaderkit.engine.metrics.host import HostStats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import Tuning

TICK_S = 0.25
BATCH = 16
HOST = HostStats(10**8, 10**8, 0.0, None, None, None)


@dataclass(frozen=True)
class Workload:
    """`supply` gives samples/s for a number of workers and batches ahead; the loop takes `demand` at most. `computing` is
    the share of a worker's busy time that it is on a CPU."""

    supply: Callable[[int, int], float]
    demand: float = 1e9
    computing: float = 0.0
    noise: float = 0.0
    slab_bytes: int = 1000
    budget_bytes: int = 10**6


class Simulation:
    """A tuner at work on a workload, a quarter of a second at a time."""

    def __init__(
        self, workload: Workload, *, workers: int = 2, num_cpus: int = 2, auto_batches: bool = False, unit: int = 1
    ) -> None:
        self.workload = workload
        self.workers = TunedSetting("workers of read+batch", ("read", "batch"), workers, unit=unit)
        self.batches = TunedSetting("batches", (), max(4, unit), unit=unit)
        settings = [self.workers, self.batches] if auto_batches else [self.workers]
        self.tuner = Tuner(settings, "batch", num_cpus)
        self.num_cpus = num_cpus
        self.values: list[int] = []  # of workers, at every tick
        self._random = random.Random(0)
        rows = [StageStats("read", workers), StageStats("batch", workers)]
        memory = {"budget_bytes": workload.budget_bytes, "slab_bytes": workload.slab_bytes, "live_bytes": 0}
        self.stats = Stats(0, 0.0, 0.0, 1, BATCH, {}, rows, 0, 0, memory, HOST, Tuning(batches=4))
        self._samples = 0.0

    def rate(self) -> float:
        """What is delivered a second with the values as they are."""
        return min(self.workload.demand, self.workload.supply(self.workers.value, self.batches.value))

    def run(self, seconds: float) -> Simulation:
        """Let so much time pass."""
        for _ in range(round(seconds / TICK_S)):
            self.pass_time()
            self.values.append(self.workers.value)
            move = self.tuner.look(self.stats)
            assert move is None or move.value == move.setting.value
        return self

    def look(self) -> Move | None:
        """One tick, and what the tuner wants then."""
        self.pass_time()
        return self.tuner.look(self.stats)

    def pass_time(self) -> None:
        work, workers = self.workload, self.workers.value
        noisy = max(0.1, self._random.gauss(1.0, work.noise))
        supply = work.supply(workers, self.batches.value) * noisy
        rate = min(supply, work.demand)
        self._samples += rate * TICK_S
        share = 1.0 if work.demand >= supply else 0.0
        stalled_s = TICK_S * max(0.0, 1 - supply / work.demand)
        busy_s = TICK_S * workers * (rate / supply)
        read = self.stats.stages[0]
        rows = [
            replace(
                read,
                workers=workers,
                num_items=int(self._samples),
                busy_s=read.busy_s + busy_s,
                cpu_s=read.cpu_s + min(busy_s * work.computing, TICK_S * self.num_cpus),
                blocked_s=read.blocked_s + TICK_S * workers - busy_s,
            ),
            replace(self.stats.stages[1], workers=workers, num_items=int(self._samples)),
        ]
        stall_s = {"read": self.stats.stall_s.get("read", 0.0) + stalled_s * share}
        self.stats = replace(
            self.stats,
            now_s=self.stats.now_s + TICK_S,
            wall_s=self.stats.wall_s + TICK_S,
            num_batches=1 + int(self._samples) // BATCH,
            num_samples=int(self._samples),
            waits_s=stall_s,
            stages=rows,
            tuning=Tuning(batches=self.batches.value),
        )
