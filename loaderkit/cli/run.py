"""`loaderkit run`: iterate over a pipeline as training would, and show what the loop waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.atomic_file import write_atomically
from loaderkit.cli.experiments import StepTime, open_step
from loaderkit.cli.restore import run_checkpoint
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import AsJson, Assignments, Debug, PipelineFile, checkpoint_config, open_plan
from loaderkit.errors import StateError
from loaderkit.profile.render.summary import print_summary, reading

if TYPE_CHECKING:
    from loaderkit.loader import Loader
    from loaderkit.pipeline.execution_plan import ExecutionPlan
    from loaderkit.profile.experiments.loops import Step

_SECONDS_A_LINE = 5.0
_SECONDS_A_LOOK = 0.2


def run(
    pipeline: PipelineFile,
    *,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs; what is left of a resumed one counts.")] = 1,
    batches: Annotated[int | None, typer.Option(min=1, help="Stop after this number of batches.")] = None,
    step_time: StepTime = None,
    resume: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Continue from the state saved in this file."),
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the state to this file in the end, also after Ctrl-C.")
    ] = None,
    only_quarantined: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="Instead: try this quarantine file's samples again, as in their epochs. Exit code 1 if one is bad or untried.",
        ),
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Iterate over pipeline P, show the speed, and in the end what the loop waited for."""
    if only_quarantined is not None:
        if batches is not None or resume is not None or save_state is not None or epochs != 1 or step_time is not None:
            raise typer.BadParameter(
                "goes with no other option of the loop: there is none", param_hint="--only-quarantined"
            )
        _retry_quarantined(pipeline, only_quarantined, assignments, as_json)
        return
    step = open_step(step_time)
    if save_state is not None and not save_state.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {save_state.absolute().parent}", param_hint="--save-state")

    from loaderkit.loader import Loader

    if (config := checkpoint_config(pipeline, assignments)) is not None:
        run_checkpoint(config, as_json)
        return
    plan = open_plan(pipeline, assignments)
    with Loader(plan, has_metrics=True) as loader:
        if resume is not None:
            loader.load_state_dict(read_state(resume))
        passes = plan_passes(plan, loader, epochs)
        started_s = time.perf_counter()
        try:
            first_epoch = loader.state_dict()["epoch"]
            is_known = plan.schedule.knows_length and not plan.config.skips_empty_batches
            has_total = is_known or batches is not None
            num_batches = _iterate(loader, passes, batches, step, has_total=has_total)
        except KeyboardInterrupt:
            note = ""
            if save_state is not None:
                save_state_of(loader, save_state)
                note = f"; the state is in {save_state}, continue with --resume {save_state}"
            raise console.Interrupted(f"interrupted after {loader.stats().num_batches} batches{note}") from None
        wall_s = time.perf_counter() - started_s
        if save_state is not None:
            save_state_of(loader, save_state)
        stats = loader.stats().to_dict()
        result = {
            "pipeline": plan.config.name,
            "epochs": loader.state_dict()["epoch"] - first_epoch,
            "batches": num_batches,
            "samples": stats["num_samples"],
            "dropped": stats["num_dropped"],
            "wall_s": wall_s,
            "stats": stats,
        }
    if as_json:
        console.tell_json(result)
    else:
        _tell(result, has_step=step is not None)


def _retry_quarantined(pipeline: Path, quarantine: Path, assignments: list[str] | None, as_json: bool) -> None:
    from loaderkit.pipeline.delivery.bad_samples import (
        indices_of,
        quarantined_shards,
        read_quarantine,
        retry_quarantined,
    )
    from loaderkit.stages.time_limit import NotCalledError

    lines, shards = read_quarantine(quarantine), quarantined_shards(quarantine)
    plan = open_plan(pipeline, assignments, on_this_thread=True)
    if plan.config.kind.is_stream:
        raise typer.BadParameter("an iterable gives no single samples", param_hint="--only-quarantined")
    places = indices_of(plan.source, lines)
    tried: dict[str, list[dict[str, Any]]] = {"bad": [], "good": [], "gone": [], "untried": []}
    tried["gone"] = [line._asdict() for line in lines if line not in places]
    for line, error in retry_quarantined(plan, places):
        if error is None:
            tried["good"].append(line._asdict())
        else:
            state = "untried" if isinstance(error.__cause__, NotCalledError) else "bad"
            tried[state].append({**line._asdict(), "stage": error.stage, "error": str(error)})
    still_bad = {shard.name: str(shard) for shard in plan.source.bad_shards}
    good_shards = [name for name in shards if name not in still_bad]
    if as_json:
        of_shards = {"bad_shards": [*still_bad.values()], "good_shards": good_shards}
        console.tell_json({"pipeline": plan.config.name, **tried, **of_shards})
    else:
        for said in still_bad.values():
            console.tell(f"bad   shard {said}")
        for name in good_shards:
            console.tell(f"good  shard {name}")
        _tell_tried(tried)
    if tried["bad"] or tried["untried"] or still_bad:
        raise typer.Exit(1)


def _tell_tried(tried: Mapping[str, list[dict[str, Any]]]) -> None:
    for state in ("bad", "untried"):
        for one in tried[state]:
            console.tell(f"{state:<5} {_said(one)} (epoch {one['epoch']}): {one['error']}")
    for one in tried["good"]:
        console.tell(f"good  {_said(one)} (epoch {one['epoch']})")
    for one in tried["gone"]:
        console.tell(f"gone  {_said(one)}: the data set has it no more")
    console.tell(", ".join(f"{len(some)} {state}" for state, some in tried.items() if some or state != "untried"))


def _said(one: Mapping[str, Any]) -> str:
    return one["key"] if one["mixed"] is None else f"{one['mixed']}: {one['key']}"


def plan_passes(plan: ExecutionPlan, loader: Loader, num_epochs: int) -> list[int]:
    """The batches of each pass over the loader, at most; the first may be the rest of an epoch."""
    state = loader.state_dict()
    passes = [
        plan.schedule.of_epoch(state["epoch"] + number).num_batches(0 if number else state["position"])
        for number in range(num_epochs)
    ]
    last = plan.config.order.epochs
    return passes if last is None else passes[: max(0, last - state["epoch"])]


def _iterate(loader: Loader, passes: list[int], limit: int | None, step: Step | None, *, has_total: bool) -> int:
    total = sum(passes) if limit is None else min(limit, sum(passes))
    num_batches = 0
    with progress(loader, total if has_total else None) as show:
        for _ in passes:
            if num_batches == total:
                break
            for batch in loader:
                num_batches += 1
                show(num_batches)
                if step is not None:
                    step(batch)
                if num_batches == total:
                    break
    return num_batches


@contextmanager
def progress(
    loader: Loader, total: int | None, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal, else a line every few seconds; takes the number of batches so far."""
    screen = console.stderr()
    if not screen.is_terminal:
        yield _lines(loader, total, clock)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=total, speed="")
        due_s = 0.0

        def show(num_batches: int) -> None:
            nonlocal due_s
            now = clock()
            if now >= due_s:
                due_s = now + _SECONDS_A_LOOK
                bar.update(task, completed=num_batches, speed=_speed(loader))

        yield show


def _lines(loader: Loader, total: int | None, clock: Callable[[], float]) -> Callable[[int], None]:
    started_s = clock()
    due_s = started_s + _SECONDS_A_LINE

    def show(num_batches: int) -> None:
        nonlocal due_s
        now = clock()
        if now >= due_s:
            due_s = now + _SECONDS_A_LINE
            if total is None:
                console.say(f"batch {num_batches}, {_speed(loader)}")
                return
            left_s = (now - started_s) / num_batches * (total - num_batches)
            console.say(f"batch {num_batches} of {total}, {_speed(loader)}, {left_s:.0f} s left")

    return show


def _speed(loader: Loader) -> str:
    stats = loader.stats().to_dict()
    return f"{stats['throughput']['samples_per_s']:.0f} samples/s, stalled {stats['stall']['percent']:.0f} %"


def read_state(path: Path) -> dict[str, Any]:
    """The state in a file written by `--save-state`. Raises StateError, OSError."""

    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} holds no state, which is JSON as written by --save-state: {error}") from error
    if not isinstance(state, dict):
        raise StateError(f"{path} holds no state as written by --save-state, but {type(state).__name__}")
    return state


def save_state_of(loader: Loader, path: Path) -> None:
    """Write the loader's position, atomically."""

    write_atomically(path, json.dumps(loader.state_dict(), indent=2) + "\n")


def _tell(result: dict[str, Any], *, has_step: bool) -> None:

    rate = result["samples"] / result["wall_s"] if result["wall_s"] else 0.0
    dropped = f", {result['dropped']} dropped by filter" if result["dropped"] else ""
    console.tell(
        f"{result['pipeline']}: {result['batches']} batches, {result['samples']} samples in {result['wall_s']:.2f} s, "
        f"{rate:.0f} samples/s{dropped}\n"
    )
    if not result["batches"]:
        return
    print_summary(console.stdout(), result["stats"])
    console.tell()
    if not has_step:
        console.tell("The loop did nothing but wait: this is the loader's own speed. --step-time imitates training.")
    console.tell(reading(result["stats"]))
