"""Whether another thread holds the GIL is told by asking for it."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_for

from loaderkit.engine.autotune.gil_probe import gil_is_taken


@pytest.mark.parametrize("holds", [True, False])
def test_whether_another_thread_holds_the_gil_is_told(holds: bool) -> None:
    """A thread in Python, or in a wait that lets go of the GIL. On a busy machine not every answer shows it."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            if not holds:
                is_over.wait(0.05)

    other = threading.Thread(target=work)
    other.start()
    try:
        wait_for(lambda: gil_is_taken() == holds)
    finally:
        is_over.set()
        other.join()
