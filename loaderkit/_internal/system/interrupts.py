"""Opens file descriptors so that Ctrl-C does not leak them.

KeyboardInterrupt can be raised between the return of a call and the assignment of its result. An object dropped there closes
what it owns, but a descriptor from `os.open` stays open. Functions written in C are not interrupted, so `map` with `next` or
`extend` hands the descriptor to its owner. The same holds for locks: see docs/decisions/0019-ctrl-c.md.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A descriptor as from `os.open`, not inherited, and closed at the end. Raises OSError."""
    descriptors: list[int] = []
    try:
        descriptors.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))
        yield descriptors[0]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def owned(make: Callable[..., int], *arguments: Any) -> io.FileIO:
    """A file that owns the descriptor returned by `make(*arguments)`. `make` is written in C and opens no directory."""
    return next(map(io.FileIO, map(make, *((argument,) for argument in arguments)), ("r+",)))
