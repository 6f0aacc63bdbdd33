"""Descriptors and locks that Ctrl-C does not lose.

The interpreter raises KeyboardInterrupt as soon as a call has returned. What it returned has no name yet and is dropped: an
object then closes what it owns, but the number that `os.open` returns just stays open, and a lock just stays locked. Within
functions written in C there is no such moment, so it is those, `map` with `next` or `extend`, that pass the result on to who
looks after it. For the same reason no `threading.Condition` is entered, whose `__enter__` is written in Python, but its lock.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A descriptor, closed at the end; as `os.open`, and it is not inherited. Raises OSError."""
    descriptors: list[int] = []
    try:
        descriptors.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))
        yield descriptors[0]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def owned(make: Callable[..., int], *arguments: Any) -> io.FileIO:
    """The file with the descriptor that `make(*arguments)` returns, which is closed with it. `make` is a function written in C,
    and what it opens no directory."""
    return next(map(io.FileIO, map(make, *((argument,) for argument in arguments)), ("r+",)))


@contextmanager
def held(lock: threading.Lock | threading.RLock, timeout_s: float) -> Iterator[bool]:
    """Whether the lock could be had within the time; let go at the end."""
    found: list[bool] = []
    try:
        found.extend(map(lock.acquire, (True,), (timeout_s,)))
        yield found[0]
    finally:
        if any(found):
            lock.release()
