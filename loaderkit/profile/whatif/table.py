"""What each change would bring, from the model; and what it does bring, where it can be tried here."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from statistics import fmean

from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Measured, WhatIf
from loaderkit.profile.statistics import NUM_WINDOWS, paired, steady, windows
from loaderkit.profile.whatif.changes import changes
from loaderkit.profile.whatif.demands import model_of
from loaderkit.profile.whatif.predict import predict, rate_of, steady_rate

_ROUNDS = 5
_NOTHING = 0.01
_LEAST_S = 2.0  # for one change, both sides together
_LEAST_WAIT = 0.05  # share of the time; of shorter waits a ratio says nothing


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
