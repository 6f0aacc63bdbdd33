"""`loaderkit profile`: run a pipeline as training would, and say why it waits, what to change, and what that brings."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from loaderkit.cli.experiments import Consumer, StepTime, maker, open_step, progress, sizes_of
from loaderkit.cli.outputs import Outputs, compared, deliver, deliver_merged, open_outputs, read_report
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import (
    Assignments,
    Debug,
    checkpoint_config,
    described,
    open_plan,
    parse_assignments,
)
from loaderkit.profile.experiments.loops import endless, run_steps, sleep_step

if TYPE_CHECKING:
    from loaderkit.loader import Loader
    from loaderkit.pipeline.config.model import PipelineConfig
    from loaderkit.pipeline.execution_plan import ExecutionPlan
    from loaderkit.profile.experiments.interleave import Make
    from loaderkit.profile.experiments.loops import Step
    from loaderkit.profile.fail_if import Condition
    from loaderkit.profile.recording import Profile
    from loaderkit.profile.report import Report

_NUM_STEPS = 60
_MOST_S = 45.0  # for the steps, if their number is not given
_HEADROOM_S = 3.0  # for each rate, or three times that
_TRIAL_S = 30.0
_CHECK_S = 12.0
_VERIFY_S = 45.0


class Limits(NamedTuple):
    """When the loop ends: at the first of these limits."""

    num_steps: int | None
    seconds: float | None


@dataclass(frozen=True)
class Wanted:
    """The additional measurements that were asked for, and the samples that they run on: a `Subset`."""

    config: PipelineConfig
    subset: Any
    cold: bool
    what_if: bool
    verify: bool | None  # None for the verdict's settings only


def profile(
    pipeline: Annotated[
        list[Path],
        typer.Argument(
            metavar="P", help="A pipeline's YAML file; or a report's JSON file, to be shown again.", show_default=False
        ),
    ],
    *,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="How many steps to look at; default: 60, or those of 45 s.", show_default=False),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Instead: for how long to look.", show_default=False)
    ] = None,
    step_time: StepTime = None,
    consumer: Consumer = None,
    cold: Annotated[bool, typer.Option("--cold", help="Measure with files out of the page cache, too.")] = False,
    what_if: Annotated[bool, typer.Option("--what-if", help="Predict what each change would bring.")] = False,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Default: try what the verdict says to set, in turns with the file as it is, for up to 30 s besides "
            "starting; where batches are slow for up to 60 s, or 120 s if the gain is small. A "
            "--consumer gets the batches of both. --verify: also check the verdict by slowing that stage down, and "
            "predictions that can be tried. --no-verify: try nothing.",
            show_default=False,
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report as one HTML page with charts.", show_default=False),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINTS",
            help="Instead: restore the newest checkpoint below this folder or URL, with the loader started beside it, and say "
            "what the first step waited for.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record what every worker does, for ui.perfetto.dev.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="A folder for the report as JSON and text, and its change as a patch.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Compare with this earlier report, a JSON file: does it differ by more than noise? Several are better.",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="P are the JSON reports of all ranks of a job: find the straggler.")
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help='Exit with 1 if this holds, as in "stall>5%"; may be repeated.',
            show_default=False,
        ),
    ] = None,
    assignments: Assignments = None,
    debug: Debug = False,
) -> None:
    """Run pipeline P as training would, and say why it waits, what to change, and what that brings."""
    if steps is not None and seconds is not None:
        raise typer.BadParameter("give a number of steps or of seconds, not both", param_hint="--steps / --seconds")
    conditions = [_condition(text) for text in fail_if or ()]
    if merge and (baseline, trace, out, fail_if, assignments) != (None,) * 5:
        raise typer.BadParameter("--merge takes no other options than --json and --html", param_hint="--merge")
    outputs = open_outputs(json_path, html, trace, out, baseline or [])
    measures = any((steps, seconds, step_time, consumer, cold, what_if, verify is not None, trace, assignments))
    if merge or (path := _one(pipeline)).suffix == ".json":
        if measures:
            raise typer.BadParameter(
                "a report is only shown again: nothing is measured, recorded or set", param_hint="P"
            )
        _show_again(pipeline, outputs, conditions, merge=merge)
        return
    step = open_step(step_time, consumer)
    beside = any((steps, seconds, step, what_if, verify is not None, html, trace, baseline, fail_if))
    if _is_no_loop(path, start, assignments, outputs, cold=cold, beside=beside):
        return
    from loaderkit.loader import Loader  # torch, too
    from loaderkit.profile.experiments.trial import untried

    import_s = _seconds_since_start()
    limits = Limits(steps, seconds) if steps is not None or seconds is not None else Limits(_NUM_STEPS, _MOST_S)
    plan = open_plan(path, assignments)
    wanted = Wanted(described(path, assignments), _subset(plan), cold, what_if, verify)
    with Loader(plan) as loader:
        recording, ended_by = _record(loader, step, limits, import_s, trace=trace is not None)
    report = untried(recording.result, "the run ended before it could be")
    additions: dict[str, Any] = {}
    try:
        if ended_by is None:
            _measure(additions, report, maker(path, assignments, sizes_of(report.config)), step, wanted)
    except (Exception, KeyboardInterrupt) as error:  # the parts measured so far are shown
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
        ended_by, additions["partial"] = error, f"{why} after the loop"
    report = report.model_copy(update=additions)
    report = compared(report, outputs)
    deliver(report, outputs, path, recording.trace_json)
    if step is None and not outputs.is_on_stdout:
        console.tell("\nThe loop did nothing but wait: this is the loader's own speed. --step-time imitates training.")
    if isinstance(ended_by, KeyboardInterrupt):
        raise console.Interrupted(f"interrupted: the report is on {report.num_batches} batches")
    if ended_by is not None:
        raise ended_by
    _check(report, conditions)


def _is_no_loop(
    path: Path, start: str | None, assignments: list[str] | None, outputs: Outputs, *, cold: bool, beside: bool
) -> bool:
    """Measure a start, or a restore, and True; False for a pipeline of batches. `beside`: there are options for that alone."""
    if start is not None:
        if beside or cold:
            raise typer.BadParameter("only --json, --out and --set apply beside it", param_hint="--start")
        _profile_start(path, start, assignments, outputs)
        return True
    if (restoring := checkpoint_config(path, assignments)) is None:
        return False
    if beside:
        raise typer.BadParameter(
            f"{path} restores a checkpoint, which has no batches: of the options --cold, --json, --out and --set apply",
            param_hint="P",
        )
    _profile_restore(restoring, outputs, cold=cold)
    return True


def _profile_restore(config: PipelineConfig, outputs: Outputs, *, cold: bool) -> None:
    """Read a checkpoint through, and say how near that came to what its store gives."""
    from loaderkit.profile.restore_report import profile_restore

    with progress("reading"):
        report = profile_restore(config, cold=cold)
    deliver(report, outputs)
    if report.partial is not None:
        raise console.Interrupted(f"interrupted: the report is on {report.num_tensors} tensors")


def _profile_start(path: Path, checkpoints: str, assignments: list[str] | None, outputs: Outputs) -> None:
    """Start from the newest checkpoint, up to the first batch, and say what that waited for."""
    import_s = _seconds_since_start()
    from loaderkit.checkpoint import latest
    from loaderkit.joint_start import start
    from loaderkit.profile.start.critical_path import start_report, state_like

    with progress("starting"):
        into = state_like(latest(checkpoints), "loader")
        begin_s = time.perf_counter()
        with start(path, checkpoints, into, overrides=parse_assignments(assignments or [])) as run:
            asked_s = time.perf_counter()
            next(iter(run.loader))
            done_s = time.perf_counter()
            about = run.loader.as_subject().subject()
    first_batch = (asked_s - begin_s, done_s - begin_s)
    found = {"list_s": about.list_s, "index_s": about.index_s}
    deliver(start_report(about.name, run.step, run.times, first_batch, import_s, **found), outputs)


def _one(given: list[Path]) -> Path:
    if len(given) > 1:
        raise typer.BadParameter("one pipeline at a time; the reports of several ranks need --merge", param_hint="P")
    return given[0]


def _show_again(given: list[Path], outputs: Outputs, conditions: list[Condition], *, merge: bool) -> None:
    """Show reports that were made earlier: one alone, one against another, or those of all ranks together."""
    from loaderkit.profile.ranks import merge as merged

    reports = [read_report(path, "P") for path in given]
    if not merge:
        report = compared(reports[0], outputs)
        deliver(report, outputs)
        _check(report, conditions)
        return
    try:
        job = merged(reports)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--merge") from None
    deliver_merged(job, reports, outputs)


def _record(
    loader: Loader, step: Step | None, limits: Limits, import_s: float | None, *, trace: bool
) -> tuple[Profile, BaseException | None]:
    """A recording of a loop of our own, and what ended it early, if anything did: Ctrl-C, or an error."""

    recording = loader.profile(import_s=import_s, trace=trace)
    ended_by: BaseException | None = None
    try:
        with progress("steps", limits.num_steps) as show, recording:
            run_steps(
                endless(loader), step or sleep_step(0.0), num_steps=limits.num_steps, seconds=limits.seconds, show=show
            )
    except (Exception, KeyboardInterrupt) as error:
        ended_by = error
    return recording, ended_by


def _subset(plan: ExecutionPlan) -> Any:
    """The samples that headroom is measured on."""
    from loaderkit.profile.experiments.headroom import MOST_BATCHES, Subset, files_of

    schedule, source = plan.schedule, plan.source
    num_batches = min(MOST_BATCHES, schedule.num_batches())
    if plan.order.core.sources:
        return Subset(num_batches, None, "the files of a mixture are not put out of the page cache")
    if plan.connector is None:
        return Subset(num_batches, None, "what a data set of Python objects reads is not known")
    positions = schedule.positions(0, 0, num_batches) % schedule.num_samples
    samples = [index for reads in plan.order.reads(0, positions, 0, 1) for index in reads.samples.tolist()]
    paths = files_of(source, plan.connector, samples)
    return Subset(num_batches, paths, "the samples are in a store, whose own caches cannot be emptied from here")


def _measure(additions: dict[str, Any], report: Report, make: Make, step: Step | None, wanted: Wanted) -> None:
    """Add the parts of the report that were asked for, one after the other, so that an error keeps those before it."""
    from loaderkit.profile.experiments.causal import check_verdict
    from loaderkit.profile.experiments.headroom import measure_headroom
    from loaderkit.profile.experiments.trial import tried, untried
    from loaderkit.profile.whatif.predict import steady_rate
    from loaderkit.profile.whatif.table import verify, well_known, what_if

    loop = step or sleep_step(0.0)
    if wanted.verify is False:
        report = untried(report, "--no-verify")
    else:
        with progress("trying what the verdict says to set"):
            report = tried(make, loop, report, wanted.config, seconds=_TRIAL_S, at_any_length=wanted.verify is True)
    additions["verdict"], additions["patch"] = report.verdict, report.patch
    with progress("headroom"):
        additions["headspace"] = measure_headroom(
            make, step, wanted.subset, cold=wanted.cold, seconds=_HEADROOM_S, least_per_s=steady_rate(report)
        )
    if wanted.what_if:
        rows, additions["model_error_percent"] = what_if(report, wanted.config)
        additions["what_if"] = well_known(rows)
        additions["num_unsure"] = len(rows) - len(additions["what_if"])
    if wanted.verify:
        with progress("checking the verdict"):
            check = check_verdict(make, loop, report, seconds=_CHECK_S)
        sure = report.verdict.confidence
        if check is not None and check.agrees is not None:
            sure = round(1 - (1 - sure) / 2, 2) if check.agrees else round(min(sure, 0.3), 2)
        additions["verdict"] = report.verdict.model_copy(update={"check": check, "confidence": sure})
    if wanted.verify and wanted.what_if:
        with progress("trying changes"):
            verify(make, loop, additions["what_if"], seconds=_VERIFY_S)


def _condition(text: str) -> Condition:
    from loaderkit.profile.fail_if import parse_condition

    try:
        return parse_condition(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--fail-if") from None


def _check(report: Report, conditions: list[Condition]) -> None:
    holding = [condition for condition in conditions if condition.holds(report)]
    for condition in holding:
        console.say(f"failed: {condition.say(report)}")
    if holding:
        raise typer.Exit(1)


def _seconds_since_start() -> float | None:
    """How long this process has been running, from when the kernel made it; None if the kernel does not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
