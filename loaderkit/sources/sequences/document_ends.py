"""Finds where documents end in a file of tokens: behind every token with a given number. One scan finds them, and its
result is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit.connectors.base import Connector, ObjectInfo, version_of

_VERSION = 1
_BLOCK_BYTES = 8 << 20  # a multiple of any token's size


def load_document_ends(
    connector: Connector,
    info: ObjectInfo,
    cache_dir: Path | None,
    *,
    first_byte: int,
    dtype: np.dtype[Any],
    end: int,
    block_bytes: int = _BLOCK_BYTES,
) -> NDArray[np.int64]:
    """The number of tokens up to the end of every document: int64 [documents]. The last one is the number of tokens in
    the file.

    Documents end behind every token `end`, and at the end of the file. Taken from the copy in `cache_dir` (None keeps
    no copies) if it is of this version, else found by reading the file once, `block_bytes` at a time; a failure to keep a
    copy is no error. Raises what the connector raises.
    """
    if cache_dir is None:
        return _scanned(connector, info, first_byte, dtype, end, block_bytes)
    path = path_in_cache(cache_dir, "document-ends", connector.describe(info.key), ".npz")
    made_of = f"{_VERSION} {info.size} {version_of(connector, info)} {first_byte} {dtype.str} {end}"
    ends = _load_copy(path, made_of)
    if ends is None:
        ends = _scanned(connector, info, first_byte, dtype, end, block_bytes)
        parts: dict[str, Any] = {"made_of": np.array(made_of), "ends": ends}
        keep(path, lambda file: np.savez(file, **parts))
    return ends


def _scanned(  # noqa: PLR0917 - one call
    connector: Connector, info: ObjectInfo, first_byte: int, dtype: np.dtype[Any], end: int, block_bytes: int
) -> NDArray[np.int64]:
    block = bytearray(min(block_bytes, info.size - first_byte))
    num_tokens = (info.size - first_byte) // dtype.itemsize
    found: list[NDArray[np.int64]] = []
    for begin in range(first_byte, info.size, block_bytes):
        view = memoryview(block)[: min(block_bytes, info.size - begin)]
        connector.read_into(info.key, begin, view, etag=info.etag)
        found.append(np.flatnonzero(np.frombuffer(view, dtype) == end) + (begin - first_byte) // dtype.itemsize + 1)
    ends = np.concatenate(found) if found else np.zeros(0, np.int64)
    if not len(ends) or ends[-1] != num_tokens:
        ends = np.append(ends, num_tokens)
    return ends.astype(np.int64, copy=False)


def _load_copy(path: Path, made_of: str) -> NDArray[np.int64] | None:
    """The copy on this machine; None if it is missing, damaged, or of another version of the file."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as parts:
            if str(parts["made_of"]) != made_of:
                return None
            ends: NDArray[np.int64] = parts["ends"].astype(np.int64, casting="safe")
    except Exception:  # a damaged zip raises one of a dozen exceptions; scan again after any
        return None
    is_whole = ends.ndim == 1 and len(ends) and ends[0] > 0 and bool(np.all(ends[1:] > ends[:-1]))
    return ends if is_whole else None
