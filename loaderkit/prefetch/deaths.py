"""How a process ended, in words: what that means, and what to do."""

from __future__ import annotations

import signal
import sys

from loaderkit.errors import WorkerDiedError

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}


def describe_death(
    pid: int, exit_code: int | None, *, has_ended: bool = True, is_early: bool = False, reason: str = ""
) -> WorkerDiedError:
    """The error that says how a process ended, what that means and what to do.

    `exit_code` is None where it is not known; `is_early`: it ended before it was ready to work.
    """
    if exit_code is None and has_ended:
        what = "ended, and its exit code is lost, as SIGCHLD is ignored or something else in this process waited for it"
        fix = (
            "if nobody killed it, the system was out of memory (dmesg says so), or a library crashed or gave up (see what "
            "it printed on stderr)"
        )
    elif exit_code is None:
        what, fix = "does not answer and was killed", "look for a stage that stops the whole interpreter"
    elif exit_code >= 0:
        what = f"left with exit code {exit_code}"
        if is_early:
            fix = (
                f"see what it printed on stderr; {sys.executable} must be able to import there what it can import here, or "
                "use prefetch.executor: thread"
            )
        else:
            fix = "a stage or a data set ended it (os._exit, or a library that gives up); see what it printed"
    else:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        what = f"was killed by {name}"
        if -exit_code == signal.SIGKILL:
            fix = (
                "if nobody did that, the system was out of memory (dmesg says so): make prefetch.memory, "
                "prefetch.concurrency or the data set's own memory smaller"
            )
        elif -exit_code not in _CRASHES:
            fix = (
                "somebody sent it that signal, or a stage or a data set did: see what it printed, and what the job's "
                "scheduler did"
            )
        elif is_early:
            fix = "a C library crashed while it was imported; its stack is on stderr"
        else:
            fix = (
                "a C library crashed, probably on one sample; its stack is on stderr: make it happen again with "
                "prefetch.concurrency: 1, or leave that sample out"
            )
    if is_early:
        what = f"could not start: it {what} before it was ready" + (f" ({reason})" if reason else "")
    return WorkerDiedError(
        f"the process that loads (pid {pid}) {what}: {fix}. The loader's state is unharmed: iterating again starts "
        "another one, with the next epoch; load_state_dict goes on where this one stopped",
        exit_code=exit_code,
    )
