"""Why a worker process has ended: how it ended, the likely cause, and what to do."""

from __future__ import annotations

import signal
import sys

from loaderkit._internal.config import keys
from loaderkit._internal.system.child_process import how_it_ended
from loaderkit.engine.restarts import Death

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}


def exit_reason(
    pid: int,
    exit_code: int | None,
    *,
    has_ended: bool = True,
    is_early: bool = False,
    reason: str = "",
    num_oom_kills: int | None = None,
) -> Death:
    """How a worker process ended, the likely cause and the fix.

    `exit_code` is None if it is not known; `is_early`: the process ended before it was ready. `num_oom_kills`: how many
    processes the kernel has killed during its life because memory was short, where that is known.
    """
    what = how_it_ended(exit_code)
    if exit_code is None and has_ended:
        fix = (
            "unless another program killed it, the system was out of memory (see dmesg), or a library crashed or exited "
            "(see its stderr)"
        )
    elif exit_code is None:
        what, fix = "does not answer and was killed", "look for a stage that blocks the whole interpreter"
    elif exit_code >= 0:
        if is_early:
            fix = (
                f"see its stderr; {sys.executable} must be able to import there what it imports here, or "
                f"use {keys.EXECUTOR}: thread"
            )
        else:
            fix = "a stage or a data set ended it (os._exit, or a library that exits); see its output"
    elif -exit_code == signal.SIGKILL:
        fix = _cause_of_kill(num_oom_kills)
    elif -exit_code not in _CRASHES:
        fix = (
            "another program, a stage or a data set sent that signal: see its output and the log of the job's scheduler"
        )
    elif is_early:
        fix = "a C library crashed while it was imported; its stack is on stderr"
    else:
        fix = (
            "a C library crashed, probably on one sample; its stack is on stderr: reproduce it with "
            f"{keys.CONCURRENCY}: 1, or leave that sample out"
        )
    if is_early:
        what = f"could not start: it {what} before it was ready" + (f" ({reason})" if reason else "")
    # What fails at the start fails at the next one as well; but for a kill, which comes from outside.
    may_pass = not is_early or exit_code == -signal.SIGKILL
    return Death(f"the process that loads (pid {pid})", what, fix, exit_code, is_early, may_pass)


def _cause_of_kill(num_oom_kills: int | None) -> str:
    if num_oom_kills is None:
        return f"unless another program did, the system was out of memory (see dmesg): {keys.LESS_MEMORY}"
    if num_oom_kills:
        return f"the system was out of memory (the kernel counts a kill for that): {keys.LESS_MEMORY}"
    return (
        "another program did, or a watcher of memory such as systemd-oomd: the kernel counts no kill for lack of memory"
    )
