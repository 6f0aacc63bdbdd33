"""What each change would bring, from the model; and what it does bring, where it can be tried here."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Measured, WhatIf
from loaderkit.profile.statistics import NUM_WINDOWS, paired, steady, windows
from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.changes import changes
from loaderkit.profile.whatif.demands import PipelineModel, model_of
from loaderkit.profile.whatif.simulate import Simulation

_ROUNDS = 5
_NEAR = 0.9
_NOTICED = 0.05
_NOTHING = 0.01
_LEAST_S = 2.0  # for one change, both sides together
_LEAST_WAIT = 0.05  # share of the time; of shorter waits a ratio says nothing


class Prediction(NamedTuple):
    """samples/s, what limits, and how much of the time the loop waits, in percent."""

    samples_per_s: float
    limit: str
    stall_percent: float


def what_if(report: Report, config: PipelineConfig) -> tuple[list[WhatIf], float | None]:
    """The table, the most promising first, and how far the model is off for the pipeline as it is, in percent. Empty where
    too little was seen."""
    model = model_of(report)
    if model is None:
        return [], None
    measured, simulated, varied = steady_rate(report), rate_of(model), _varied(report)
    rows = []
    for change in changes(model, report, config):
        predicted = predict(change.model, measured / simulated)
        off = _off(predicted.samples_per_s, simulated, measured, model.compute_s)
        rows.append(
            WhatIf(
                name=change.name,
                settings=list(change.settings),
                samples_per_s=predicted.samples_per_s,
                stall_percent=predicted.stall_percent,
                speedup=predicted.samples_per_s / measured,
                interval_percent=None if varied is None else 100.0 * math.hypot(math.sqrt(2) * varied, off),
                limit=predicted.limit,
                note=change.note,
                can_run=bool(change.settings),
            )
        )
    rows = [row for row in rows if row.can_run or abs(row.speedup - 1) > _NOTHING]
    rows.sort(key=lambda row: -row.speedup)
    return rows, 100.0 * (simulated / measured - 1.0)


def _varied(report: Report) -> float | None:
    """How the run's own speed varied: half the width of the 95 % interval of its steps' mean, as a share. None: too few."""
    times = [step.compute_s + step.stall_s for step in steady(report.steps.steps)]
    means = [[fmean(one) for one in windows(times, number)] for number in NUM_WINDOWS]
    if len(means[-1]) < 2:
        return None
    found = [paired(one) for one in means]
    return max((one.high - one.mean) / max(one.mean, 1e-12) for one in found)


def _off(predicted: float, simulated: float, measured: float, compute_s: float) -> float:
    """What is not known of a prediction because the model is off for the pipeline as it is, as a share. The prediction takes it
    to be off by a factor of the speed. This compares it with a factor of the waiting."""

    def wait_s(rate: float) -> float:
        return max(1.0 / rate - compute_s, _LEAST_WAIT / measured)

    by_waits = wait_s(predicted * simulated / measured) * wait_s(measured) / wait_s(simulated)
    by_speed = wait_s(predicted)
    return abs(by_waits - by_speed) / (compute_s + by_speed)


def rate_of(model: PipelineModel) -> float:
    """samples/s; where nothing is read ahead, work and steps just add up."""
    if model.is_inline:
        return bounds(model)["inline"]
    rate, solo = Simulation(model).run(), max(pool.solo for pool in model.pools)
    if solo < _NOTICED:
        return rate
    alone = tuple(replace(pool, workers=1) if pool.solo else pool for pool in model.pools)
    return (1 - solo) * rate + solo * Simulation(replace(model, pools=alone)).run()


def predict(model: PipelineModel, scale: float = 1.0) -> Prediction:
    """What a model gives, times `scale`: what the pipeline as it is was measured to give, by what its model gives. What the
    model leaves out is left out of both."""
    upper, rate = bounds(model), rate_of(model)
    limit = min(upper, key=upper.__getitem__)
    if rate < _NEAR * upper[limit]:
        limit = "batches ahead"  # all else would allow for more
    rate *= scale
    if model.compute_s > 0:
        rate = min(rate, 1.0 / model.compute_s)
    return Prediction(rate, limit, 100.0 * max(0.0, 1.0 - rate * model.compute_s))


def steady_rate(report: Report) -> float:
    """samples/s of the loop without its start: the steps alone."""
    steps = report.steps
    batch = report.num_samples / max(report.num_batches, 1)
    later_s = steps.compute_s + steps.stall_s + steps.overhead_s - _start_s(report)
    return steps.num_steps * batch / max(later_s, 1e-9)


def _start_s(report: Report) -> float:
    first = report.first_batch
    return 0.0 if first is None else first.workers_s + sum(first.by_stage.values())


def verify(make: Make, step: Step, rows: list[WhatIf], *, seconds: float) -> None:
    """Try the rows that can run here, one after the other while time is left, each interleaved with the pipeline as it is."""
    until_s = time.perf_counter() + seconds
    runnable = [row for row in rows if row.can_run]
    each_s = max(_LEAST_S, seconds / max(len(runnable), 1))
    for number, row in enumerate(rows):
        if row.can_run and time.perf_counter() + each_s / 2 > until_s:
            rows[number] = row.model_copy(update={"note": "not tried: no time was left"})
        elif row.can_run:
            rows[number] = _verified(make, step, row, each_s)


def _verified(make: Make, step: Step, row: WhatIf, seconds: float) -> WhatIf:
    overrides = {setting.key: setting.value for setting in row.settings}
    try:
        with ExitStack() as stack:
            before = Variant(stack.enter_context(make({}, None)), step)
            after = Variant(stack.enter_context(make(overrides, None)), step)
            interleave([before, after], rounds=_ROUNDS, window_s=seconds / (4 * _ROUNDS))
    except LoaderkitError as error:
        return row.model_copy(update={"can_run": False, "note": f"could not be tried: {error}"})
    ratio, half = ratio_of(after, before)
    measured = after.rate.samples_per_s
    return row.model_copy(
        update={
            "measured": Measured(
                samples_per_s=measured,
                speedup=ratio,
                stall_percent=after.stall_percent,
                interval_percent=100.0 * half / max(ratio, 1e-9),
                error_percent=100.0 * (row.speedup / max(ratio, 1e-9) - 1.0),
            )
        }
    )
