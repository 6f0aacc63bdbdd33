"""Makes the table of what each change would bring by the model, and what it does bring where it can be tried here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from loaderkit.diagnosis.verdict import say
from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Measured, SettingsTrial, WhatIf
from loaderkit.profile.settings_patch import is_accepted
from loaderkit.profile.whatif.advised import KnownRun, changed_by
from loaderkit.profile.whatif.changes import Change, changes

_ROUNDS = 5
_NOTHING = 0.01
_LEAST_S = 2.0  # for one change, both sides together
_MOST_ERROR = 50.0  # percent; a prediction that is known no better says nothing


def what_if(report: Report, config: PipelineConfig) -> tuple[list[WhatIf], float | None]:
    """The table, what the verdict says to change first and then the most promising; and how far the model is off for the
    pipeline as it is, in percent. Empty where too little was seen."""
    known = KnownRun.of(report)
    if known is None:
        return [], None
    advised = _advised(known, report, config)
    rows = [] if advised is None else [advised]
    for change in changes(known.model, report, config):
        row = known.row(change)
        is_there = advised is not None and _values(row) == _values(advised)
        if not is_there and (row.can_run or abs(row.speedup - 1) > _NOTHING):
            is_advised = not report.verdict.settings and report.verdict.kind in change.answers
            rows.append(row.model_copy(update={"is_advised": is_advised}))
    rows.sort(key=lambda row: (not row.is_advised, -row.speedup))
    return rows, 100.0 * (known.simulated / known.measured - 1.0)


def well_known(rows: Sequence[WhatIf]) -> list[WhatIf]:
    """The rows without those whose error is over half or not known; but with what was tried, or the verdict says to change."""
    return [
        row
        for row in rows
        if row.is_advised
        or row.measured is not None
        or (row.interval_percent is not None and row.interval_percent <= _MOST_ERROR)
    ]


def _values(row: WhatIf) -> dict[str, object]:
    return {one.key: one.value for one in row.settings}


def _advised(known: KnownRun, report: Report, config: PipelineConfig) -> WhatIf | None:
    """The row of the verdict's settings, with what a trial of them found; None if there are none, or if the model lacks
    one of them."""
    trial = report.verdict.tried
    settings = report.verdict.settings if trial is None else trial.settings
    changed = changed_by(known.model, settings, report) if settings else None
    if changed is None or not is_accepted(config, {one.key: one.value for one in settings}):
        return None
    row = known.row(Change(say(settings), changed, tuple(settings)))
    is_advised = trial is None or trial.is_suggested
    return row.model_copy(update={"is_advised": is_advised, "measured": _found(row, trial)})


def _found(row: WhatIf, trial: SettingsTrial | None) -> Measured | None:
    if trial is None or trial.after is None or trial.speedup is None or trial.interval is None:
        return None
    return Measured(
        samples_per_s=trial.after.samples_per_s,
        speedup=trial.speedup,
        stall_percent=trial.stall_after_percent,
        interval_percent=100.0 * trial.interval / max(trial.speedup, 1e-9),
        error_percent=100.0 * (row.speedup / max(trial.speedup, 1e-9) - 1.0),
    )


def verify(make: Make, step: Step, rows: list[WhatIf], *, seconds: float) -> None:
    """Try the rows that can run here, one after the other while time is left, each interleaved with the pipeline as it is."""
    until_s = time.perf_counter() + seconds
    untried = [row.can_run and row.measured is None for row in rows]
    each_s = max(_LEAST_S, seconds / max(sum(untried), 1))
    for number, row in enumerate(rows):
        if untried[number] and time.perf_counter() + each_s / 2 > until_s:
            rows[number] = row.model_copy(update={"note": "not tried: no time was left"})
        elif untried[number]:
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
