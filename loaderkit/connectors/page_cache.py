"""Measures which share of files the page cache holds, and evicts files from it, without root."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from loaderkit._internal.system.interrupts import opened
from loaderkit.connectors.base import Connector, traits_of

_NUM_SAMPLES = 256

_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def parts_of(connector: Connector, ranges: Iterable[tuple[str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    """The (start, length) in local files, by path, of ranges (key, start, length). An archive counts as a whole.

    Empty unless all of them lie in local files.
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
    """The archive of a member named "archive!member"; None for a file, even one with such a name."""
    if "!" not in name or os.path.isfile(name):
        return None
    parts = name.split("!")
    names = ("!".join(parts[:count]) for count in range(1, len(parts)))
    return next((path for path in names if path.endswith(".tar") and os.path.isfile(path)), None)


def evict(paths: Iterable[str]) -> None:
    """Evict files from the page cache by posix_fadvise(2), which drops pages that are written back and not mapped.

    Raises OSError for a file that cannot be opened.
    """
    for path in paths:
        with opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)  # pages not yet written back would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(ranges: Mapping[str, Sequence[tuple[int, int]]]) -> float | None:
    """The share, from 0 to 1, of ranges of files, (start, length) by path, that the page cache holds, estimated from samples.

    Bytes past a file's end do not count. None if unknown: Linux shows it only to users who own the file or may write to it.
    """
    step = max(1, sum(length for parts in ranges.values() for _, length in parts) // _NUM_SAMPLES)
    are_cached: list[bool] = []
    begin = 0  # of the range in the concatenation of all ranges
    try:
        for path, parts in ranges.items():
            if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK, effective_ids=True):
                return None
            offsets: list[int] = []
            for start, length in parts:
                offsets += range(start - begin % -step, start + length, step)
                begin += length
            if offsets:
                with opened(path, os.O_RDONLY) as descriptor:
                    are_cached += _are_cached(descriptor, offsets)
    except (OSError, ValueError):  # cannot be opened or mapped; reading it raises the error
        return None
    return sum(are_cached) / len(are_cached) if are_cached else None


def _are_cached(descriptor: int, offsets: Sequence[int]) -> list[bool]:
    """True for each offset whose page is in memory, by mincore(2): unlike a read, it loads no page."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapping:
        size = len(mapping)
        pages = np.frombuffer(mapping, np.uint8)
        begin = pages.ctypes.data
        del pages  # the array would keep the mapping open
        residence = (ctypes.c_ubyte * 1)()
        return [
            _mincore(begin + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, residence) == 0 and bool(residence[0] & 1)
            for offset in offsets
            if offset < size
        ]
