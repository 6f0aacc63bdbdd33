"""How much of files lies in the page cache, and how to evict them, without being root."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from loaderkit._internal.interrupts import opened
from loaderkit.connectors.base import Connector, traits_of

_NUM_SAMPLES = 256

_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def parts_of(connector: Connector, ranges: Iterable[tuple[str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Where ranges, (key, start, length), lie in files of this machine: (start, length) by path. Archives count as a whole.

    Nothing where they lie anywhere else.
    """
    if traits_of(connector).is_remote:
        return {}
    parts_by_path: dict[str, list[tuple[int, int]]] = {}
    for key, start, length in ranges:
        name = connector.describe(key)
        archive = _archive_of(name)
        if archive is None:
            parts_by_path.setdefault(name, []).append((start, length))
        elif archive not in parts_by_path:
            parts_by_path[archive] = [(0, os.path.getsize(archive))]
    return parts_by_path if all(os.path.isfile(path) for path in parts_by_path) else {}


def _archive_of(name: str) -> str | None:
    """The archive in which a member lies, whose name is "archive!member"; None for a file, also with such a name."""
    if "!" not in name or os.path.isfile(name):
        return None
    parts = name.split("!")
    names = ("!".join(parts[:count]) for count in range(1, len(parts)))
    return next((path for path in names if path.endswith(".tar") and os.path.isfile(path)), None)


def evict(paths: Iterable[str]) -> None:
    """Let the kernel forget what it holds of these files, by posix_fadvise(2); it does so at once for pages that are written
    and not mapped.

    Raises OSError for a file that cannot be opened.
    """
    for path in paths:
        with opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)  # pages not yet written stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(ranges: Mapping[str, Sequence[tuple[int, int]]]) -> float | None:
    """How much of these parts of files, (start, length) by path, lies in the page cache: from 0 to 1, by samples. What lies
    behind a file's end does not count.

    None where that is not known: Linux tells it only to who owns a file or may write to it.
    """
    step = max(1, sum(length for parts in ranges.values() for _, length in parts) // _NUM_SAMPLES)
    are_cached: list[bool] = []
    begin = 0  # of the part, were all parts one behind another
    try:
        for path, parts in ranges.items():
            if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK, effective_ids=True):
                return None
            places: list[int] = []
            for start, length in parts:
                places += range(start - begin % -step, start + length, step)
                begin += length
            if places:
                with opened(path, os.O_RDONLY) as descriptor:
                    are_cached += _are_cached(descriptor, places)
    except (OSError, ValueError):  # it cannot be opened or mapped; its reader says why
        return None
    return sum(are_cached) / len(are_cached) if are_cached else None


def _are_cached(descriptor: int, offsets: Sequence[int]) -> list[bool]:
    """Whether the bytes at these places are in memory: by mincore(2), which reads nothing, as an attempt to read would."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapping:
        size = len(mapping)
        pages = np.frombuffer(mapping, np.uint8)
        begin = pages.ctypes.data
        del pages  # it would keep the mapping open
        residence = (ctypes.c_ubyte * 1)()
        return [
            _mincore(begin + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, residence) == 0 and bool(residence[0] & 1)
            for offset in offsets
            if offset < size
        ]
