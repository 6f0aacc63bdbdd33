"""Python's cyclic garbage collector: pauses it while many objects are created, and closes objects that it finds."""

from __future__ import annotations

import _thread
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_paused: tuple[int, ...] | None = None  # the thresholds to restore, while some thread of the process is inside


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn the collector off for a function that creates many objects; usable as a decorator.

    The collector takes two fifths of the CPU time of restoring 10,000 small tensors, and has nothing to free there. A first
    threshold of 0 turns it off: `gc.disable` in another thread meanwhile holds afterwards, and so do thresholds set there.
    """
    global _paused  # noqa: PLW0603 - read after a fork
    before = gc.get_threshold()
    try:
        if before[0]:
            _paused = before
            gc.set_threshold(0, *before[1:])
        yield
    finally:
        if before[0]:
            if not gc.get_threshold()[0]:
                gc.set_threshold(*before)
            _paused = None


def _resume() -> None:
    """Resume in a forked child, which lacks the thread that would do it."""
    if _paused is not None:
        gc.set_threshold(*_paused)


os.register_at_fork(after_in_child=_resume)


def close_collected(close: Callable[[], None]) -> None:
    """Close what was collected. In one of our threads, for which `close` would wait, or in a library's own thread,
    which `close` may need, another thread does it."""
    thread = threading.current_thread()
    if thread.name.startswith("loaderkit") or isinstance(thread, threading._DummyThread):
        _thread.start_new_thread(close, ())
    else:
        close()
