"""Starts threads while the program may be ending. From Python 3.12 on no thread can be started once the main thread has
returned, although Python still waits for the running threads that are not daemons. A save that is written behind
training must then do without new threads."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what it does at the end comes after `_ending.set`: it waits for its threads
import threading

_ending = threading.Event()
# The main thread counts as alive until the threads of all executors have ended (Python 3.12 on), and one of them may be what
# asks. Python has no public function for this one, which its own executors and torch's use.
_at_end = getattr(threading, "_register_atexit", None)
if _at_end is not None:
    _at_end(_ending.set)


class ProgramEndsError(RuntimeError):
    """A thread could not be started, because the program is ending."""


def program_ends() -> bool:
    """True once the main thread has returned. Threads that are no daemons may still run."""
    return _ending.is_set() or not threading.main_thread().is_alive()


def start_thread(thread: threading.Thread) -> None:
    """Start it. Raises ProgramEndsError if the program ends, after which it has not begun and can be dropped, and RuntimeError
    if the system has no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        if not program_ends():
            raise
        raise ProgramEndsError(
            "no thread can be begun any more, as the program ends: call `close()` on what still works before that"
        ) from error
