"""Tells, without listing them, whether files were added to folders, renamed or removed: a folder's times say so.

What is written into a file that stays changes no folder: who reads the file must notice that by its size and time.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.interrupts import opened

# Those whose folders have a new time after every change of what is in them. On others a folder may keep its time, as with
# buckets that are mounted by FUSE, or have the same one in another image, as with squashfs.
_TRUSTED = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "nfs", "nfs4", "lustre", "ceph"}
)
# A change in the same tick as the one before leaves a folder's time as it was. Whole seconds may be all that there is.
_TICK_S, _COARSE_TICK_S = 0.1, 2.0
_OCTAL = re.compile(r"\\([0-7]{3})")
_MOUNTS = Path("/proc/self/mountinfo")


class CannotTellError(Exception):
    """Why changes below a folder cannot be told by its times."""


class TooYoungError(CannotTellError):
    """A folder was changed a moment ago: another change might leave its time as it is."""


@dataclass(frozen=True)
class FolderMarks:
    """Folders, and of each its device, inode, and times of modification and change (ns): int64 [folders, 4]."""

    paths: list[str]
    marks: NDArray[np.int64]

    @classmethod
    def take(cls, root: str, *, mounts: Path = _MOUNTS) -> FolderMarks:
        """Those of `root` and all folders below it, links followed. Raises CannotTellError, OSError."""
        paths: list[str] = []
        marks: list[tuple[int, ...]] = []
        trusted: set[int] = set()
        now_s = time.time()
        for path, mark in _walk(root, ()):
            if mark[0] not in trusted:
                _check_trusted(path, mounts)
                trusted.add(mark[0])
            changed_ns = max(mark[2:])
            tick_s = _TICK_S if changed_ns % 1_000_000_000 else _COARSE_TICK_S
            if now_s - changed_ns / 1e9 < tick_s:
                raise TooYoungError(f"{path!r} was changed a moment ago")
            paths.append(path)
            marks.append(mark)
        return cls(paths, np.array(marks, np.uint64).view(np.int64).reshape(len(paths), 4))

    def hold(self) -> bool:
        """True if every folder is still as it was."""
        try:
            now = [_mark(path) for path in self.paths]
        except OSError:
            return False
        return np.array_equal(np.array(now, np.uint64).view(np.int64).reshape(len(now), 4), self.marks)


def _mark(path: str) -> tuple[int, ...]:
    # Opened, as a network disk then asks its server; `stat` may be answered from memory.
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _walk(path: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        mark = _mark(path)
    except PermissionError:
        if not above:
            raise
        return  # listing leaves it out, or raises
    if mark[:2] in above:  # a loop of links
        return
    yield path, mark
    inside = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_symlink():
                _check_link(entry)
            if entry.is_dir():
                inside.append(entry.path)
    for folder in inside:
        yield from _walk(folder, (*above, (mark[0], mark[1])))


def _check_link(entry: os.DirEntry[str]) -> None:
    try:
        mode = entry.stat().st_mode
    except OSError:
        mode = 0
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CannotTellError(f"the link {entry.path!r} leads to no file, and to one perhaps later")


def _check_trusted(path: str, mounts: Path) -> None:
    found = file_system_of(path, mounts)
    if found not in _TRUSTED:
        raise CannotTellError(
            f"{path!r} is on a file system of type {found or 'unknown'}, whose folders are not known to have a new time after "
            "every change"
        )


def file_system_of(path: str, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that a path lies on; "" where the system does not say."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        here, _, about = line.partition(" - ")
        fields = here.split(" ")
        if len(fields) < 5 or not about:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = f"{real}/".startswith(point if point.endswith("/") else f"{point}/")
        if inside and len(point) >= len(best):  # of two at one place the later one is on top
            best, kind = point, about.split(" ")[0]
    return kind
