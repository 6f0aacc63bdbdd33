"""Descriptors that Ctrl-C does not lose.

The interpreter raises KeyboardInterrupt as soon as a call has returned. What it returned has no name yet and is dropped: an
object then closes what it owns, but the number that `os.open` returns just stays open. Within functions written in C there is
no such moment, so it is those, `map` with `next` or `extend`, that pass the number on to who looks after it. It is the same
with locks: see docs/decisions/0019-ctrl-c.md.
"""

from __future__ import annotations

import io
import os
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
