"""Ends a child process that a user's function forked, when the child leaves the function.

A child that continued would be a second worker, with locks held by threads it lacks and with its parent's sockets and memory:
it would take its parent's messages or wait forever, and its parent would hang in waitpid.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_num_forks = 0  # between the program and this process; os.getpid() is a system call of 0.15 us or more


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603 - a property of the process
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


def ending_forks(function: Callable[P, R]) -> Callable[P, R]:
    """The user's function, at 0.1 us more per call. If it forks a child, the child ends by `os._exit` when it leaves
    the function: with 0 on a return, with the code of `sys.exit`, or with a traceback and 1."""

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
    """Python's exit code. Prints to descriptor 2, as a thread of the parent may have held the lock of `sys.stderr`."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        message = "".join(traceback.format_exception(error))
    elif error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    else:
        message = f"{error.code}\n"
    os.write(2, message.encode("utf-8", "backslashreplace"))
    return 1
