"""Files out of the page cache, without being root: posix_fadvise(POSIX_FADV_DONTNEED) on each."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np

from loaderkit.interrupts import opened
from loaderkit.types import Connector, Source

_NUM_SAMPLES = 256

_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def files_of(source: Source, connector: Connector | None, indices: Iterable[int]) -> list[str] | None:
    """The paths in which these samples lie; None where they are no files of this machine."""
    if connector is None or getattr(connector, "is_remote", False):
        return None
    keys: dict[str, None] = {}
    for index in indices:
        keys.update((found.range.key, None) for found in source.ranges(index))
    paths = [connector.describe(key) for key in keys]
    return paths if all(os.path.isfile(path) for path in paths) else None


def evict(paths: Iterable[str]) -> None:
    """Let the kernel forget what it holds of these files; it does so at once for pages that are written and not mapped.

    Raises OSError for a file that cannot be opened.
    """
    for path in paths:
        with opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)  # pages not yet written stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: Iterable[str]) -> float:
    """How much of these files lies in the page cache, from 0 to 1, by samples; 1 where the kernel does not say, as of files
    that are another user's.

    Raises OSError for a file that cannot be opened.
    """
    sizes = {path: os.stat(path).st_size for path in paths}
    step = max(1, sum(sizes.values()) // _NUM_SAMPLES)
    found: list[bool] = []
    begin = 0
    for path, size in sizes.items():
        with opened(path, os.O_RDONLY) as descriptor:
            found += _are_cached(descriptor, range(-begin % step, size, step))
        begin += size
    return sum(found) / max(len(found), 1)


def _are_cached(descriptor: int, offsets: Sequence[int]) -> list[bool]:
    """Whether the bytes at these places are in memory: by mincore(2), which reads nothing, as an attempt to read would."""
    if not offsets:
        return []
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapping:
        pages = np.frombuffer(mapping, np.uint8)
        begin = pages.ctypes.data
        del pages  # it would keep the mapping open
        found = (ctypes.c_ubyte * 1)()
        return [
            _mincore(begin + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, found) != 0 or bool(found[0] & 1)
            for offset in offsets
        ]
