"""Accounts made by hand, for tests of verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Verdict
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.slow_samples import Slow, table_of
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.pipeline.config.registry import STAGES


def settings_of(verdict: Verdict) -> dict[str, Any]:
    """What a verdict sets, by key."""
    return {one.key: one.value for one in verdict.settings}


def row(name: str, busy_s: float, cpu_s: float = 0.0, *, workers: int = 2, **more: Any) -> StageStats:
    waits = name in STAGES and not STAGES[name].only_computes
    return StageStats(name, workers, busy_s=busy_s, cpu_s=cpu_s, kind=name, waits=waits, **more)


def services(*items: tuple[float, int]) -> Histogram:
    found = Histogram()
    for seconds, count in items:
        found.add(seconds, count)
    return found


def stats(
    stall_s: dict[str, float],
    rows: list[StageStats],
    *,
    wall_s: float = 10.0,
    trial: ContentionResult = ContentionResult(),  # noqa: B008 - a tuple
    apart: bool = False,
    memory: tuple[int, int] = (1000, 1),
    executor: str = "thread",
    processes: int | None = None,
    batches: int = 100,
    idle_s: float | None = None,
    ahead_wait_s: float = 0.0,
    slow: dict[str, tuple[Slow, ...]] | None = None,
) -> Stats:
    names = [one.name for one in rows]
    pools = [PoolTuning((name,), 1) for name in names] if apart else [PoolTuning(tuple(names), 1)]
    nothing = Stats.empty(rows, memory[0])
    return replace(
        nothing,
        host=replace(nothing.host, idle_s=idle_s),
        wall_s=wall_s,
        num_batches=batches,
        waits_s=stall_s,
        tuning=Tuning(executor, 4, cpus=4, pools=tuple(pools), processes=processes),
        memory={"budget_bytes": memory[0], "batch_bytes": memory[1]},
        trials={names[0]: trial},
        store={"ahead_wait_s": ahead_wait_s},
        slowest={stage: table_of(items) for stage, items in (slow or {}).items()},
    )
