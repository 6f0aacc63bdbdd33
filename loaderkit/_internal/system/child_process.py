"""Starts a Python process of this package that ends with its parent; the parent's side and the child's. It imports
nothing heavy."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from loaderkit._internal.system.program_end import ProgramEndsError, start_thread

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PATIENCE_S = 1.0
MEANT_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that terminals and schedulers send to all processes of a job, to end it or to request a checkpoint."""


# --------------------------------------------------------------------------------------------------- in the parent


class _Life:
    """The pid, end and exit code of the process; shared with the thread that starts it and waits for it."""

    def __init__(self) -> None:
        self.started: SimpleQueue[int | BaseException] = SimpleQueue()
        self.ended = threading.Event()
        self.exit_code: int | None = None


def _keep(
    command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str] | None, life: _Life
) -> None:
    """Start the process and wait for its end, in a thread that does nothing else.

    The kernel kills the process when the *thread* that started it ends (PR_SET_PDEATHSIG), so it must not be one of the
    user's. The parent's signals are blocked in this thread, and so in the process until it ignores them: an early Ctrl-C
    prints nothing.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_PARENT)
    try:
        process = subprocess.Popen(  # noqa: S603 - ourselves
            command,
            pass_fds=descriptors,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=_inherited(1),
            stderr=_inherited(2),
        )
    except BaseException as error:
        life.started.put(error)
        return
    life.started.put(process.pid)
    try:
        _, status = os.waitpid(process.pid, 0)
        life.exit_code = process.returncode = os.waitstatus_to_exitcode(status)
    except (
        ChildProcessError
    ):  # SIGCHLD is ignored, or other code has waited: the exit code is lost; Popen.wait returns 0
        process.returncode = 0  # its destructor needs one
    life.ended.set()


def _inherited(descriptor: int) -> int | None:
    """Popen's argument for stdout or stderr: DEVNULL if the descriptor is closed, as otherwise the process would open
    another file under its number."""
    try:
        return None if os.get_inheritable(descriptor) else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


class ChildProcess:
    """A fresh interpreter that runs `program` with `arguments`. It gets the `descriptors` under the same numbers, which
    must not be the numbers of stdin, stdout and stderr. `environment` defaults to this process's environment."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. Raises OSError, and ProgramEndsError where no thread can keep it; `sys.executable` is not empty."""
        options = [f"-W{option}" for option in sys.warnoptions] + ["-O"] * sys.flags.optimize
        command = [sys.executable, "-P", *options, "-c", program, *arguments]
        self._life = _Life()
        self._keeper = threading.Thread(
            target=_keep, args=(command, descriptors, environment, self._life), name="loaderkit-keeper", daemon=True
        )
        started = self._start()
        if isinstance(started, BaseException):
            raise started
        self.pid = started

    def _start(self) -> int | BaseException:
        """The process's pid, or the error that kept it from starting."""
        life = self._life
        try:
            start_thread(self._keeper)
            return life.started.get()
        except ProgramEndsError:
            raise
        except BaseException:  # Ctrl-C: wait until the descriptors are passed on, as their numbers could be reused
            with suppress(Empty):
                started = life.started.get(timeout=_PATIENCE_S)
                if isinstance(started, int):
                    os.kill(started, signal.SIGKILL)
            raise

    @property
    def has_ended(self) -> bool:
        """True once the process has ended."""
        return self._life.ended.is_set()

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal; None if the process has not ended, or the code is lost."""
        return self._life.exit_code

    def wait(self, timeout_s: float) -> bool:
        """True once the process has ended; waits for that at most `timeout_s`."""
        return self._life.ended.wait(timeout_s)

    def kill(self) -> None:
        """End the process at once."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def release(self, timeout_s: float) -> None:
        """Wait for the thread that waits for the process's end."""
        if threading.current_thread() is not self._keeper:
            self._keeper.join(timeout_s)


def how_it_ended(exit_code: int | None) -> str:
    """What became of a process that has ended, as the predicate of a sentence."""
    if exit_code is None:
        return "ended, and its exit code is lost, as SIGCHLD is ignored or something else in this process waited for it"
    if exit_code >= 0:
        return f"left with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


# --------------------------------------------------------------------------------------------------- in the child


def bind_to(parent: int) -> None:
    """End with the parent, and ignore the signals that are meant for it."""
    # The parent handles Ctrl-C and SIGTERM (it may save a checkpoint first), and this process ends when it does. Until here
    # they were blocked. Not SIG_IGN: processes of the user's code would inherit it and never end by SIGTERM, as
    # processes of a multiprocessing.Pool do.
    for number in MEANT_FOR_THE_PARENT:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, MEANT_FOR_THE_PARENT),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, MEANT_FOR_THE_PARENT),
        after_in_child=_take_signals,
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_THE_PARENT)
    end_with(parent)
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in a C library prints a stack
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # prints of the user's functions appear at once
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def end_with(parent: int) -> None:
    """Be killed when the thread of `parent`, a pid, that started this process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, b"loaderkit", 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def _take_signals() -> None:
    """Restore default signal handling in a child that user's code has forked; signals blocked meanwhile arrive."""
    for number in MEANT_FOR_THE_PARENT:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_THE_PARENT)
