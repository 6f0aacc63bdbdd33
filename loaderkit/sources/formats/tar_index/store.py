"""Loads an index from a file beside the archive, from a copy on this machine, or by a scan of the archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit._internal.text import warn
from loaderkit.connectors.base import Connector, ObjectInfo, traits_of, version_of
from loaderkit.errors import AccessDeniedError, FormatError, ObjectNotFoundError
from loaderkit.sources.formats.tar_index.index import TarIndex, sample_key_and_extension
from loaderkit.sources.formats.tar_index.scan import TarScanner, scan_tar
from loaderkit.sources.formats.tar_index.wds import parse_wds_index, wds_index_key

_VERSION = 1


def load_index(
    connector: Connector,
    info: ObjectInfo,
    cache_dir: Path | None,
    *,
    use_wds_index: bool = True,
    up_to_damage: bool = False,
) -> TarIndex:
    """The members of the archive `info`, from the cheapest source.

    First the `.idx` beside it, if it exists and fits the archive (a misfit is warned about); it lists only members of samples,
    so a caller that needs every member passes `use_wds_index=False`. Then the copy in `cache_dir` (None keeps no
    copies), if it is of this version. Else the headers are scanned and a copy is kept; a failure to keep it is no error.
    For a remote store the `.idx` is copied as well, and copies come first, as a look beside each of thousands of shards
    takes requests. Raises what `scan_tar` raises. With `up_to_damage` a damaged archive has an index as well, of which
    no copy is kept.
    """
    if cache_dir is None:
        index = _beside(connector, info) if use_wds_index else None
        return index if index is not None else scan_tar(connector, info, up_to_damage=up_to_damage)
    version = info._replace(etag=version_of(connector, info))
    path = path_in_cache(cache_dir, "tar-index", connector.describe(info.key), ".npz")
    of_samples = path.with_name(f"{path.stem}-samples.npz")
    is_remote = traits_of(connector).is_remote
    index = _load_copy(path, version) if is_remote else None
    if index is None and use_wds_index:
        index = _load_copy(of_samples, version) if is_remote else None
        if index is None and (index := _beside(connector, info)) is not None and is_remote:
            _save_copy(of_samples, version, index)
    if index is None:
        index = _load_copy(path, version)
    if index is None:
        index = scan_tar(connector, info, up_to_damage=up_to_damage)
        if index.is_whole:  # else the next to open it must be warned too
            _save_copy(path, version, index)
    return index


def _beside(connector: Connector, info: ObjectInfo) -> TarIndex | None:
    """The index file beside the archive; None if it is missing or does not fit."""
    key = wds_index_key(info.key)
    where = connector.describe(key)
    try:
        beside = connector.stat(key)
        # The index names a member twice, the archive once, but with a header longer than the index's numbers.
        is_too_long = beside.size > 2 * info.size
        data = bytearray(0 if is_too_long else beside.size)
        connector.read_into(key, 0, memoryview(data), etag=beside.etag)
    except (ObjectNotFoundError, AccessDeniedError):  # a store may answer "denied" for what does not exist
        return None
    try:
        if is_too_long:
            raise FormatError(f"it has {beside.size} bytes, too many for an archive of {info.size} bytes")
        index = parse_wds_index(data.decode("utf-8", "surrogateescape"), where)
        if index is None:
            return None
        misfit = _misfit(connector, info, index)
    except FormatError as error:
        misfit = str(error)
    if misfit is None:
        return index
    warn(
        f"the index {where} is not used, since it does not fit its archive: {misfit}; create it again or delete it "
        "(`loaderkit index`)"
    )
    return None


def _uncached(connector: Connector) -> Connector:
    """The connector without its cache, which would fetch 4 MiB for each header."""
    from loaderkit.connectors.layers.cache import CacheConnector  # 7 ms, only needed with index files

    return connector.inner if isinstance(connector, CacheConnector) else connector


def _misfit(connector: Connector, info: ObjectInfo, index: TarIndex) -> str | None:
    """Why an index cannot be of this archive, or None; checks the headers before the first and last member."""
    if np.any(index.starts > info.size - index.sizes):  # their sum could overflow
        return f"it has members beyond the archive's {info.size} bytes"
    if np.any(index.starts[1:] < index.starts[:-1] + index.sizes[:-1]):
        return "its members overlap"
    scanner = TarScanner(_uncached(connector), info)
    last = len(index) - 1
    for number in sorted({0, last}) if len(index) else ():
        # From the end of the member before: extended headers may lie between the two.
        expected = index[number]
        for name, start, size in scanner.walk(_next_header(index, number - 1)):
            actual_name = name.decode("utf-8", "surrogateescape")
            if (actual_name, start, size) == expected:
                break
            if start >= expected.start or sample_key_and_extension(actual_name) is not None:
                return (
                    f"it gives {expected.name!r} ({expected.size} bytes) where the archive has {actual_name!r} ({size})"
                )
        else:
            return f"the archive has no {expected.name!r} at byte {expected.start}"
    for name, _, _ in scanner.walk(_next_header(index, last)):
        actual_name = name.decode("utf-8", "surrogateescape")
        if sample_key_and_extension(actual_name) is not None:
            return f"the archive continues with {actual_name!r}, which the index lacks"
    return None


def _next_header(index: TarIndex, number: int) -> int:
    return -(-int(index.starts[number] + index.sizes[number]) // 512) * 512 if number >= 0 else 0


def _load_copy(path: Path, info: ObjectInfo) -> TarIndex | None:
    """The copy on this machine; None if it is missing, damaged, or of another version of the object."""
    try:
        # Opened here, as np.load does not close a damaged file.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as parts:
            if (int(parts["version"]), int(parts["size"]), str(parts["etag"])) != (_VERSION, info.size, info.etag):
                return None
            index = TarIndex(
                parts["starts"].astype(np.int64, casting="safe"),
                parts["sizes"].astype(np.int64, casting="safe"),
                parts["names"].astype(np.uint8, casting="safe").tobytes(),
            )
    except Exception:  # a damaged zip raises one of a dozen exceptions; scan again after any
        return None
    inside = (index.starts >= 0) & (index.sizes >= 0) & (index.sizes <= info.size - index.starts)
    return index if np.all(inside) else None


def _save_copy(path: Path, info: ObjectInfo, index: TarIndex) -> None:
    parts: dict[str, Any] = {
        "version": np.int64(_VERSION),
        "size": np.int64(info.size),
        "etag": np.array(info.etag),
        "starts": index.starts,
        "sizes": index.sizes,
        "names": np.frombuffer(index.packed_names, np.uint8),
    }
    keep(path, lambda file: np.savez(file, **parts))
