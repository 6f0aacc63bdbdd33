"""Simulates given changes, and the settings that a verdict asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.units import parse_bytes
from loaderkit.diagnosis.verdict import Setting
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import WhatIf
from loaderkit.profile.statistics import NUM_WINDOWS, paired, steady, windows
from loaderkit.profile.whatif.changes import Change
from loaderkit.profile.whatif.demands import PipelineModel, PoolModel, model_of
from loaderkit.profile.whatif.predict import predict, rate_of, steady_rate

_LEAST_WAIT = 0.05  # share of the time; of shorter waits a ratio says nothing


class KnownRun(NamedTuple):
    """The pipeline as it is."""

    model: PipelineModel
    measured: float  # samples/s
    simulated: float
    varied: float | None  # how its speed varied, as a share; None with too few steps

    @classmethod
    def of(cls, report: Report) -> KnownRun | None:
        """None where too little was seen."""
        model = model_of(report)
        return None if model is None else cls(model, steady_rate(report), rate_of(model), _varied(report))

    def row(self, change: Change) -> WhatIf:
        """What a change would bring."""
        predicted = predict(change.model, self.measured / self.simulated)
        off = _off(predicted.samples_per_s, self.simulated, self.measured, self.model.compute_s)
        return WhatIf(
            name=change.name,
            settings=list(change.settings),
            samples_per_s=predicted.samples_per_s,
            stall_percent=predicted.stall_percent,
            speedup=predicted.samples_per_s / self.measured,
            interval_percent=None if self.varied is None else 100.0 * math.hypot(math.sqrt(2) * self.varied, off),
            limit=predicted.limit,
            note=change.note,
            can_run=bool(change.settings),
        )


def predicted(report: Report, settings: Sequence[Setting]) -> WhatIf | None:
    """What these settings would bring to a pipeline; None where too little was seen, or the model lacks one of them."""
    known = KnownRun.of(report)
    changed = None if known is None else changed_by(known.model, settings, report)
    return None if known is None or changed is None else known.row(Change("", changed, tuple(settings)))


def changed_by(model: PipelineModel, settings: Sequence[Setting], report: Report) -> PipelineModel | None:
    """The model with these settings; None where it lacks one of them."""
    values = {one.key: one.value for one in settings}
    executor = values.pop("prefetch.executor", None)
    if executor == "inline":
        return replace(model, is_inline=True)
    if model.is_inline and (executor is not None or "prefetch.concurrency" in values):
        workers = values.pop("prefetch.concurrency", "auto")
        pool = PoolModel(num_cpus() if workers == "auto" else workers, model.stages)
        model = replace(model, is_inline=False, pools=(pool,))
    for key, value in values.items():
        changed = _with_value(model, key, value, report)
        if changed is None:
            return None
        model = changed
    return model


def _with_value(model: PipelineModel, key: str, value: object, report: Report) -> PipelineModel | None:
    pools = [pool for pool in report.tuning.get("pools", ()) if "process" not in pool]  # but for the trainer's own
    match key.split("."):
        case ["prefetch", "memory"]:
            batch_bytes = int(report.memory.get("batch_bytes") or 0)
            held = max(1, parse_bytes(value) // batch_bytes) if batch_bytes else math.inf
            return replace(model, batches_in_memory=float(held))
        case ["prefetch", "batches"] if isinstance(value, int):
            return replace(model, batches_ahead=float(value))
        case ["prefetch", "processes"] if isinstance(value, int):
            return _with_processes(model, value, report)
        case ["prefetch", "concurrency"] if isinstance(value, int):
            more = value - sum(int(pool["workers"]) for pool in pools)
            return _with_workers(model, report.verdict.stage or "", more)
        case ["stages", *names, "workers"] if isinstance(value, int):
            name = ".".join(names)
            stage = next((one.name for one in model.stages if one.name == name or one.name.startswith(f"{name}.")), "")
            before = next((int(pool["workers"]) for pool in pools if stage in pool["stages"]), value)
            return _with_workers(model, stage, value - before)
    return None


def _with_workers(model: PipelineModel, stage: str, more: int) -> PipelineModel | None:
    """With more workers for the pool of a stage."""
    names = [[one.name for one in pool.stages] for pool in model.pools]
    place = next((number for number, own in enumerate(names) if stage in own), None)
    if place is None:
        return None
    pools = [*model.pools]
    pools[place] = replace(pools[place], workers=max(1, pools[place].workers + more))
    return replace(model, pools=tuple(pools))


def _with_processes(model: PipelineModel, processes: int, report: Report) -> PipelineModel:
    """With another number of processes. Work that one worker of each process does at a time is then done in every process."""
    changed = replace(model, processes=processes)
    is_locked = report.verdict.kind == "lock" and model.serial_stage == report.verdict.stage
    if not is_locked:
        return changed
    demand_s = model.serial_s
    pools = tuple(
        replace(
            pool,
            workers=processes,
            stages=tuple(
                replace(stage, wait_s=max(0.0, demand_s - stage.cpu_s)) if stage.name == model.serial_stage else stage
                for stage in pool.stages
            ),
        )
        if model.serial_stage in [stage.name for stage in pool.stages]
        else pool
        for pool in model.pools
    )
    return replace(changed, pools=pools, serial_stage=None, serial_s=0.0)


def _varied(report: Report) -> float | None:
    """How the run's own speed varied: half the width of the 95 % interval of its steps' mean, as a share. None with too
    few steps."""
    times = [step.compute_s + step.stall_s for step in steady(report.steps.steps)]
    means = [[fmean(one) for one in windows(times, number)] for number in NUM_WINDOWS]
    if len(means[-1]) < 2:
        return None
    found = [paired(one) for one in means]
    return max((one.high - one.mean) / max(one.mean, 1e-12) for one in found)


def _off(predicted: float, simulated: float, measured: float, compute_s: float) -> float:
    """The uncertainty of a prediction, as a share, because the model is off for the pipeline as it is. The prediction
    assumes that it is off by a factor of the speed; this compares that with a factor of the waiting."""

    def wait_s(rate: float) -> float:
        return max(1.0 / rate - compute_s, _LEAST_WAIT / measured)

    by_waits = wait_s(predicted * simulated / measured) * wait_s(measured) / wait_s(simulated)
    by_speed = wait_s(predicted)
    return abs(by_waits - by_speed) / (compute_s + by_speed)
