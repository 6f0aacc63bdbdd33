"""`loaderkit tune`: search for the sizes that are fastest here, and write them into the pipeline's file."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loaderkit._internal.atomic_file import why_not_writable, write_atomically
from loaderkit.cli.experiments import Consumer, StepTime, maker, open_step, progress
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import AsJson, Assignments, Debug, PipelineFile, checkpoint_config, described
from loaderkit.errors import LoaderkitError
from loaderkit.profile.experiments.loops import sleep_step

if TYPE_CHECKING:
    from loaderkit.profile.experiments.search import Tuned


class Apply(StrEnum):
    """Which settings are written into the file."""

    sure = "sure"
    best = "best"


def tune(
    pipeline: PipelineFile,
    *,
    write: Annotated[
        bool, typer.Option("--write", help="Write what is better for sure into the file, with comments.")
    ] = False,
    apply: Annotated[
        Apply | None,
        typer.Option(
            help="sure: the same as --write; best: also what is better, but not for sure.", show_default=False
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=5, help="About how long to search.")] = 90,
    step_time: StepTime = None,
    consumer: Consumer = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Search for the workers, the batches ahead and the executor with which pipeline P is fastest; show before and after."""
    write = write or apply is not None
    if write and assignments:
        raise typer.BadParameter(
            "with --set another pipeline is searched than the file: put the values into it first, or write nothing",
            param_hint="--write",
        )
    if write and (reason := why_not_writable(pipeline)) is not None:
        raise typer.BadParameter(reason, param_hint="--write")
    step = open_step(step_time, consumer)
    if checkpoint_config(pipeline, assignments) is not None:
        raise typer.BadParameter(f"{pipeline} restores a checkpoint, which has no batches to tune", param_hint="P")
    from loaderkit.profile.experiments.search import tune as search

    make, config = maker(pipeline, assignments), described(pipeline, assignments)
    with progress("tuning"):
        tuned = search(make, step or sleep_step(0.0), config, seconds=seconds, say=console.say)
    failure: Exception | None = None
    is_written = write and bool(tuned.settings or (tuned.offered and apply == Apply.best))
    if is_written:
        try:
            _write(pipeline, tuned)
        except (LoaderkitError, OSError) as error:  # the result is printed before the error
            failure, is_written = error, False
    if as_json:
        console.tell_json({**tuned.model_dump(mode="json"), "pipeline": config.name, "written": is_written})
    else:
        _tell(pipeline, tuned, is_written=is_written)
    if failure is not None:
        raise failure


def _write(pipeline: Path, tuned: Tuned) -> None:
    """Write the settings into the file, atomically, if the new text reads as the config that was measured."""
    from loaderkit.profile.experiments.search import with_comment
    from loaderkit.profile.yaml_edit import checked_edit

    text = checked_edit(pipeline.read_text(encoding="utf-8"), tuned.found)
    write_atomically(pipeline, with_comment(text, tuned, f"{datetime.now(UTC):%Y-%m-%d}"))


def _tell(pipeline: Path, tuned: Tuned, *, is_written: bool) -> None:
    from loaderkit.profile.render.terminal import say_rate
    from loaderkit.profile.yaml_edit import diff_of

    console.tell(f"before  {say_rate(tuned.before)}, {tuned.stall_before_percent:.0f} % of the time waiting")
    console.tell(f"after   {say_rate(tuned.after)}, {tuned.stall_after_percent:.0f} % of the time waiting")
    console.tell(
        f"        {tuned.speedup:.2f} times as fast, +- {tuned.interval:.2f}; of {tuned.num_pairs} pairs of windows faster in "
        f"{tuned.num_faster}, waiting less in {tuned.num_waiting_less}; after {tuned.seconds:.0f} s of search"
    )
    if not tuned.found:
        console.tell("nothing that is better: the file stays as it is")
        return
    for setting in tuned.found:
        console.tell(f"  {setting.key}: {setting.before} -> {setting.value}")
    if tuned.offered:
        console.tell("better, but not for sure")
    if is_written:
        console.tell(f"written to {pipeline}")
        return
    if patch := diff_of(pipeline, tuned.found):
        console.tell(f"\n{patch}")
    console.tell("--apply best puts this into the file" if tuned.offered else "--write puts this into the file")
