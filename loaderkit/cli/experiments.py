"""What `profile` and `tune` share: the loop's step, and loaders of variants of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.units import parse_seconds
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import parse_assignments
from loaderkit.profile.experiments.loops import open_consumer, sleep_step

if TYPE_CHECKING:
    from loaderkit.profile.experiments.interleave import Make
    from loaderkit.profile.experiments.loops import Step

_SECONDS_A_LINE = 5.0

StepTime = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Sleep after each batch as long as a training step takes: 80ms, or by chance as in 80ms+-10ms (mean and "
        "standard deviation).",
        show_default=False,
    ),
]
Consumer = Annotated[
    str | None,
    typer.Option(
        metavar="PKG.MOD:FN",
        help="Instead: call this function with every batch: your training step.",
        show_default=False,
    ),
]


def parse_step_time(text: str) -> tuple[float, float]:
    """Mean and standard deviation in seconds, from "80ms" or "80ms+-10ms"."""

    mean, sign, deviation = text.replace("±", "+-").partition("+-")
    times = (mean, deviation if sign else "0s")
    try:
        if any(one.strip()[-1:].isdigit() for one in times):  # without a unit: 100 would be 100 s
            raise ValueError
        return parse_seconds(times[0]), parse_seconds(times[1])
    except ValueError:
        raise typer.BadParameter(
            f"expected a duration with its unit, such as 80ms, 1.5s or 80ms+-10ms, not {text!r}",
            param_hint="--step-time",
        ) from None


def open_step(step_time: str | None, consumer: str | None = None) -> Step | None:
    """The step to run after each batch; None if no option names one. Raises BadParameter, ConfigError."""

    if step_time is not None and consumer is not None:
        raise typer.BadParameter(
            "give the time of a step or what a step does, not both", param_hint="--step-time / --consumer"
        )
    if step_time is not None:
        return sleep_step(*parse_step_time(step_time))
    if consumer is None:
        return None
    return open_consumer(consumer)


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of workers and of batches ahead in a reported run, as overrides. A run that is compared with it
    starts with them and is not tuned."""
    prefetch = config.get("prefetch", {})
    return {
        f"prefetch.{name}": prefetch[name] for name in ("concurrency", "batches") if type(prefetch.get(name)) is int
    }


def maker(pipeline: Path, assignments: Sequence[str] | None, sizes: Mapping[str, Any] = MappingProxyType({})) -> Make:
    """Makes loaders of the pipeline with `sizes` and further overrides. They are endless and write no quarantine file."""
    from loaderkit.loader import Loader
    from loaderkit.pipeline.config.builder import to_config
    from loaderkit.pipeline.execution_plan import compile_pipeline

    given = {**parse_assignments(assignments or []), "order.epochs": None, "errors.quarantine": None, **sizes}

    def make(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        config = to_config(pipeline, {**given, **overrides})
        if config.prefetch.executor == "auto":  # it might become another one in the middle of a measurement
            executor = {"prefetch.executor": config.executor_with_workers}
            config = to_config(pipeline, {**given, **executor, **overrides})
        return Loader(compile_pipeline(config, slowdown=slowdown))

    return make


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal, else a line every few seconds; takes how many are done."""
    screen = console.stderr()
    if screen.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = (BarColumn(), MofNCompleteColumn()) if total is not None else ()
        with Progress(TextColumn(what), *counted, TimeElapsedColumn(), console=screen, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda num_done: bar.update(task, completed=num_done)
        return
    due_s = time.perf_counter() + _SECONDS_A_LINE

    def show(num_done: int) -> None:
        nonlocal due_s
        if time.perf_counter() >= due_s:
            due_s = time.perf_counter() + _SECONDS_A_LINE
            console.say(f"{what} {num_done}" + (f" of {total}" if total is not None else ""))

    yield show
