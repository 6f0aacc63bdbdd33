"""`loaderkit demo`: load real photographs, train, see what training waited for, stop in mid-epoch and resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loaderkit.cli import console
from loaderkit.cli.options import AsJson, Debug


def demo(
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of the demo's data set, made if missing; default: the user's cache directory."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="About how long to train.")] = 60,
    num_images: Annotated[int, typer.Option(min=24, help="How many photographs the data set has.")] = 2000,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints and print their folder.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a data set of photographs, train on it, stop in mid-epoch, resume in a new process: the whole job."""
    from loaderkit.cli.demo.show import run_demo

    out = console.stderr() if as_json else console.stdout()
    result = run_demo(out, data=data, seconds=seconds, num_images=num_images, keep=keep)
    if as_json:
        console.tell_json(result)
    if not result["resumed_exactly"]:
        raise typer.Exit(1)
