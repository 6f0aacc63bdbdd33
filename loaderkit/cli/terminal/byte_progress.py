"""A progress bar for work that is measured in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from loaderkit._internal.units import say_size
from loaderkit.cli.terminal import console

_SECONDS_A_LINE = 5.0


class ByteProgress(NamedTuple):
    """Shows the bytes that are done, of how many, in how long, with `note` behind them."""

    num_bytes: int
    total_bytes: int
    seconds: float
    note: str = ""


@contextmanager
def byte_progress(now: Callable[[], ByteProgress]) -> Iterator[Callable[[], None]]:
    """A bar on stderr if that is a terminal, else a line every few seconds; it gives a function to be called now and then."""
    screen = console.stderr()
    if not screen.is_terminal:
        yield _lines(now)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=now().total_bytes, note="")

        def show() -> None:
            progress = now()
            bar.update(task, completed=progress.num_bytes, total=progress.total_bytes, note=progress.note)

        yield show


def _lines(now: Callable[[], ByteProgress]) -> Callable[[], None]:
    due_s = _SECONDS_A_LINE

    def show() -> None:
        nonlocal due_s
        progress = now()
        if progress.seconds < due_s:
            return
        due_s = progress.seconds + _SECONDS_A_LINE
        speed = progress.num_bytes / progress.seconds
        left_s = (progress.total_bytes - progress.num_bytes) / speed if speed else 0.0
        console.say(
            f"{say_size(progress.num_bytes)} of {say_size(progress.total_bytes)}, {say_size(speed)}/s, "
            f"{left_s:.0f} s left, {progress.note}"
        )

    return show
