"""Files and folders under a temporary name, locked as long as their writer lives: what a killed writer left can be
recognised."""

from __future__ import annotations

import fcntl
import io
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loaderkit._internal.system.interrupts import opened

_OLD_S = 24 * 3600.0


def create_temporary(path: str | Path) -> io.FileIO:
    """A new file, to be renamed before it is closed. Raises OSError."""
    while True:
        file = io.FileIO(path, "x")
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # it was taken for a leftover before it was locked


@contextmanager
def temporary_folder(path: Path) -> Iterator[None]:
    """A new folder, with those above it, to be renamed before the end of the block. Raises OSError."""
    path.mkdir(parents=True)
    with opened(str(path), os.O_RDONLY | os.O_DIRECTORY) as fd:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def remove_leftovers(folder: str | Path, names: re.Pattern[str]) -> None:
    """Remove temporary files and folders in a folder whose writer has ended. What cannot be removed stays."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_ended(entry.path, is_folder=entry.is_dir(follow_symlinks=False))


def _remove_ended(path: str, *, is_folder: bool) -> None:
    # Of a network disk only what is open for writing can be locked, and no folder can be opened for that.
    flags = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_NONBLOCK
    with opened(path, flags | os.O_NOFOLLOW) as fd:
        if _has_ended(fd):
            shutil.rmtree(path, ignore_errors=True) if is_folder else os.unlink(path)


def _has_ended(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here: one that still writes has changed its file within a day
        return os.fstat(fd).st_mtime < time.time() - _OLD_S
    return True
