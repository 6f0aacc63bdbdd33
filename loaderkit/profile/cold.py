"""Files out of the page cache, without being root: posix_fadvise(POSIX_FADV_DONTNEED) on each."""

from __future__ import annotations

import os
from collections.abc import Iterable

from loaderkit.interrupts import opened
from loaderkit.types import Connector, Source


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
