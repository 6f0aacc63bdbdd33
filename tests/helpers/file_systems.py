"""What the filesystem that tests write to can do."""

from __future__ import annotations

import mmap
import os

from loaderkit.connectors.page_cache import cached_share, evict


def is_out_of_the_page_cache(path: str) -> bool:
    """Puts a file out of it, if that can be done: pages that a CPU has just written stay at first."""
    parts = {path: [(0, os.path.getsize(path))]}
    for _ in range(10):
        evict([path])
        if cached_share(parts) == 0:
            return True
    return False


def can_be_read_around(path: str) -> bool:
    """Whether the filesystem reads past the page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, 4096) as memory:
            os.preadv(descriptor, [memory], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return cached_share({path: [(0, 4096)]}) == 0
