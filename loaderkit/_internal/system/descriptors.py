"""Opens descriptors for other processes: their numbers are never 0, 1 or 2, which are stdin, stdout and stderr.

Where a program has closed one of these, the system would hand out its number, and every print would write into the new file.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from contextlib import ExitStack, suppress

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
    while True:
        with ExitStack() as held:
            while held.enter_context(owned(os.open, os.devnull, os.O_RDWR | os.O_CLOEXEC)).fileno() < FIRST_FREE:
                pass
            mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        if not _is_open_below(descriptor):
            return mapping
        mapping.close()  # another thread had such a number above, and has closed it before the mapping's was chosen


def _is_open_below(descriptor: int) -> bool:
    """True if a number of stdin, stdout or stderr is one of this file."""
    for number in range(FIRST_FREE):
        with suppress(OSError):
            if os.path.samestat(os.fstat(number), os.fstat(descriptor)):
                return True
    return False
