"""Workloads as arithmetic: what the accounts of a loader would say, without a loader and without time passing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.autotune.tuned_setting import Move, TunedSetting
from loaderkit.engine.autotune.tuner import Tuner
from loaderkit.engine.metrics.host import HostStats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import Tuning

TICK_S = 0.25
BATCH = 16
HOST = HostStats(10**8, 10**8, 0.0, None, None, None)


@dataclass(frozen=True)
class Workload:
    """`supply` gives samples/s for a number of workers and batches ahead; the loop takes `demand` at most. `computing` is
    the share of a worker's busy time that it is on a CPU. A process makes `gil_rate` samples/s at most, by one CPU."""

    supply: Callable[[int, int], float]
    demand: float = 1e9
    computing: float = 0.0
    noise: float = 0.0
    slab_bytes: int = 1000
    budget_bytes: int = 10**6
    gil_rate: float | None = None


class Simulation:
    """A tuner at work on a workload, a quarter of a second at a time."""

    def __init__(
        self,
        workload: Workload,
        *,
        workers: int = 2,
        num_cpus: int = 2,
        auto_batches: bool = False,
        unit: int = 1,
        processes: int | None = None,
        most_processes: int = 1,
    ) -> None:
        self.workload = workload
        self.workers = TunedSetting("workers of read+batch", ("read", "batch"), workers, unit=unit)
        self.batches = TunedSetting("batches", (), max(4, unit), unit=unit, kind="batches")
        settings = [self.workers, self.batches] if auto_batches else [self.workers]
        self.processes = TunedSetting("processes", (), processes or 1, kind="processes")
        self.num_seated = processes  # those that are to join have turns a tick later
        if processes is not None:
            settings.append(self.processes)
        self.tuner = Tuner(settings, "batch", num_cpus, lambda num: most_processes)
        self.num_cpus = num_cpus
        self.values: list[int] = []  # of workers, at every tick
        self.processes_at: list[int] = []
        self.chance = random.Random(0)
        rows = [StageStats("read", workers), StageStats("batch", workers)]
        memory = {"budget_bytes": workload.budget_bytes, "slab_bytes": workload.slab_bytes, "live_bytes": 0}
        memory["batch_bytes"] = workload.slab_bytes
        self.stats = Stats(0, 0.0, 0.0, 1, BATCH, {}, rows, 0, 0, memory, HOST, Tuning(batches=4))
        self._samples = 0.0

    def rate(self) -> float:
        """What is delivered a second with the values as they are."""
        return min(self.workload.demand, self.supply())

    def supply(self) -> float:
        """What could be delivered a second."""
        work, supply = self.workload, self.workload.supply(self.workers.value, self.batches.value)
        return (
            supply if work.gil_rate is None else min(supply, work.gil_rate * min(self.num_seated or 1, self.num_cpus))
        )

    def run(self, seconds: float) -> Simulation:
        """Let so much time pass."""
        for _ in range(round(seconds / TICK_S)):
            self.pass_time()
            self.values.append(self.workers.value)
            move = self.tuner.look(self.stats)
            assert move is None or move.value == move.setting.value
            self.processes_at.append(self.processes.value)
        return self

    def look(self) -> Move | None:
        """One tick, and what the tuner wants then."""
        self.pass_time()
        return self.tuner.look(self.stats)

    def pass_time(self) -> None:
        work, workers = self.workload, self.workers.value
        noisy = max(0.1, self.chance.gauss(1.0, work.noise))
        supply = self.supply() * noisy
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
                cpu_s=read.cpu_s
                + (
                    TICK_S * rate / work.gil_rate
                    if work.gil_rate
                    else min(busy_s * work.computing, TICK_S * self.num_cpus)
                ),
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
            tuning=Tuning(batches=self.batches.value, processes=self.num_seated),
        )
        if self.num_seated is not None:
            self.num_seated = self.processes.value
