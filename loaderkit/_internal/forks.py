"""What a user's function forks ends where it leaves the function.

A child that continued would be a second worker with the locks of threads that it does not have, its parent's sockets and
memory: it would take messages that are not its own, or wait for ever, and so would its parent in waitpid.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_num_forks = 0  # between the program and this process; os.getpid() is a system call, of 0.15 us and more


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603 - what is true of a process can be noted nowhere else
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


def ending_forks(function: Callable[P, R]) -> Callable[P, R]:
    """The user's function, for 0.1 us a call more. A child that it has forked ends when it returns, with exit code 0, or
    raises: with the code of `sys.exit`, or with 1 behind a traceback. It ends as with `os._exit`: nothing else is run."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _num_forks
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            if _num_forks != before:
                _end(error)
            raise
        if _num_forks != before:
            _end(None)
        return result

    return run


def _end(error: BaseException | None) -> NoReturn:
    code = 1
    try:
        code = _exit_code(error)
    finally:
        os._exit(code)


def _exit_code(error: BaseException | None) -> int:
    """As Python's, with what it prints: not by `sys.stderr`, whose lock another thread may have held in the parent."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        said = "".join(traceback.format_exception(error))
    elif error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    else:
        said = f"{error.code}\n"
    os.write(2, said.encode("utf-8", "backslashreplace"))
    return 1
