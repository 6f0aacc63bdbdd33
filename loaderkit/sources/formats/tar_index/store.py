"""Where an index comes from: a file beside the archive, one kept on this machine, or the archive itself."""

from __future__ import annotations

import os
import secrets
import warnings
from hashlib import blake2b
from pathlib import Path

import numpy as np

from loaderkit.connectors.base import Connector, ObjectInfo, traits_of
from loaderkit.errors import AccessDeniedError, FormatError, ObjectNotFoundError, printable
from loaderkit.sources.formats.tar_index.index import TarIndex, sample_key_and_extension
from loaderkit.sources.formats.tar_index.scan import TarScanner, scan_tar
from loaderkit.sources.formats.tar_index.wds import parse_wds_index, wds_index_key

_VERSION = 1


def default_cache_dir() -> Path:
    """$LOADERKIT_CACHE_DIR, or `loaderkit` in $XDG_CACHE_HOME, or ~/.cache/loaderkit."""
    own = os.environ.get("LOADERKIT_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loaderkit"


def load_index(
    connector: Connector, info: ObjectInfo, cache_dir: Path | None, *, use_wds_index: bool = True
) -> TarIndex:
    """The members of the archive `info`, from wherever that costs least.

    First the `.idx` beside it, if there is one and it fits the archive (one that does not is warned about); it lists
    only what can belong to a sample, so a caller that needs every member says `use_wds_index=False`. Then the copy in
    `cache_dir` (None: keep no copies), if it was made from the same object by size and etag. Else the headers are
    scanned, and a copy kept; failing to keep one is no error. Of a remote store the `.idx` is kept as well, and copies
    come first: looking beside thousands of shards takes some requests for each. Raises what `scan_tar` raises.
    """
    if cache_dir is None:
        index = _beside(connector, info) if use_wds_index else None
        return index if index is not None else scan_tar(connector, info)
    name = blake2b(os.fsencode(connector.describe(info.key)), digest_size=16).hexdigest()
    path = Path(cache_dir) / "tar-index" / f"{name}.npz"
    of_samples = path.with_name(f"{name}-samples.npz")
    is_remote = traits_of(connector).is_remote
    index = _kept(path, info) if is_remote else None
    if index is None and use_wds_index:
        index = _kept(of_samples, info) if is_remote else None
        if index is None and (index := _beside(connector, info)) is not None and is_remote:
            _keep(of_samples, info, index)
    if index is None:
        index = _kept(path, info)
    if index is None:
        index = scan_tar(connector, info)
        if index.is_whole:  # else the next one to open it is to be warned, too
            _keep(path, info, index)
    return index


def _beside(connector: Connector, info: ObjectInfo) -> TarIndex | None:
    """The index file beside the archive, if it is there and fits."""
    key = wds_index_key(info.key)
    where = connector.describe(key)
    try:
        beside = connector.stat(key)
        # A member's name stands in the archive once and twice in the index, and its header is longer than its numbers.
        is_too_long = beside.size > 2 * info.size
        data = bytearray(0 if is_too_long else beside.size)
        connector.read_into(key, 0, memoryview(data), etag=beside.etag)
    except (ObjectNotFoundError, AccessDeniedError):  # a store may answer "denied" for what does not exist
        return None
    try:
        if is_too_long:
            raise FormatError(f"it has {beside.size} bytes, and that of {info.size} bytes of archive has fewer")
        index = parse_wds_index(data.decode("utf-8", "surrogateescape"), where)
        if index is None:
            return None
        misfit = _misfit(connector, info, index)
    except FormatError as error:
        misfit = str(error)
    if misfit is None:
        return index
    warnings.warn(
        printable(
            f"the index {where} is not used, since it does not fit its archive: {misfit}; create or delete it anew "
            "(`loaderkit index`)"
        ),
        stacklevel=3,
    )
    return None


def _uncached(connector: Connector) -> Connector:
    """Past a cache, which would fetch 4 MiB for each header."""
    from loaderkit.connectors.layers.cache import CacheConnector  # 7 ms, for those who have index files

    return connector.inner if isinstance(connector, CacheConnector) else connector


def _misfit(connector: Connector, info: ObjectInfo, index: TarIndex) -> str | None:
    """Why an index cannot be of this archive, or None. Looks at the headers before the first and last member."""
    if np.any(index.starts > info.size - index.sizes):  # their sum could be larger than any number
        return f"it has members beyond the archive's {info.size} bytes"
    if np.any(index.starts[1:] < index.starts[:-1] + index.sizes[:-1]):
        return "its members overlap"
    scanner = TarScanner(_uncached(connector), info)
    last = len(index) - 1
    for place in sorted({0, last}) if len(index) else ():
        # From the end of the member before: extended headers may stand between the two.
        expected = index[place]
        for name, start, size in scanner.walk(_next_header(index, place - 1)):
            found = name.decode("utf-8", "surrogateescape")
            if (found, start, size) == expected:
                break
            if start >= expected.start or sample_key_and_extension(found) is not None:
                return f"it gives {expected.name!r} ({expected.size} bytes) where the archive has {found!r} ({size})"
        else:
            return f"the archive has no {expected.name!r} at byte {expected.start}"
    for name, _, _ in scanner.walk(_next_header(index, last)):
        found = name.decode("utf-8", "surrogateescape")
        if sample_key_and_extension(found) is not None:
            return f"the archive goes on with {found!r}, which the index lacks"
    return None


def _next_header(index: TarIndex, place: int) -> int:
    return -(-int(index.starts[place] + index.sizes[place]) // 512) * 512 if place >= 0 else 0


def _kept(path: Path, info: ObjectInfo) -> TarIndex | None:
    """The copy kept on this machine; None if there is none, or not of this object, or a damaged one."""
    try:
        # Opened here, since np.load leaves a damaged file open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as parts:
            if (int(parts["version"]), int(parts["size"]), str(parts["etag"])) != (_VERSION, info.size, info.etag):
                return None
            index = TarIndex(
                parts["starts"].astype(np.int64, casting="safe"),
                parts["sizes"].astype(np.int64, casting="safe"),
                parts["names"].astype(np.uint8, casting="safe").tobytes(),
            )
    except Exception:  # a damaged zip shows itself as one of a dozen exceptions; all of them mean: scan again
        return None
    inside = (index.starts >= 0) & (index.sizes >= 0) & (index.sizes <= info.size - index.starts)
    return index if np.all(inside) else None


def _keep(path: Path, info: ObjectInfo, index: TarIndex) -> None:
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                np.savez(
                    file,
                    version=np.int64(_VERSION),
                    size=np.int64(info.size),
                    etag=np.array(info.etag),
                    starts=index.starts,
                    sizes=index.sizes,
                    names=np.frombuffer(index.packed_names, np.uint8),
                )
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError:  # a read-only or full disk costs time at the next start, nothing else
        return
