"""The process of one step: `python -m profiles.gpu_session.child NAME --work W --fast F --report R --limit S [--tiny]`."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from profiles.gpu_session.steps import STEPS

MISBEHAVIOURS = ("crash", "hang", "exit")
_BEFORE_THE_END_S = 1.5


def misbehave(how: str) -> None:
    """For tests of the session: what a step may do that its lines must outlive."""
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        threading.Event().wait()
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    for name in ("work", "fast", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--until", type=float, required=True, help="when it is killed, in seconds of the monotonic clock"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--misbehave", choices=MISBEHAVIOURS)
    arguments = parser.parse_args()
    faulthandler.enable()
    # The stacks of a step that hangs are in its line.
    faulthandler.dump_traceback_later(max(0.1, arguments.until - time.monotonic() - _BEFORE_THE_END_S), exit=False)
    if arguments.misbehave is not None:
        misbehave(arguments.misbehave)
    from profiles.gpu_session.context import Context, Report, Skipped  # torch and loaderkit

    (step,) = (step for step in STEPS if step.name == arguments.name)
    module, _, function = step.function.partition(":")
    report = Report(arguments.report)
    report.write()
    context = Context(arguments.work, arguments.fast, arguments.tiny, report, arguments.until)
    try:
        getattr(importlib.import_module(f"profiles.gpu_session.{module}"), function)(context)
    except Skipped as why:
        report.skipped = str(why)
        report.write()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
