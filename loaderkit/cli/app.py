"""The commands by name and their exit codes: 0 it worked; 1 the work failed; 2 wrong use; 130 Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from loaderkit import __version__
from loaderkit.cli.check import check, explain
from loaderkit.cli.checkpoints import checkpoints
from loaderkit.cli.demo import demo
from loaderkit.cli.indexing.command import index
from loaderkit.cli.init.command import init
from loaderkit.cli.pack import pack
from loaderkit.cli.port import port
from loaderkit.cli.profile import profile
from loaderkit.cli.restore import manifest, restore
from loaderkit.cli.run import run
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import Debug, Settings
from loaderkit.cli.tune import tune
from loaderkit.cli.watch import watch
from loaderkit.errors import ConfigError, LoaderkitError

# Typer's base of all complaints about the command line: Click's, or in newer releases Typer's own copy of it.
_USAGE_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Load training data, and see why training waits. P is a pipeline's YAML file.",
)


def _show_version(value: bool) -> None:
    if value:
        console.tell(f"loaderkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    pass


for function in (init, run, check, explain, profile, tune, index, pack, restore, manifest, checkpoints, demo):
    app.command()(function)
for of_script in (watch, port):
    app.command(context_settings={"allow_interspersed_args": False})(of_script)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to the process's. Returns the exit code, and raises nothing but KeyboardInterrupt
    for a watched script that Ctrl-C ended."""
    if sys.stdout is None:
        console.say("error: stdout is closed, and that is where the result goes: redirect it, to /dev/null if need be")
        return 1
    settings = Settings()
    stdout_errors = sys.stdout.errors
    try:
        with _plain_warnings():
            code = _dispatch(arguments, settings)
        if settings.then is None:
            return code
        if hasattr(
            sys.stdout, "reconfigure"
        ):  # what runs now has its streams and warnings as if there was nothing around it
            sys.stdout.reconfigure(errors=stdout_errors)
        return settings.then()
    except (Exception, KeyboardInterrupt) as error:
        if settings.then is not None and isinstance(error, KeyboardInterrupt):
            # Python then ends by the signal, which ends a shell's loop around it as well. The traceback has been shown.
            sys.excepthook = lambda *_: None
            raise
        if settings.debug:
            traceback.print_exc()
        code, message = _outcome(error)
        if message:
            console.say(message)
        return code


def _outcome(error: BaseException) -> tuple[int, str]:
    """The exit code for the exception that ended a command, and the line to print about it."""
    if isinstance(error, _USAGE_ERROR):
        message = getattr(error, "format_message", error.__str__)()
        context = getattr(error, "ctx", None)
        hint = f"\nTry `{context.command_path} --help`." if context is not None else ""
        return 2, f"error: {message}{hint}" if message else ""
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
        return 1, ""
    if isinstance(error, (console.Interrupted, KeyboardInterrupt, typer.Abort)):
        return 130, str(error) or "interrupted"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        _discard_stdout()
        return 1, f"error: the standard output cannot be written: {error.strerror}"  # what we write to files names them
    if isinstance(error, (LoaderkitError, OSError)):
        return 2 if isinstance(error, ConfigError) else 1, f"error: {error}"
    # An error in loaderkit, or in a function that the pipeline names.
    return 1, f"error: {type(error).__name__}: {error} (--debug shows where)"


def _dispatch(arguments: Sequence[str] | None, settings: Settings) -> int:
    for stream in (sys.stdout, sys.stderr):  # names of files need not be valid UTF-8
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    given = None if arguments is None else list(arguments)
    try:
        code = command.main(args=given, prog_name="loaderkit", standalone_mode=False, obj=settings)
    except SystemExit as stop:  # Typer leaves this way when stdout's reader has gone
        code = stop.code
    sys.stdout.flush()
    if code == 130:  # newer Typers turn Ctrl-C into this
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _discard_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not complain either."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line, without the place in our code that means nothing to a user."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        console.say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
