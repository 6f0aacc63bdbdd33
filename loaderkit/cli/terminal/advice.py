"""`loaderkit checkpoints --advise`: what saving takes, how often to save, and what each lever brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

from loaderkit._internal.units import parse_seconds, say_seconds, say_size
from loaderkit.cli.terminal import console


def advise_job(
    newest_bytes: Callable[[], int] | None,
    params: float | None,
    *,
    speeds: Mapping[str, str | None],
    mtbf: str,
    ranks: int,
    ranks_per_machine: int,
    as_json: bool,
) -> None:
    """Tell what is to be known of a job with so many parameters, or with checkpoints of the size that `newest_bytes` gives.
    `speeds`: the texts of --store, --local and --host-copy."""
    from loaderkit.checkpoint.timing.advice import PlannedJob, advice, sizes

    found = {name: _speed(name, text) for name, text in speeds.items() if text is not None}
    if "--store" not in found:
        raise typer.BadParameter("give how fast the store is written to, such as 2GB/s", param_hint="--store")
    if params is not None and not 0 < params < float("inf"):
        raise typer.BadParameter("expected a number of parameters such as 70e9", param_hint="--params")
    if params is None and newest_bytes is None:
        raise typer.BadParameter("give --params, or the URL of checkpoints of that size")
    parts = {} if params is None else sizes(params)
    job = PlannedJob(
        num_bytes=sum(parts.values()) if newest_bytes is None or params is not None else newest_bytes(),
        ranks=ranks,
        store=found["--store"],
        local=found.get("--local"),
        host=found["--host-copy"],
        mtbf_s=_duration(mtbf),
        ranks_per_machine=ranks_per_machine,
    )
    told = {"parts": parts, **advice(job)}
    if as_json:
        console.tell_json(told)
    else:
        _tell(told)


def _speed(name: str, text: str) -> int:
    from loaderkit.checkpoint.manager.settings import parse_speed

    try:
        speed = parse_speed(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected {error}", param_hint=name) from None
    if speed <= 0:
        raise typer.BadParameter(f"expected a speed above 0, not {text!r}", param_hint=name)
    return speed


def _duration(text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected {error}", param_hint="--mtbf") from None
    if seconds <= 0:
        raise typer.BadParameter(f"expected a duration above 0, not {text!r}", param_hint="--mtbf")
    return seconds


def _tell(told: Mapping[str, Any]) -> None:
    job = told["job"]
    rows = [(name, say_size(num_bytes), "") for name, num_bytes in told["parts"].items()]
    rows += [
        ("a checkpoint", say_size(job["num_bytes"]), f"{say_size(job['num_bytes'] / job['ranks'])} a rank"),
        ("training stops", _say(told["pause_s"]), "while a save is copied to host memory"),
        ("written", _say(told["flush_s"]), "behind training" + ("" if job["local"] is None else ", to `local`")),
    ]
    if told["upload_s"] is not None:
        rows.append(("uploaded", _say(told["upload_s"]), "behind training, to `to`"))
    rows += [
        ("host memory", say_size(told["host_bytes"]), "a machine, for the copies"),
        ("save each", _say(told["interval_s"]), f"with an interruption in {_say(job['mtbf_s'])}"),
        ("lost", _percent(told["lost_share"]), f"{told['lost_rank_hours_per_day']:.3g} rank hours a day"),
    ]
    _tell_table(rows)
    console.tell("")
    levers = [
        (lever["lever"], _percent(lever["lost_share"]), f"saved each {_say(lever['interval_s'])}")
        for lever in told["levers"]
    ]
    _tell_table([("with", "lost", ""), *levers])


def _tell_table(rows: list[tuple[str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for first, second, third in rows:
        console.tell(f"{first.ljust(widths[0])}  {second.rjust(widths[1])}  {third}".rstrip())


def _say(seconds: float) -> str:
    """A duration, in minutes or hours where it is long."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 5 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return say_seconds(seconds)


def _percent(share: float) -> str:
    return f"{100 * min(share, 1.0):.2f} %"
