"""Which format the files of a checkpoint have, by what they begin with, and which of them belong to it.

The beginnings of all files are read at once and kept: they hold most headers whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loaderkit.checkpoint.discovery.locate import CheckpointLocation
from loaderkit.checkpoint.formats import safetensors, torch_zip
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import CheckpointError

METADATA = ".metadata"
INDEX = ".index.json"
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
_MAX_LOOKED_AT = 1000
_LEAST_HEAD = 32
_HEAD = 64 * 2**10  # of a file: tells its format, and is all of most headers
_MOST_HEADS = 2**26  # bytes of all of them
Fetch = Callable[[Sequence[ByteRange]], list[bytes]]


def looked_at(location: CheckpointLocation, infos: dict[str, ObjectInfo]) -> list[str]:
    """The files whose beginning is to tell the format."""
    if METADATA in infos and location.single is None:
        return [name for name in infos if name.endswith(_SUFFIXES)]
    parts = [name for name in infos if name.endswith(".distcp")]
    if parts and location.single is None:
        raise CheckpointError(
            f"{location.url} has {parts[0]} and no {METADATA}: the checkpoint was not committed, so it is not whole"
        )
    indexes = [name for name in infos if name.endswith(INDEX)]
    names = [name for name in infos if name.endswith(_SUFFIXES)] if indexes else _candidates(infos)
    for index in indexes:
        if not any(name.endswith(index.removesuffix(INDEX).rpartition(".")[2]) for name in names):
            raise CheckpointError(f"{location.connector.describe(infos[index].key)} is there, and none of its files is")
    return names


def heads_of(infos: list[ObjectInfo], fetch: Fetch) -> dict[str, bytes]:
    """Key -> the first bytes of the object, all of them read at once."""
    most = max(_LEAST_HEAD, min(_HEAD, _MOST_HEADS // max(len(infos), 1)))
    read = fetch([ByteRange(info.key, 0, min(most, info.size), info.etag) for info in infos])
    return {info.key: head for info, head in zip(infos, read, strict=True)}


def kinds_of(
    location: CheckpointLocation, infos: dict[str, ObjectInfo], names: list[str], heads: dict[str, bytes]
) -> dict[str, list[str]]:
    """Format -> the files of it, by what they begin with."""
    found = {"dcp": [METADATA]} if METADATA in infos and location.single is None else {}
    for name in names:
        kind = _kind_of(location, infos[name], heads[infos[name].key])
        if kind is not None:
            found.setdefault(kind, []).append(name)
    return found


def _candidates(infos: dict[str, ObjectInfo]) -> list[str]:
    usual = [name for name in infos if name.endswith(_SUFFIXES)]
    return usual or [name for name in infos if not name.endswith((".json", ".txt", ".md", ".yaml"))][:_MAX_LOOKED_AT]


def _kind_of(location: CheckpointLocation, info: ObjectInfo, head: bytes) -> str | None:
    if head.startswith(torch_zip.MAGIC):
        return "torch"
    if torch_zip.is_legacy(head):
        return "legacy"
    if safetensors.looks_like_safetensors(head, info.size) or info.key.endswith(".safetensors"):
        return "safetensors"
    if info.key.endswith((".pt", ".pth")):
        raise CheckpointError(
            f"{location.connector.describe(info.key)} is no whole torch.save file: it begins with {head[:4]!r}"
        )
    return None
