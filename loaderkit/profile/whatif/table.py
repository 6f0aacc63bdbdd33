"""What each change would bring, from the model; and what it does bring, where it can be tried here."""

from __future__ import annotations

import time
from contextlib import ExitStack

from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Measured, WhatIf
from loaderkit.profile.whatif.bounds import bounds, predict
from loaderkit.profile.whatif.changes import changes
from loaderkit.profile.whatif.demands import model_of

_ROUNDS = 5
_NOTHING = 0.01
_LEAST_S = 2.0  # for one change, both sides together


def what_if(report: Report, config: PipelineConfig) -> tuple[list[WhatIf], float | None]:
    """The table, the most promising first, and how far the model is off for the pipeline as it is, in percent. Empty where
    too little was seen."""
    model = model_of(report)
    if model is None:
        return [], None
    measured = steady_rate(report)
    rows = []
    for change in changes(model, report, config):
        predicted = predict(change.model, model, measured)
        rows.append(
            WhatIf(
                name=change.name,
                settings=list(change.settings),
                samples_per_s=predicted.samples_per_s,
                stall_percent=predicted.stall_percent,
                speedup=predicted.samples_per_s / measured,
                limit=predicted.limit,
                note=change.note,
                can_run=bool(change.settings),
            )
        )
    rows = [row for row in rows if row.can_run or abs(row.speedup - 1) > _NOTHING]
    rows.sort(key=lambda row: -row.speedup)
    return rows, 100.0 * (min(bounds(model).values()) / measured - 1.0)


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
