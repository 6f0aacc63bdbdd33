"""What the readers of all formats need: bytes of a file whose head was read already, an index of shards, errors that name a
file."""

from __future__ import annotations

import json
from collections.abc import Callable

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.discovery.detect import CheckpointFiles
from loaderkit.connectors.base import ObjectInfo
from loaderkit.errors import CheckpointError, FormatError

MAX_INDEX = 2**28


def reader_in(checkpoint: Checkpoint, info: ObjectInfo, head: bytes) -> Callable[[int, memoryview], None]:
    """Reads in an object whose first bytes are in memory already."""

    def read(start: int, buffer: memoryview) -> None:
        have = head[start : start + len(buffer)]
        buffer[: len(have)] = have
        if len(have) < len(buffer):
            checkpoint.connector.read_into(info.key, start + len(have), buffer[len(have) :], etag=info.etag)

    return read


def named_error(checkpoint: Checkpoint, info: ObjectInfo, error: Exception) -> FormatError:
    """An error that names the file."""
    return FormatError(f"{checkpoint.describe(info.key)}: {error}")


def require_new(checkpoint: Checkpoint, name: str, info: ObjectInfo) -> None:
    """Raise CheckpointError if another file has this name, too."""
    if name in checkpoint.tensors or name in checkpoint.values or name in checkpoint.pickled:
        raise CheckpointError(
            f"{checkpoint.describe(info.key)}: {name!r} is in another file of {checkpoint.name}, too: name one file"
        )


def indexed_names(checkpoint: Checkpoint, chosen: CheckpointFiles, suffix: str) -> dict[str, set[str]] | None:
    """File -> the names in it according to the index; None without an index. Other files of this kind are no part of
    the checkpoint."""
    if chosen.index is None:
        return None
    info = checkpoint.objects[chosen.index]
    try:
        data = read_whole(checkpoint, info, MAX_INDEX)
    except FormatError as error:
        raise named_error(checkpoint, info, error) from None
    try:
        names = json.loads(data)["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise TypeError("its weight_map is no table of file names")
        if not names:
            raise ValueError("its weight_map is empty, so none of the files here would count")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise named_error(checkpoint, info, FormatError(f"it is no index of a checkpoint: {error!r}")) from None
    indexed: dict[str, set[str]] = {}
    for name, file in names.items():
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise named_error(
                checkpoint, info, FormatError(f"it names {file!r} for {name!r}, and there is no such file beside it")
            )
        indexed.setdefault(file, set()).add(name)
    if missing := [file for file in indexed if file not in checkpoint.objects]:
        raise CheckpointError(
            f"{checkpoint.name} is not whole: {len(missing)} of {len(indexed)} shards are missing, such as {missing[0]!r}, "
            f"which {chosen.index} names"
        )
    if other := [file for file in indexed if file not in chosen.files]:
        raise named_error(
            checkpoint, checkpoint.objects[other[0]], FormatError(f"it is no {suffix[1:]} file, and the index names it")
        )
    checkpoint.beside[:0] = [name for name in chosen.files if name not in indexed]
    return indexed


def check_index(checkpoint: Checkpoint, indexed: dict[str, set[str]] | None) -> None:
    """Raise CheckpointError for a name of an index that its file does not have."""
    for file, names in (indexed or {}).items():
        for name in sorted(names):
            if name not in checkpoint.tensors and name not in checkpoint.values:
                raise CheckpointError(
                    f"{checkpoint.name} is not whole: {file} has no tensor {name!r}, which the index lists there"
                )


def read_whole(checkpoint: Checkpoint, info: ObjectInfo, most: int) -> bytes:
    """All bytes of a description. Raises FormatError."""
    if info.size > most:
        raise FormatError(f"{info.size} bytes are too many for it")
    data = bytearray(info.size)
    checkpoint.connector.read_into(info.key, 0, memoryview(data), etag=info.etag)
    checkpoint.read.add(info.key)
    return bytes(data)
