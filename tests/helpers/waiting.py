"""Waiting for what happens elsewhere: for a message in the log, and, where nothing announces it, by looking again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

LIMIT_S = 120
"""Far longer than anything takes on a busy machine."""


def wait_for(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Poll a condition: for what the system, or a thread without a callback, does not announce."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        threading.Event().wait(0.01)


def join_threads(name: str, besides: Collection[threading.Thread] = ()) -> None:
    """Wait for the end of all threads with `name` in theirs. They were told to end, and `close` waits for a while only."""
    for thread in threading.enumerate():
        if name in thread.name and thread not in besides:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread.name


@contextmanager
def messages_with(words: str) -> Iterator[SimpleQueue[str]]:
    """The messages that loaderkit logs in the block, as they come, if `words` are in them."""
    messages: SimpleQueue[str] = SimpleQueue()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words in record.getMessage():
                messages.put(record.getMessage())

    handler = Handler()
    logging.getLogger("loaderkit").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("loaderkit").removeHandler(handler)
