"""Accounts for the size of a cache folder: how many bytes it holds and which entries are evicted; and has the locks
between processes."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from loaderkit._internal.system.interrupts import opened

_FLOCK = "hhqqi4x"
_ACCOUNT = 0  # the byte of the lock file that guards the account
_LOW_WATER = 0.9  # an eviction makes room for more than one entry
_POLL_S = 0.005
_ACCOUNT_S = 20.0  # scanning a million files takes seconds
OPEN = os.O_RDWR | os.O_NOFOLLOW


class _Entry(NamedTuple):
    used_ns: int
    num_bytes: int
    path: str


class FileLocks:
    """Locks between the threads and processes that share a folder: one per byte of its file `lock`."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/lock"

    @contextmanager
    def hold(self, offset: int, wait_s: float) -> Iterator[None]:
        """Hold the lock of one byte. It belongs to the open file, so it also excludes threads of one process. Raises
        BlockingIOError if it is still taken after `wait_s`."""
        with opened(self._path, OPEN | os.O_CREAT) as fd:
            deadline_s = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, offset))
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline_s:
                        raise
                    time.sleep(_POLL_S)
            try:
                yield
            finally:  # explicitly, since a forked child may have the file open
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, offset))


class DiskAccount:
    """The size of `folder`, at most `size_bytes`. The least recently used entry is evicted first."""

    def __init__(self, folder: str, size_bytes: int) -> None:
        self._folder = folder
        self._size_bytes = size_bytes
        self._is_counted = False  # True once this process has scanned all files
        self.locks = FileLocks(folder)
        self.num_evicted = 0

    def reserve(self, num_bytes: int) -> bool:
        """Take room for an entry, evicting others; False if it is larger than the whole cache."""
        if num_bytes > self._size_bytes:
            return False
        with self.locks.hold(_ACCOUNT, _ACCOUNT_S):
            used_bytes = self._usage()
            if not self._is_counted or used_bytes + num_bytes > self._size_bytes:
                used_bytes = self._evict(num_bytes)
                self._is_counted = True
            self._set_usage(used_bytes + num_bytes)
        return True

    def charge(self, num_bytes: int) -> None:
        """Add to the account; a negative number subtracts."""
        with suppress(OSError), self.locks.hold(_ACCOUNT, _ACCOUNT_S):
            self._set_usage(max(0, self._usage() + num_bytes))

    def _usage(self) -> int:
        with suppress(OSError, ValueError):
            return int(Path(self._folder, "usage").read_text("ascii"))
        self._is_counted = False
        return 0

    def _set_usage(self, num_bytes: int) -> None:
        with opened(f"{self._folder}/usage", OPEN | os.O_CREAT) as fd:
            os.pwrite(fd, b"%020d" % num_bytes, 0)

    def _evict(self, num_bytes: int) -> int:
        """Scan all files, and evict entries until `num_bytes` fit; returns the bytes in use then."""
        entries = list(self._entries())
        total = sum(entry.num_bytes for entry in entries) + self._clear_temporary()
        if total + num_bytes <= self._size_bytes:
            return total
        target = min(int(_LOW_WATER * self._size_bytes), self._size_bytes - num_bytes)
        for entry in sorted(entries):
            if total <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
                self.num_evicted += 1
            total -= entry.num_bytes
        return total

    def _entries(self) -> Iterator[_Entry]:
        for directory in _scan(f"{self._folder}/objects"):
            if directory.is_dir(follow_symlinks=False):
                for file in _scan(directory.path):
                    with suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        yield _Entry(status.st_atime_ns, status.st_size, file.path)

    def _clear_temporary(self) -> int:
        """Remove the files of dead writers; returns the bytes of files that living writers have open."""
        total = 0
        for file in _scan(f"{self._folder}/temporary"):
            with suppress(OSError), opened(file.path, OPEN) as fd:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(file.path)
                except BlockingIOError:
                    total += os.fstat(fd).st_size
        return total


def _flock(kind: int, offset: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, offset, 1, 0)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
