"""How many threads torch uses inside one operation: it keeps a number for each thread, and one for threads to come."""

from __future__ import annotations

import threading

import torch

_ONE_AT_A_TIME = threading.Lock()  # what it guards belongs to the process, too


def compute_alone() -> None:
    """From now on torch uses no other thread for what is computed in the calling one, which must be new to torch.

    Threads to come are left as they were: setting the number of one thread sets theirs as well, and only in another thread
    is that put back without undoing this. Takes 0.1 ms.
    """
    with _ONE_AT_A_TIME:
        number_to_come = (
            torch.get_num_threads()
        )  # makes torch initialise this thread, which would undo the next line later
        torch.set_num_threads(1)
        if number_to_come == 1:
            return
        try:
            helper = threading.Thread(target=torch.set_num_threads, args=(number_to_come,), daemon=True)
            helper.start()
        except RuntimeError:  # no more threads to be had
            torch.set_num_threads(number_to_come)
        else:
            helper.join()
