"""Descriptors that are passed to other processes: their numbers are never those of stdin, stdout and stderr.

Where one of those is closed the system would hand out its number, and every print would write into that file.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from contextlib import ExitStack

from loaderkit._internal.system.interrupts import owned

FIRST_FREE = 3
"""The lowest number of descriptors that stay open."""


def memory_file(name: str) -> io.FileIO:
    """An empty file in memory, which no directory has: it is gone with its last descriptor and mapping. `name` is shown in
    /proc. Raises OSError."""
    with owned(os.memfd_create, name, os.MFD_CLOEXEC) as low:
        return owned(fcntl.fcntl, low.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)


def mapped(descriptor: int) -> mmap.mmap:
    """A mapping of a whole file, shared with others. It keeps a descriptor of its own. Raises OSError."""
    with ExitStack() as held:
        while held.enter_context(owned(os.open, os.devnull, os.O_RDWR | os.O_CLOEXEC)).fileno() < FIRST_FREE:
            pass
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
