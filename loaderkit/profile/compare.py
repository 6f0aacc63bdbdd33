"""`--baseline old.json`: two runs side by side, and for each figure whether the difference exceeds the noise.

report before ──steps──> windows ─┐
                                  ├─ statistics.against ──> a row for each figure: better, worse or noise
report after  ──steps──> windows ─┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from loaderkit._internal.units import say_seconds
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import ComparedFigure, Comparison, Outcome, Step
from loaderkit.profile.statistics import LEAST_STEPS, Difference, against, steady

METHOD = (
    "Steps behind the warm-up in 20 windows, and in 5; Welch's t interval of 95 % of the difference of their means, "
    "the wider one. "
)
_ONE = (
    "It knows the noise within each run, not what differs from run to run on a machine that others use: give several earlier "
    "reports of the same for that, --baseline a.json --baseline b.json."
)
_SEVERAL = (
    "It is at least as wide as the prediction interval for one more run like the earlier ones, from how these differ."
)
_MOST_DIFFERENCES = 30
_NOTABLE_LATE = 10.0  # points
_SAY: Mapping[Outcome, str] = {
    "better": "yes, better", "worse": "yes, worse", "changed": "yes", "noise": "no", "unknown": "one value each",
}  # fmt: skip


class Said(NamedTuple):
    """A figure of both runs, in words."""

    name: str
    before: str
    after: str
    change: str
    interval: str
    outcome: str


def say(row: ComparedFigure) -> Said:
    """The figure in words."""
    unit = "points" if row.unit == "percent" else "%"
    change = "" if row.change is None else f"{row.change:+.1f} {unit}"
    interval = "" if row.low is None or row.high is None else f"{row.low:+.1f} to {row.high:+.1f}"
    return Said(row.name, _say(row.before, row.unit), _say(row.after, row.unit), change, interval, _SAY[row.outcome])


def compare_reports(before: Sequence[Report], after: Report) -> Comparison:
    """Compare two runs. `before` holds one or several reports of the same pipeline, the last one last."""
    rows = list(_figures(before, after))
    return Comparison(
        made_at=before[-1].made_at,
        num_runs=len(before),
        summary=_summary(rows),
        rows=rows,
        differences=list(_differences(before[-1], after))[:_MOST_DIFFERENCES],
        method=METHOD + (_ONE if len(before) == 1 else _SEVERAL),
    )


def _figures(before: Sequence[Report], after: Report) -> Iterator[ComparedFigure]:
    ones, other = [steady(report.steps.steps) for report in before], steady(after.steps.steps)
    is_known = min(map(len, [*ones, other])) >= LEAST_STEPS
    size, new_size = _mean_of([_batch_size(report) for report in before]) or 0.0, _batch_size(after)
    longer: Outcome = "worse" if size == new_size else "changed"  # of a step: another batch size may be why

    def both(value: Callable[[Sequence[Step]], float]) -> tuple[float | None, float | None]:
        return _mean_of([value(one) if one else None for one in ones]), value(other) if other else None

    time, new_time = both(_mean_step)
    step = against(ones, other, _log_step) if is_known else None
    speed = None
    if step is not None and min(size, new_size) > 0:  # shorter steps are faster, and so are larger batches
        shift = math.log(new_size / size)
        speed = Difference(shift - step.mean, shift - step.high, shift - step.low)
    rates = (size / time if time else None, new_size / new_time if new_time else None)
    yield _ratio("samples/s", "per_s", *rates, speed, more_is="better")
    yield _points("waiting for data", *both(_share), against(ones, other, _share) if is_known else None)
    yield _ratio("a step", "seconds", time, new_time, step, more_is=longer)
    logs = against(ones, other, _log_compute) if is_known and all(map(_computes, [*ones, other])) else None
    yield _ratio("computing, of a step", "seconds", *both(_mean_compute), logs, more_is=longer)

    yield _single("a step, p99", _mean_of([report.steps.p99_s for report in before]), after.steps.p99_s)
    firsts = [report.first_batch.total_s if report.first_batch else None for report in (*before, after)]
    yield _single("the first batch", _mean_of(firsts[:-1]), firsts[-1])
    for row in after.stages:
        old = [one.p50_s for report in before for one in report.stages if one.name == row.name]
        if old:
            yield _single(f"{row.name}, p50 of a sample", _mean_of(old), row.p50_s)


def _batch_size(report: Report) -> float:
    return report.num_samples / max(1, report.num_batches)


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _computes(steps: Sequence[Step]) -> bool:
    return all(step.compute_s > 0 for step in steps)


def _mean_compute(steps: Sequence[Step]) -> float:
    return sum(step.compute_s for step in steps) / len(steps)


def _mean_step(steps: Sequence[Step]) -> float:
    return sum(step.compute_s + step.stall_s for step in steps) / len(steps)


def _log_step(steps: Sequence[Step]) -> float:
    return math.log(max(_mean_step(steps), 1e-9))


def _log_compute(steps: Sequence[Step]) -> float:
    return math.log(max(_mean_compute(steps), 1e-9))


def _share(steps: Sequence[Step]) -> float:
    return 100.0 * sum(step.stall_s for step in steps) / max(len(steps) * _mean_step(steps), 1e-9)


def _ratio(
    name: str,
    unit: Literal["per_s", "seconds"],
    before: float | None,
    after: float | None,
    logs: Difference | None,
    *,
    more_is: Outcome,
) -> ComparedFigure:
    """A figure whose change is in percent; `logs` is the difference of its logarithms."""
    if logs is None or not before or not after:
        return _single(name, before, after, unit=unit)
    mean, low, high = (100.0 * math.expm1(value) for value in logs)
    outcome = _outcome(logs, more_is)
    return ComparedFigure(
        name=name, unit=unit, before=before, after=after, change=mean, low=low, high=high, outcome=outcome
    )


def _points(name: str, before: float | None, after: float | None, difference: Difference | None) -> ComparedFigure:
    if difference is None:
        return _single(name, before, after, unit="percent")
    return ComparedFigure(
        name=name, unit="percent", before=before, after=after, change=difference.mean, low=difference.low, high=difference.high,
        outcome=_outcome(difference, "worse"),
    )  # fmt: skip


def _single(
    name: str, before: float | None, after: float | None, *, unit: Literal["per_s", "percent", "seconds"] = "seconds"
) -> ComparedFigure:
    """A figure with one value a run, and so without an interval."""
    change = None
    if before is not None and after is not None:
        change = after - before if unit == "percent" else 100.0 * (after / before - 1) if before else None
    return ComparedFigure(
        name=name, unit=unit, before=before, after=after, change=change, low=None, high=None, outcome="unknown"
    )


def _outcome(difference: Difference, more_is: Outcome) -> Outcome:
    if difference.is_noise:
        return "noise"
    if more_is == "changed":
        return "changed"
    return more_is if difference.mean > 0 else ("worse" if more_is == "better" else "better")


def _summary(rows: Sequence[ComparedFigure]) -> str:
    speed, waiting = rows[0], rows[1]
    if speed.outcome == "unknown":
        return f"too few steps to tell a difference from noise: at least {LEAST_STEPS} behind the warm-up, as in --steps 60"
    text = {
        "better": "faster than before", "worse": "slower than before", "noise": "not to be told from before, for noise",
    }[speed.outcome]  # fmt: skip
    text = f"{text}: {say(speed).change} samples/s (95 % interval {say(speed).interval} %)"
    return f"{text}; waiting went from {say(waiting).before} to {say(waiting).after}"


# --------------------------------------------------------------------------------------------- what was different


def _differences(before: Report, after: Report) -> Iterator[str]:
    if before.name != after.name:
        yield f"the pipeline: {before.name} before, {after.name} now"
    for name in ("cpus", "platform", "device", "python", "torch", "loaderkit"):
        old, new = getattr(before.machine, name), getattr(after.machine, name)
        if old != new:
            yield f"{name}: {old} before, {new} now"
    if (before.rank, before.world_size) != (after.rank, after.world_size):
        yield f"rank {before.rank} of {before.world_size} before, {after.rank} of {after.world_size} now"
    late = [_late(report) for report in (before, after)]
    if abs(late[1] - late[0]) >= _NOTABLE_LATE:
        yield (
            f"CPUs were {'busier' if late[1] > late[0] else 'less busy'}: of their work, workers waited for a free one "
            + (f"{late[0]:.0f} % before, {late[1]:.0f} % now")
        )
    one, other = dict(_flat(before.config)), dict(_flat(after.config))
    for key in dict.fromkeys([*one, *other]):
        old, new = one.get(key, "default"), other.get(key, "default")
        if old != new:
            yield f"{key}: {old} before, {new} now"
    verdicts = [f"{report.verdict.stage or 'training'} ({report.verdict.kind})" for report in (before, after)]
    if verdicts[0] != verdicts[1]:
        yield f"the limit: {verdicts[0]} before, {verdicts[1]} now"
    for report, when in ((before, "before"), (after, "now")):
        if report.partial:
            yield f"the report {when} is partial: {report.partial}"


def _late(report: Report) -> float:
    """The percentage of the workers' busy time in which they were ready to run and no CPU was free."""
    busy_s = sum(row.busy_s for row in report.stages)
    return 100.0 * sum(row.delayed_s for row in report.stages) / busy_s if busy_s > 0 else 0.0


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """A config by dotted keys; a stage is keyed by its kind."""
    if isinstance(value, Mapping):
        if not value:
            yield key, "there"
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif key == "stages" and isinstance(value, list):
        for stage in value:
            yield from _flat(stage if isinstance(stage, Mapping) else {stage: {}}, key)
    else:
        yield key, value


def _say(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "seconds":
        return say_seconds(value)
    return f"{value:.1f} %" if unit == "percent" else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
