"""Where the report of `profile` and the output of other commands go: checked before the run, written after it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loaderkit._internal.atomic_file import why_not_writable, write_atomically
from loaderkit.cli.terminal import console

if TYPE_CHECKING:
    from loaderkit.profile.ranks import Merged
    from loaderkit.profile.report import Report, RestoreReport, StartReport


@dataclass(frozen=True)
class Outputs:
    """The files to write. `baseline` holds the earlier reports to compare with."""

    json: Path | None  # None for no file, or for stdout
    is_on_stdout: bool
    html: Path | None
    trace: Path | None
    folder: Path | None
    baseline: list[Report]


def open_outputs(
    json_path: str | None, html: Path | None, trace: Path | None, folder: Path | None, baseline: list[Path]
) -> Outputs:
    """Raises BadParameter for a file that cannot be written or read."""

    path = None if json_path in (None, "-") else Path(str(json_path))
    for one, option in ((path, "--json"), (html, "--html"), (trace, "--trace")):
        if one is not None and (reason := why_not_writable(one)) is not None:
            raise typer.BadParameter(reason, param_hint=option)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{folder} cannot be made: {error.strerror}", param_hint="--out") from None
        if (reason := why_not_writable(folder / "report.json")) is not None:
            raise typer.BadParameter(reason, param_hint="--out")
    if html is not None:
        from loaderkit.profile.render.html import why_no_html

        if (reason := why_no_html()) is not None:
            raise typer.BadParameter(reason, param_hint="--html")
    earlier = [read_report(one, "--baseline") for one in baseline]
    return Outputs(path, json_path == "-", html, trace, folder, earlier)


def check_free(path: Path, option: str, *, force: bool) -> None:
    """Raises BadParameter for a file that exists, except with `force`, or that cannot be written."""
    if path.exists() and not force:
        raise typer.BadParameter(
            f"{path} is there already: name another file, or --force overwrites it", param_hint=option
        )
    if (reason := why_not_writable(path)) is not None:
        raise typer.BadParameter(reason, param_hint=option)


def read_report(path: Path, option: str) -> Report:
    """A report that was written as JSON. Raises BadParameter."""
    from loaderkit.profile.report import Report

    try:
        return Report.from_json(path.read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint=option) from None
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(
            f"{path} is no report that `loaderkit profile --json` has written: {reason}", param_hint=option
        ) from None


def compared(report: Report, outputs: Outputs) -> Report:
    """The report with its comparison to the baseline, if there is one."""
    from loaderkit.profile.compare import compare_reports

    if not outputs.baseline:
        return report
    return report.model_copy(update={"baseline": compare_reports(outputs.baseline, report)})


def deliver(
    report: Report | RestoreReport | StartReport,
    outputs: Outputs,
    pipeline: Path | None = None,
    trace_json: Callable[[], str] | None = None,
) -> None:
    """Show the report and write it. `pipeline` is the file that a patch would change; `trace_json` makes the trace."""
    from loaderkit.profile.render.terminal import render, to_text
    from loaderkit.profile.report import Report
    from loaderkit.profile.yaml_edit import diff_of

    loop = report if isinstance(report, Report) else None
    if outputs.is_on_stdout:
        sys.stdout.write(report.to_json())
    else:
        console.stdout().print(render(report))
    texts: dict[Path, str] = {}
    if outputs.json is not None:
        texts[outputs.json] = report.to_json()
    if outputs.trace is not None and trace_json is not None:
        texts[outputs.trace] = trace_json()
    stem, patch = None, None
    if outputs.folder is not None:
        stem = _stem(outputs.folder, report.name, f"-rank{loop.rank}" if loop and loop.world_size > 1 else "")
        texts |= {Path(f"{stem}.json"): report.to_json(), Path(f"{stem}.txt"): to_text(report)}
        patch = diff_of(pipeline, loop.verdict.settings) if loop and pipeline else None
        if patch is not None:
            found = (
                "" if loop is None or loop.verdict.tried is None else f"{' '.join(str(loop.verdict.tried).split())}\n"
            )
            texts[Path(f"{stem}.patch")] = f"{found}{patch}"  # `patch` ignores lines above the diff
    if outputs.html is not None and loop is not None:
        from loaderkit.profile.render.html import to_html

        texts[outputs.html] = to_html(loop)
    _write(texts)
    if patch is not None:
        console.say(f"to apply the change: patch {shlex.quote(str(pipeline))} < {shlex.quote(f'{stem}.patch')}")


def deliver_merged(job: Merged, reports: list[Report], outputs: Outputs) -> None:
    """Show and write the comparison of all ranks; the HTML page also shows the rank that waits longest."""
    from loaderkit.profile.render.tables import merged

    if outputs.is_on_stdout:
        sys.stdout.write(job.model_dump_json(indent=2) + "\n")
    else:
        console.stdout().print(merged(job))
    texts: dict[Path, str] = {}
    if outputs.json is not None:
        texts[outputs.json] = job.model_dump_json(indent=2) + "\n"
    if outputs.html is not None:
        from loaderkit.profile.render.html import to_html

        worst = max(job.ranks, key=lambda row: row.extra_s).rank
        texts[outputs.html] = to_html(next(report for report in reports if report.rank == worst), job)
    _write(texts)


def _write(texts: dict[Path, str]) -> None:

    for path, text in texts.items():
        write_atomically(path, text)
    if texts:
        console.say(f"written: {', '.join(map(str, texts))}")


def _stem(folder: Path, pipeline: str, rank: str = "") -> Path:
    """A path in the folder, without its suffix, at which no report exists yet."""
    name = f"{_file_name(pipeline)}-{datetime.now(UTC):%Y%m%d-%H%M%S}{rank}"
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(folder / one for one in names if not (folder / f"{one}.json").exists())


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in name)
