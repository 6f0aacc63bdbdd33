"""How many threads torch uses inside one operation: it keeps a number for each thread, and one for threads to come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ONE_AT_A_TIME = threading.Lock()
"""To be held around `threads_to_come_kept`: what that guards belongs to the process."""


@contextmanager
def threads_to_come_kept() -> Iterator[Callable[[], None]]:
    """Gives a function that threads new to torch call, before the end of the block: torch uses no other thread for what is
    computed in them. Threads to come are left as they were, though setting one thread's number sets theirs as well.
    """
    torch.get_num_threads()  # initialises the caller's thread, which else would take over what threads in here set
    found: list[int] = []
    setting = threading.Lock()

    def compute_alone() -> None:
        with setting:
            # Asking makes torch initialise this thread, which would undo the next line later.
            found.append(torch.get_num_threads())
            torch.set_num_threads(1)

    try:
        yield compute_alone
    finally:
        if found:
            _put_back(found[0])


def _put_back(number_to_come: int) -> None:
    if torch.get_num_threads() == number_to_come:
        torch.set_num_threads(number_to_come)
        return
    # In this thread it would set its own number, too.
    try:
        helper = threading.Thread(target=torch.set_num_threads, args=(number_to_come,), daemon=True)
        helper.start()
    except RuntimeError:  # no more threads to be had
        torch.set_num_threads(number_to_come)
    else:
        helper.join()
