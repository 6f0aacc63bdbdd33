"""`loaderkit demo`: make training wait, see why, change it, see the gain; then kill training and resume it exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import AsJson, Debug


def demo(
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of the demo's data set, made if missing; default: the user's cache directory."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to train: half of it before the change.")] = 16,
    num_images: Annotated[int, typer.Option(min=24, help="How many photographs the data set has.")] = 320,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train with a slow function left in, say what training waited for, change it; then kill training and resume it."""
    from loaderkit.cli.demo.show import run_demo

    out = console.stderr() if as_json else console.stdout()
    result = run_demo(out, data=data, seconds=seconds, num_images=num_images)
    if as_json:
        console.tell_json(result)
    if not result["resumed_exactly"]:
        raise typer.Exit(1)
