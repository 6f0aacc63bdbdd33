"""`loaderkit port`: a script's first DataLoader as a pipeline's YAML."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loaderkit.cli.outputs import check_free
from loaderkit.cli.script import IsModule, ScriptArguments, ScriptName, check_script, exit_code, run_script
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import Settings
from loaderkit.profile.port.first_loader import FirstLoader, ScriptStop

if TYPE_CHECKING:
    from loaderkit.profile.port.check import Build


def port(
    context: typer.Context,
    script: ScriptName,
    arguments: ScriptArguments = None,
    *,
    is_module: IsModule = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The pipeline that is written.")
    ] = Path("pipeline.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a pipeline with the samples of the first DataLoader that SCRIPT iterates over. SCRIPT is run up to there, and
    ended.

    What no stage or source does the same is named, and then nothing is written. Options come before SCRIPT. For its other
    DataLoaders: loaderkit watch --compare SCRIPT.
    """
    check_script(script, is_module=is_module)
    check_free(output, "--output", force=force)
    settings = context.obj
    assert isinstance(settings, Settings)
    settings.then = PortScript(script, tuple(arguments or ()), is_module, output.resolve(), force).run


@dataclass(frozen=True)
class PortScript:
    """What to run, and where its pipeline goes."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    output: Path
    force: bool

    def run(self) -> int:
        """Run it up to its first DataLoader, and write that; 0 if it was written, else 1, or what the script exits with.
        Raises OSError, BadParameter, LoaderkitError."""
        first = FirstLoader(Path(self.name).name, _build)
        first.begin()
        try:
            ended_by = run_script(self.name, self.arguments, is_module=self.is_module, joins=False)
        finally:
            first.end()
        if isinstance(ended_by, KeyboardInterrupt):
            raise ended_by
        if first.ported is None:
            code = exit_code(ended_by)
            console.say(
                f"error: {self.name} took no batch from a DataLoader of torch in this process: nothing is written"
            )
            return code or 1
        if not isinstance(ended_by, (ScriptStop, type(None))):  # in what it does at its end
            exit_code(ended_by)
        return self._write(first)

    def _write(self, first: FirstLoader) -> int:
        from loaderkit.profile.port.write import tensors_beside, write_pipeline
        from loaderkit.profile.render.ported import say_check

        ported = first.ported
        assert ported is not None
        console.say(f"{Path(self.name).name}: {first.name}")
        if ported.pipeline is None:
            console.say("error: no pipeline gives the same samples, so none is written:")
            for one in ported.unported:
                console.say(f"  {one}")
            return 1
        if first.checked is not None:
            console.say(f"  {say_check(first.checked)}")
        for note in ported.notes:
            console.say(f"  note: {note}")
        if ported.source is not None and ported.source.tensors:
            check_free(tensors_beside(self.output), "--output", force=self.force)
        command = shlex.join(["loaderkit", "port", self.name, *self.arguments])
        written = write_pipeline(ported, self.output, command)
        console.say(f"written: {', '.join(map(str, written))}")
        return 0


def _build() -> Build:
    from loaderkit.loader import build  # with torch, which the script has imported by now

    return build
