"""Sets how many threads torch uses inside one operation: for each thread, and as the default for new threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import get_num_threads, set_num_threads

__all__ = ["ONE_AT_A_TIME", "get_num_threads", "new_thread_default_kept", "set_num_threads"]
ONE_AT_A_TIME = threading.Lock()
"""Held around `new_thread_default_kept`: the default belongs to the process."""


@contextmanager
def new_thread_default_kept() -> Iterator[Callable[[], None]]:
    """Gives a function that new threads call inside the block, so that torch computes in such a thread alone. Setting
    the number of one thread also changes the default for new threads: the block puts the default back.
    """
    get_num_threads()  # initialises the caller's thread, or it would take over the number of the new threads
    defaults: list[int] = []
    setting = threading.Lock()

    def compute_alone() -> None:
        with setting:
            # The query makes torch initialise this thread now; later that would undo the next line.
            defaults.append(get_num_threads())
            set_num_threads(1)

    try:
        yield compute_alone
    finally:
        if defaults:
            _put_back(defaults[0])


def _put_back(default: int) -> None:
    if get_num_threads() == default:
        set_num_threads(default)
        return
    # In a helper thread: here it would also set this thread's number.
    try:
        helper = threading.Thread(target=set_num_threads, args=(default,), daemon=True)
        helper.start()
    except RuntimeError:  # the system has no more threads
        set_num_threads(default)
    else:
        helper.join()
