"""`loaderkit watch`: run a training script as it is, and say what its loops over DataLoaders wait for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.atomic_file import why_not_writable, write_atomically
from loaderkit.cli.outputs import check_free
from loaderkit.cli.script import IsModule, ScriptArguments, ScriptName, check_script, exit_code, run_script
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import Settings
from loaderkit.profile.watched.script import ScriptLoaders, ScriptLoop

if TYPE_CHECKING:
    from loaderkit.profile.port.compare import ScriptComparison
    from loaderkit.profile.report import Report

_MOST_SHOWN = 5


def watch(
    context: typer.Context,
    script: ScriptName,
    arguments: ScriptArguments = None,
    *,
    is_module: IsModule = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write the report as one HTML page with charts.", show_default=False
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="When SCRIPT is over, run the same samples through a pipeline of loaderkit with the script's own step, "
            "for 10 to 30 s, and write that pipeline.",
        ),
    ] = False,
    pipeline: Annotated[
        Path, typer.Option("--pipeline", metavar="FILE", help="Where --compare writes the pipeline.")
    ] = Path("pipeline.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Let --compare overwrite FILE.")] = False,
) -> None:
    """Run SCRIPT as it is, and say on stderr what its loops over torch's DataLoaders wait for, which of its lines take that
    time, and what to change.

    Options come before SCRIPT. Of several DataLoaders each has a report, in files FILE, FILE-2, ... (so have their pipelines);
    under torchrun each rank: torchrun -m loaderkit watch SCRIPT.
    """
    for path, option in ((json_path, "--json"), (html, "--html")):
        if path is not None and (reason := why_not_writable(path)) is not None:
            raise typer.BadParameter(reason, param_hint=option)
    missing = [name for name in ("jinja2", "vl_convert") if html is not None and importlib.util.find_spec(name) is None]
    if missing:
        raise typer.BadParameter(f"it needs {missing[0]}: pip install 'loaderkit[profile]'", param_hint="--html")
    check_script(script, is_module=is_module)
    if compare:
        check_free(pipeline, "--pipeline", force=force)
    wanted = Script(
        script,
        tuple(arguments or ()),
        is_module,
        json_path and json_path.resolve(),  # the script may go to another folder
        html and html.resolve(),
        pipeline.resolve() if compare else None,
        force,
    )
    settings = context.obj
    assert isinstance(settings, Settings)
    settings.then = wanted.run


@dataclass(frozen=True)
class Script:
    """What to run, and where its reports go."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    json: Path | None
    html: Path | None
    pipeline: Path | None = None  # where --compare writes, or None to compare nothing
    force: bool = False

    def run(self) -> int:
        """Run it in this process, as Python would; returns the exit code that it asks for. Raises KeyboardInterrupt for
        a script that Ctrl-C ended, after its reports."""
        note = None if self.pipeline is None else self._port
        loaders, pid = ScriptLoaders(Path(self.name).name, note), os.getpid()
        loaders.begin()
        with _on_sigterm(lambda: self._deliver(loaders, KeyboardInterrupt, None, "terminated by SIGTERM")):
            ended_by = run_script(self.name, self.arguments, is_module=self.is_module)
            code, is_error = exit_code(ended_by), not isinstance(ended_by, (SystemExit, type(None)))
            if os.getpid() == pid:  # and no child that the script has forked, which has come to its end as well
                self._deliver(loaders, type(ended_by) if is_error and ended_by else None, ended_by)
        if type(ended_by) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return code

    def _deliver(
        self,
        loaders: ScriptLoaders,
        kind: type[BaseException] | None,
        error: BaseException | None,
        why: str | None = None,
    ) -> None:
        """Show and write the reports. An error in that is shown, and does not change the script's exit code."""
        try:
            loops = loaders.loops(kind, error)
            reports = self._compared(loops, why or (f"the script was ended by {kind.__name__}" if kind else None))
            if why is not None:
                reports = [report.model_copy(update={"partial": why}) for report in reports]
            with_batches = [report for report in reports if report.num_batches]
            # If stderr is full or closed, files can be written all the same.
            with contextlib.suppress(OSError, ValueError):
                _show(with_batches, [report for report in reports if not report.num_batches])
            self._write(with_batches)
        except Exception as failed:
            _say(f"there is no report: {type(failed).__name__}: {failed}")

    @cached_property
    def _comparison(self) -> ScriptComparison:
        from loaderkit.loader import build  # with torch, which the script has imported by now
        from loaderkit.profile.port.compare import ScriptComparison

        assert self.pipeline is not None
        return ScriptComparison(Path(self.name).name, self.pipeline, self.force, build)

    def _port(self, loader: Any) -> Any:
        return self._comparison.port(loader)

    def _compared(self, loops: list[ScriptLoop], ended: str | None) -> list[Report]:
        """The reports; if wanted, with the pipelines of loaders that gave batches. `ended`: why the pipelines are not run."""
        if self.pipeline is None:
            return [loop.report for loop in loops]
        if ended is None and any(loop.report.num_batches for loop in loops):
            _say("the script is over; its samples are now run through a pipeline of loaderkit (Ctrl-C leaves that out)")
        reports, number = [], 0
        for loop in loops:
            number += loop.report.num_batches > 0
            is_empty = not loop.report.num_batches
            reports.append(loop.report if is_empty else self._comparison.report(loop, number, ended))
        return reports

    def _write(self, reports: list[Report]) -> None:
        """Write each report to each file. If one cannot be written, the others still are."""
        written: list[Path] = []
        for number, report in enumerate(reports, 1):
            parts = [f"-rank{report.rank}"] if report.world_size > 1 else []
            suffix = "".join([*parts, f"-{number}" if number > 1 else ""])
            for option, file, render in (("--json", self.json, _to_json), ("--html", self.html, _to_html)):
                if file is None:
                    continue
                path = file.with_stem(f"{file.stem}{suffix}")
                try:
                    write_atomically(path, render(report))
                    written.append(path)
                except Exception as error:
                    reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    _say(f"{path} was not written ({reason}): name another place by {option}")
        if not reports:
            for file in filter(None, (self.json, self.html)):
                _say(f"there is nothing to write to {file}")
        if written:
            with contextlib.suppress(OSError, ValueError):
                console.say(f"written: {', '.join(map(str, written))}")


def _say(message: str) -> None:
    """A line on stderr, if that takes one: the script's exit code does not depend on it."""
    with contextlib.suppress(OSError, ValueError):
        console.say(f"loaderkit watch: {message}")


def _to_json(report: Report) -> str:
    return report.to_json()


def _to_html(report: Report) -> str:
    from loaderkit.profile.render.html import to_html  # with jinja2

    return to_html(report)


def _show(reports: list[Report], without_batches: list[Report]) -> None:
    """Show the reports, the loop that waited longest first."""
    from loaderkit.profile.render.terminal import render, to_text

    for report in without_batches[:_MOST_SHOWN]:
        why = report.partial or "its data set is empty, smaller than a batch with drop_last, or the loop ended before"
        _say(f"{report.name} gave no batch: {why}")
    if not reports:
        if not without_batches:
            _say(
                "the script took no batch from a DataLoader of torch in this process (of other loops: "
                "loaderkit.watch(...) in the script; under torchrun: torchrun -m loaderkit watch SCRIPT)"
            )
        return
    ranked = sorted(reports, key=lambda report: -report.stall.total_s)
    for report in ranked[:_MOST_SHOWN]:
        if sys.stderr is not None and sys.stderr.isatty():
            console.stderr().print("", render(report))
        elif sys.stderr is not None:  # in one piece, as other ranks write there, too
            sys.stderr.write(f"\n{to_text(report)}")
            sys.stderr.flush()
    if rest := ranked[_MOST_SHOWN:]:
        console.say(f"and {len(rest)} more, which waited {sum(report.stall.total_s for report in rest):.1f} s in all")


@contextlib.contextmanager
def _on_sigterm(deliver: Any) -> Iterator[None]:
    """If nothing else handles SIGTERM, deliver the reports first, and then end by the signal as usual. Not in forked
    processes."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    pid = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() == pid:
            deliver()
        os.kill(os.getpid(), signal.SIGTERM)

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        forget()
