"""The files that samples lie in."""

from __future__ import annotations

import os
from collections.abc import Iterable

from loaderkit.connectors.base import Connector, traits_of
from loaderkit.sources.base import Source


def files_of(source: Source, connector: Connector | None, indices: Iterable[int]) -> list[str] | None:
    """The paths in which these samples lie; None where they are no files of this machine."""
    if connector is None or traits_of(connector).is_remote:
        return None
    keys: dict[str, None] = {}
    for index in indices:
        keys.update((sample_range.range.key, None) for sample_range in source.ranges(index))
    paths = [connector.describe(key) for key in keys]
    return paths if all(os.path.isfile(path) for path in paths) else None
