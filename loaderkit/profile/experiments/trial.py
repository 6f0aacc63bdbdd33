"""Tries the settings of a verdict before a report recommends them: in turns with the pipeline as it is, until the
result is clear.

The same trial distinguishes workers that wait for answers from workers that wait for one another. A simulation of the
first kind says how many times as fast more workers are (as far as CPUs, the step and memory allow). If the gain is
surely less than half of that, the cause is a lock, or a full link; if there surely is a gain, it is neither.

    settings ──in turns with none──> faster, likely faster ──> written
                                     no faster, slower, failed ──> not suggested
                                     hardly any faster by more workers ──> lock, bandwidth
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Event
from typing import Any, NamedTuple

from loaderkit.diagnosis.changes import FULL_LINK, otherwise, unlocked, work_of
from loaderkit.diagnosis.verdict import Cause, Setting, say
from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.decide import PairedGains, num_won
from loaderkit.profile.experiments.interleave import (
    LEAST_BATCHES,
    SYSTEM_CLOCK,
    Clock,
    Make,
    Variant,
    interleave,
    ratio_of,
)
from loaderkit.profile.experiments.loops import Step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import SettingsTrial, StageRow, TrialOutcome, VerdictPart
from loaderkit.profile.settings_patch import is_accepted, patch_of, workers_settings
from loaderkit.profile.whatif.advised import predicted
from loaderkit.profile.whatif.predict import steady_rate

_NUM_WINDOWS = 80  # in the time, draining not counted: many short ones, as one that is disturbed costs two more pairs
_FIRST = 2 / 3  # of the time, for the first pair of loaders
_MUCH = 1.5  # times as fast: more than two loaders of the same settings differ by, 1.2 / 0.8
_FASTER: frozenset[TrialOutcome] = frozenset({"faster", "likely faster"})
_LIKELY_WRONG = 0.5  # of settings that are no faster, the share called likely faster: three won pairs are enough
_APART = frozenset({"lock", "latency", "waiting"})  # kinds that a trial with more workers tells apart
_WORTH = 1.2  # times as fast by simulation, from which on less than half of it can be told from nothing
_FROM_MEMORY = 1.5  # times the speed of the run: its limit is another one
_SURE = 0.9  # confidence of what was tried
_DOUBTED = 0.6  # times the confidence, where the trial speaks for another kind


class PlannedTrial(NamedTuple):
    """What to try."""

    settings: list[Setting]
    apart: float | None  # the speed-up above which workers do not wait for one another; None: this trial cannot show it
    reads: bool  # what limits may wait for data, which a second pair of loaders would find in memory


def plan_trial(report: Report, config: PipelineConfig) -> PlannedTrial | None:
    """The settings of the verdict. If it has none, more workers, if these show what limits; None if there is nothing to
    try."""
    verdict = report.verdict
    row = _row_of(report)
    more = [] if row is None or not _kinds(verdict) & _APART else _more_workers(row, report, config)
    settings = _anew(verdict.settings or _of_a_rival(verdict) or more)
    if not settings:
        return None
    reads = _may_read(report)
    if not more or not any(map(_is_of_workers, settings)):
        return PlannedTrial(settings, None, reads)
    latency = verdict.model_copy(update={"kind": "latency"})
    free = predicted(report.model_copy(update={"verdict": latency}), settings)
    if free is None or free.speedup < _WORTH:
        return PlannedTrial(settings, None, reads) if verdict.settings else None
    return PlannedTrial(settings, 1 + (free.speedup - 1) / 2, reads)


def _row_of(report: Report) -> StageRow | None:
    """The row of the stage that the verdict names; None if that is no stage."""
    return next((row for row in report.stages if row.name == report.verdict.stage), None)


def _may_read(report: Report) -> bool:
    """True if the workers that limit wait so long that memory instead of a store could make them `_FROM_MEMORY` as fast."""
    named = _row_of(report)
    rows = [] if named is None else [row for row in report.stages if row.pool == named.pool]
    return not rows or sum(row.io_s for row in rows) > (1 - 1 / _FROM_MEMORY) * sum(row.busy_s for row in rows)


def _anew(settings: Sequence[Setting]) -> list[Setting]:
    """Without what an earlier trial found."""
    return [one.model_copy(update={"tried": ""}) for one in settings]


def _kinds(verdict: VerdictPart) -> set[str | None]:
    """The kinds of limit that it may be."""
    return {verdict.kind, verdict.or_kind}


def _of_a_rival(verdict: VerdictPart) -> list[Setting]:
    """If two kinds fit the figures: the settings of the one that has some."""
    if verdict.or_kind is None:
        return []
    return next(([*one.settings] for one in verdict.causes[:2] if one.stage == verdict.stage and one.settings), [])


def _is_of_workers(setting: Setting) -> bool:
    return setting.key == "prefetch.concurrency" or setting.key.endswith(".workers")


def _more_workers(row: StageRow, report: Report, config: PipelineConfig) -> list[Setting]:
    """Twice the workers for a stage, where it may have them."""
    pools: list[dict[str, Any]] = report.tuning.get("pools", [])
    pool = next((pool for pool in pools if row.name in pool["stages"]), {})
    is_apart = row.in_turn or row.kind in ("transfer", "share") or "process" in pool
    if is_apart or report.tuning.get("executor") not in ("thread", "process"):
        return []
    settings = workers_settings(config, row.name, row.workers, 2 * row.workers, report.tuning)
    return settings if is_accepted(config, {one.key: one.value for one in settings}) else []


def tried(
    make: Make, step: Step, report: Report, config: PipelineConfig, *, seconds: float, at_any_length: bool = False
) -> Report:
    """The report after a trial of what its verdict says to set, or with the reason for which none was made.

    It takes about `seconds` at most, and, where batches are slow, three rounds of windows, if these take at most twice
    that; with `at_any_length` also if they take longer. Where the gain is small, there are three rounds twice.
    """
    planned = plan_trial(report, config)
    if planned is None:
        return report
    most_s = math.inf if at_any_length else 2 * seconds
    if (why := _why_not(report, most_s)) is not None:
        return untried(report, why)
    return weighed(report, run_trial(make, step, planned, seconds=seconds))


def weighed(report: Report, trial: SettingsTrial) -> Report:
    """The report after a trial. The trial reads the same data as the run did: if that comes from memory by now, the
    trial says nothing of a stage that reads."""
    run_per_s = steady_rate(report)
    if trial.before is None or not _may_read(report) or trial.before.samples_per_s <= _FROM_MEMORY * run_per_s:
        return with_trial(report, trial)
    why = (
        f"the pipeline as it is gave {trial.before.samples_per_s:.4g} samples/s meanwhile, and {run_per_s:.4g} before: what it "
        "reads again comes from memory"
    )
    return untried(report, why)


def untried(report: Report, why: str, *, is_simulated: bool = True) -> Report:
    """The report with the reason for which its settings were not tried, and with what the simulation says of them, if a
    pipeline is its subject."""
    settings = report.verdict.settings
    if not settings:
        return report
    return with_trial(report, not_tried(settings, why, report if is_simulated else None))


def _why_not(report: Report, most_s: float) -> str | None:
    """The reason why settings cannot be tried beside the pipeline as it is, or None if they can."""
    if report.world_size > 1:
        return f"rank {report.rank} is one of {report.world_size}, and the others do not run in turns with it"
    if report.tuning.get("executor") == "ray":
        return "the cluster may have no room for a second set of workers"
    each_s = report.wall_s / max(report.num_batches, 1)
    if LEAST_BATCHES * each_s > most_s:
        return (
            f"a batch takes {each_s:.2g} s, and windows of both would take {LEAST_BATCHES * each_s:.0f} s or more; --verify "
            "tries it nevertheless"
        )
    return None


def not_tried(settings: Sequence[Setting], why: str, report: Report | None = None) -> SettingsTrial:
    """A trial that was not made, with what the simulation says instead, if a pipeline's `report` is given."""
    row = None if report is None else predicted(report, settings)
    return SettingsTrial(
        settings=_anew(settings),
        outcome="not tried",
        note=why,
        predicted=None if row is None else row.speedup,
        predicted_percent=None if row is None else row.interval_percent,
    )


def run_trial(
    make: Make, step: Step, planned: PlannedTrial, *, seconds: float, clock: Clock = SYSTEM_CLOCK
) -> SettingsTrial:
    """Run the settings in turns with the pipeline as it is, for about `seconds` at most; where batches are slow, for three
    rounds of windows, or two times three.

    Loaders of one pipeline can differ in speed by a fifth. So a gain that two of them might show has to show again with a
    second pair.
    """
    run_pair = partial(_run_pair, make, step, planned, window_s=seconds / _NUM_WINDOWS, clock=clock)
    trial = run_pair(most_s=_FIRST * seconds)
    if planned.reads or trial.outcome not in _FASTER or not _is_small(trial):
        return trial
    return _again(trial, run_pair(most_s=(1 - _FIRST) * seconds))


def _is_small(trial: SettingsTrial) -> bool:
    """True for a gain that two loaders of the same settings might show."""
    return trial.speedup is None or trial.interval is None or trial.speedup - trial.interval < _MUCH


def _again(first: SettingsTrial, second: SettingsTrial) -> SettingsTrial:
    """The trial with what a second pair of loaders says of it. A second pair that could not run says nothing."""
    if second.outcome == "failed":
        return second
    changes: dict[str, Any] = {"seconds": first.seconds + second.seconds, "speedup_again": second.speedup}
    if second.outcome not in (*_FASTER, "not tried"):
        changes |= {"outcome": "no faster", "is_held_up": False}  # what holds it up did not show either
    return first.model_copy(update=changes)


def _run_pair(
    make: Make, step: Step, planned: PlannedTrial, *, window_s: float, most_s: float, clock: Clock
) -> SettingsTrial:
    """Run a loader with the settings in turns with one of the pipeline as it is, for about `most_s` at most."""
    begin_s = clock.now_s()
    settings, overrides = planned.settings, {one.key: one.value for one in planned.settings}
    with make({}, None) as as_is:
        old, has_failed = Variant(as_is, step, clock), Event()
        old.batches = _noting(old.batches, has_failed)
        try:
            with make(overrides, None) as changed:
                new = Variant(changed, step, clock)
                interleave(
                    [old, new],
                    window_s=window_s,
                    most_s=most_s,
                    clock=clock,
                    is_enough=lambda: _is_clear(PairedGains.of(new.windows, old.windows), planned),
                )
                extra_bytes = _memory_of(new) - _memory_of(old)
        except StopIteration:
            return not_tried(settings, "the source gave no more batches when it was iterated over again")
        except LoaderkitError as error:  # a function that cannot be sent to a process, say
            if has_failed.is_set():
                return not_tried(settings, f"the pipeline as it is failed meanwhile: {error}")
            return SettingsTrial(settings=settings, outcome="failed", note=str(error))
    gains = PairedGains.of(new.windows, old.windows)
    speedup, interval = ratio_of(new, old)
    is_held_up = _is_short(gains, planned)
    outcome = outcome_of(gains)
    return SettingsTrial(
        settings=settings,
        outcome="no faster" if is_held_up and outcome == "likely faster" else outcome,
        before=old.rate,
        after=new.rate,
        speedup=speedup,
        interval=interval,
        stall_after_percent=new.stall_percent,
        num_pairs=len(gains.speed),
        num_faster=num_won(gains.speed),
        is_held_up=is_held_up,
        seconds=clock.now_s() - begin_s,
        extra_cpus=new.cpus - old.cpus,
        extra_bytes=extra_bytes,
    )


def _noting(batches: Iterator[Any], has_failed: Event) -> Iterator[Any]:
    """The batches; an error is noted on its way."""
    try:
        yield from batches
    except LoaderkitError:
        has_failed.set()
        raise


def outcome_of(gains: PairedGains) -> TrialOutcome:
    """What pairs of windows say of settings."""
    if gains.outcome() == "sure":
        return "faster"
    if gains.outcome(_LIKELY_WRONG) == "sure":
        return "likely faster"
    return "slower" if gains.falls_short_of(1.0) else "no faster"


def _is_clear(gains: PairedGains, planned: PlannedTrial) -> bool:
    """True if more pairs would hardly change the conclusion."""
    return gains.is_clear() or (_is_short(gains, planned))


def _is_short(gains: PairedGains, planned: PlannedTrial) -> bool:
    """True if, for sure, more workers bring less than half of what workers at their own pace would bring."""
    return planned.apart is not None and gains.falls_short_of(planned.apart)


def _memory_of(variant: Variant) -> int:
    """Bytes for batches, and of the process that loads, if there is one."""
    memory = variant.loader.stats().memory
    return int(memory.get("allocated_bytes", 0)) + int(memory.get("process_rss_peak_bytes", 0))


def with_trial(report: Report, trial: SettingsTrial) -> Report:
    """The report with what a trial of settings found: the settings only if they are faster, or were not tried, and the kind
    that was measured."""
    verdict = report.verdict
    row = _row_of(report)
    told = _told(verdict, trial, row)
    kind = told or verdict.kind
    settings = [one.model_copy(update={"tried": str(trial)}) for one in trial.settings] if trial.is_suggested else []
    changes: dict[str, Any] = {"kind": kind, "settings": settings, "tried": trial}
    changes["change"] = _change(verdict, trial, kind, "" if row is None else work_of(row))
    rival = _rival(verdict, trial, row) if told is None else None
    if told is not None:
        changes |= {"or_kind": None, "confidence": max(_SURE, verdict.confidence)}
    elif rival is not None:
        changes |= {"or_kind": rival.kind, "confidence": rival.confidence}
    if kind != verdict.kind:
        changes["evidence"] = f"{verdict.evidence}; with {say(trial.settings)} it is {kind}, not {verdict.kind}"
    causes = _causes(verdict, trial, changes, is_told=told is not None)
    changes["causes"] = causes if rival is None else [*causes[:1], rival, *causes[1:]]
    return report.model_copy(update={"verdict": verdict.model_copy(update=changes), "patch": patch_of(settings, trial)})


def _is_apart(verdict: VerdictPart, trial: SettingsTrial) -> bool:
    """True if this was a trial of more workers, and can show what limits. It cannot where that may be computing or the
    GIL, which such a trial does not tell apart."""
    may_be = _kinds(verdict) - {None}
    is_told = bool(may_be & _APART) and may_be <= _APART | {"bandwidth"}
    return is_told and any(map(_is_of_workers, trial.settings)) and trial.before is not None


def _told(verdict: VerdictPart, trial: SettingsTrial, row: StageRow | None) -> str | None:
    """The kind of limit that a trial of more workers shows; None if it was no such trial, or shows nothing."""
    if row is None or not _is_apart(verdict, trial):
        return None
    if trial.is_held_up == trial.is_suggested:
        return None  # it is either, or between both
    if trial.outcome == "faster":
        return "latency"
    if not trial.is_held_up:
        return None
    if verdict.kind == "waiting" and row.is_limited:
        return "waiting"  # a server that answers a few at a time: one worker alone did not do as much as all
    has_bytes = row.kind == "transfer" or (row.kind == "read" and row.num_bytes > 0)
    return "bandwidth" if has_bytes else "lock"


def _rival(verdict: VerdictPart, trial: SettingsTrial, row: StageRow | None) -> Cause | None:
    """What a trial of more workers speaks for without being sure, if that is not what the figures say."""
    is_latency = verdict.kind in ("latency", "waiting")
    if row is None or verdict.or_kind is not None or not _is_apart(verdict, trial) or trial.is_suggested == is_latency:
        return None
    return Cause(
        stage=verdict.stage,
        kind="lock" if is_latency else "latency",
        percent=verdict.percent,
        confidence=round(_DOUBTED * verdict.confidence, 2),
        change=unlocked(row.name) if is_latency else say(trial.settings),
    )


def _change(verdict: VerdictPart, trial: SettingsTrial, kind: str, stage_kind: str) -> str:
    """What to do, in words, after a trial."""
    is_as_it_was = verdict.or_kind is None and kind == verdict.kind
    if trial.outcome == "not tried" or (is_as_it_was and trial.is_suggested == bool(verdict.settings)):
        return verdict.change
    if trial.is_suggested:
        return f"{say(trial.settings)}; or {otherwise(kind, stage_kind)}"
    if kind == "lock":
        return unlocked(verdict.stage or "")
    if kind == "bandwidth":
        return FULL_LINK
    others = [
        one.change for one in verdict.causes if one.stage == verdict.stage and not _are_tried(one.settings, trial)
    ]
    return others[0] if verdict.or_kind is not None and others else otherwise(kind, stage_kind)


def _causes(verdict: VerdictPart, trial: SettingsTrial, changes: dict[str, Any], *, is_told: bool) -> list[Cause]:
    """The causes after a trial: the first one is the verdict's; its rival is gone if the trial has decided between them."""
    causes = []
    for number, cause in enumerate(verdict.causes):
        if number == 0:
            shared = ("kind", "confidence", "change", "settings")
            causes.append(cause.model_copy(update={name: changes[name] for name in shared if name in changes}))
        elif not (is_told and cause.stage == verdict.stage):
            is_dropped = _are_tried(cause.settings, trial) and not trial.is_suggested
            causes.append(cause.model_copy(update={"settings": []}) if is_dropped else cause)
    return causes


def _are_tried(settings: Sequence[Setting], trial: SettingsTrial) -> bool:
    """True for settings that all were part of the trial."""
    tried = [(one.key, one.value) for one in trial.settings]
    return bool(settings) and all((one.key, one.value) in tried for one in settings)
