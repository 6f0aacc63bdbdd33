"""Runs a user's script in this process, as Python would."""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated

import typer

from loaderkit.cli.terminal import console

_IMPORT = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_BEFORE = (__file__, runpy.__file__, "<frozen runpy>", *_IMPORT)  # frames before the script's own

ScriptName = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m a module.", show_default=False)
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments, whatever they are.", show_default=False)
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")]


def check_script(script: str, *, is_module: bool) -> None:
    """Raises BadParameter for a file that is not there."""
    if not is_module and not Path(script).exists():
        raise typer.BadParameter(f"there is no file {script}; options come before it", param_hint="SCRIPT")


def run_script(name: str, arguments: tuple[str, ...], *, is_module: bool, joins: bool = True) -> BaseException | None:
    """Run it to its end and, if `joins`, until its threads have ended; returns what it raised."""
    try:
        sys.argv = [name, *arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd() if is_module else str(Path(name).resolve().parent)
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif Path(name).is_dir():
            runpy.run_path(name, run_name="__main__")
        else:
            _run_file(str(Path(name).absolute()))
        if joins:
            _join_threads()
    except BaseException as error:
        return error
    return None


def _run_file(path: str) -> None:
    """Run a script as `__main__`, which `runpy.run_path` would take away at the end, and give it another `sys.argv[0]`."""
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None, __loader__=loader, __annotations__={})
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102  # the script that the user has named, as Python runs it


def exit_code(ended_by: BaseException | None) -> int:
    """The exit code that Python gives a script that ended so; its traceback is shown as Python shows it."""
    if ended_by is None:
        return 0
    if isinstance(ended_by, SystemExit):
        if ended_by.code is None or isinstance(ended_by.code, int):
            return ended_by.code or 0
        with contextlib.suppress(OSError, ValueError):
            console.say(str(ended_by.code))
        return 1
    trace = _of_script(ended_by)
    sys.excepthook(type(ended_by), ended_by.with_traceback(trace), trace)
    return 1


def _of_script(error: BaseException) -> TracebackType | None:
    """The traceback from the script's own frames on. There is none for a script that does not compile, as in Python."""
    whole = trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _BEFORE:
            return trace
        trace = trace.tb_next
    return None if isinstance(error, SyntaxError) else whole


def _join_threads() -> None:
    """Wait for the script's threads, as Python does before it ends."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
