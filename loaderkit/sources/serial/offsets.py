"""Finds where the samples of a file begin, by one pass over it; the result is kept on this machine, and mapped.

    header, 64 bytes | starts, int64 [items + 1] | blanks, int64 [blank items]

An item is a line or a record. The first start may lie behind a mark of the file's own; the last is the file's end.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import keep
from loaderkit.connectors.base import ObjectInfo
from loaderkit.errors import FormatError

Int64s = NDArray[np.int64]
Parts = Iterable[tuple[Int64s, Int64s]]
"""Part by part: the starts that were found, and the numbers of the blank items; the last start is the end of the file."""

_HEADER = struct.Struct(
    "<8sq16s16sqq"
)  # magic, the file's size, digest of its etag, of the rest, numbers of starts and blanks
_MAGIC = b"LKITEMS1"
_LEAST_MAPPED = 1 << 16  # bytes; a system maps 65,530 files at most
_CHECKED_AT_ONCE = 1 << 20


class Offsets(NamedTuple):
    """The items of one file: item i begins at `starts[i]` and ends where the next begins. `blanks` are the numbers of
    the blank items. `digest` differs, for all practical purposes, when any of them does. `path`: the file from which it
    is mapped."""

    starts: Int64s
    blanks: Int64s
    digest: bytes
    path: Path | None = None


def load_offsets(info: ObjectInfo, path: Path | None, find: Callable[[], Parts]) -> Offsets:
    """The items of the file `info`: from the copy at `path` (None keeps no copy) if size and etag match, else by
    `find`, and kept. A failure to keep it is no error. Raises what `find` raises."""
    if path is None:
        return _in_memory(info, find())
    offsets = _load_copy(path, info)
    if offsets is None:
        is_kept = keep(path, lambda file: pack(info, find(), tag_of(info), file))
        offsets = _load_copy(path, info) if is_kept else None
    return _in_memory(info, find()) if offsets is None else offsets


def pack(info: ObjectInfo, parts: Parts, tag: bytes, file: IO[bytes]) -> None:
    """Write an index; `tag`, 16 bytes, says which version of the file it is of. Raises OSError, and what `parts` raise."""
    file.write(bytes(_HEADER.size))
    digest, num_starts, blanks = blake2b(digest_size=16), 0, [np.zeros(0, np.int64)]
    for starts, are_blank in parts:
        data = np.ascontiguousarray(starts, "<i8").data.cast("B")
        digest.update(data)
        file.write(data)
        num_starts += len(starts)
        blanks.append(are_blank)
    data = np.concatenate(blanks).astype("<i8").data.cast("B")
    digest.update(data)
    file.write(data)
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, info.size, tag, digest.digest(), num_starts, len(data) // 8))
    file.flush()


def unpack(file: IO[bytes], info: ObjectInfo, tag: bytes | None, path: Path | None = None) -> Offsets:
    """An index as `pack` writes it, mapped from `path` if it is large. Raises FormatError if it is damaged, or of another
    version of the file (if `tag` is None, any version of this size will do)."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise FormatError("it is no index of lines or records")
    _, size, its_tag, digest, num_starts, num_blanks = _HEADER.unpack(header)
    if size != info.size or tag not in (None, its_tag):
        raise FormatError(f"it was made for another version of the file, of {size} bytes")
    if num_starts < 1 or num_blanks < 0 or num_bytes != _HEADER.size + 8 * (num_starts + num_blanks):
        raise FormatError(f"it has {num_bytes} bytes, not those of {num_starts} starts: it is truncated or damaged")
    numbers: NDArray[Any]
    if path is not None and num_bytes >= _LEAST_MAPPED:
        numbers = np.asarray(np.memmap(file, "<i8", "r", _HEADER.size))  # of this file, should another replace it
    else:
        numbers = np.frombuffer(file.read(), "<i8")
        path = None
    offsets = Offsets(numbers[:num_starts], numbers[num_starts:], digest, path)
    _check(offsets, size)
    return offsets


def parse(data: bytes | bytearray, info: ObjectInfo, tag: bytes | None = None) -> Offsets:
    """`unpack` of what lies in memory."""
    return unpack(io.BytesIO(data), info, tag)


def _check(offsets: Offsets, size: int) -> None:
    """Raise FormatError unless the starts rise to the file's size, and blanks are numbers of items."""
    starts, blanks = offsets.starts, offsets.blanks
    is_well = starts[0] >= 0 and starts[-1] == size and _rises(starts)
    if len(blanks):
        is_well = is_well and blanks[0] >= 0 and blanks[-1] < len(starts) - 1 and _rises(blanks)
    if not is_well:
        raise FormatError("its offsets do not rise from the begin of the file to its end: it is damaged")


def _rises(numbers: Int64s) -> bool:
    """Checked part by part, as all starts together may be larger than memory."""
    firsts = range(0, len(numbers), _CHECKED_AT_ONCE)
    parts = (numbers[first : first + _CHECKED_AT_ONCE + 1] for first in firsts)
    return all(bool(np.all(part[1:] > part[:-1])) for part in parts)


def tag_of(info: ObjectInfo) -> bytes:
    """The tag of a file as the store has it now."""
    return blake2b(info.etag.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _in_memory(info: ObjectInfo, parts: Parts) -> Offsets:
    file = io.BytesIO()
    pack(info, parts, tag_of(info), file)
    return unpack(file, info, None)


def _load_copy(path: Path, info: ObjectInfo) -> Offsets | None:
    """The copy on this machine; None if it is missing, damaged, or of another version of the file."""
    try:
        with open(path, "rb") as file:
            return unpack(file, info, tag_of(info), path)
    except (OSError, FormatError):
        return None
