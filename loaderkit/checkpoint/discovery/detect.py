"""Tells the format of a checkpoint by the first bytes of its files.

The first bytes of all files are read at once and kept: they hold most headers whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loaderkit.checkpoint.discovery.locate import CheckpointLocation
from loaderkit.checkpoint.formats import safetensors, torch_zip, zip_records
from loaderkit.checkpoint.formats.state_file import STATE
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import CheckpointError

METADATA = ".metadata"
INDEX = ".index.json"
DESCRIBING = (METADATA, INDEX, STATE)
"""Ends the names of the files that readers take for the sign of a whole checkpoint."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
_MAX_CANDIDATES = 1000
_MIN_HEAD = 32
_HEAD = 64 * 2**10  # bytes of a file; most headers are no longer
_MAX_HEADS = 2**26  # bytes of all files
Fetch = Callable[[Sequence[ByteRange]], list[bytes]]


def candidates(location: CheckpointLocation, infos: dict[str, ObjectInfo]) -> list[str]:
    """The files whose first bytes are to be read. Raises CheckpointError for a checkpoint that was not committed."""
    if STATE in infos and location.single is None:
        return []  # it names them
    if METADATA in infos and location.single is None:
        return [name for name in infos if name.endswith(SUFFIXES)]
    parts = [name for name in infos if name.endswith(".distcp")]
    if parts and location.single is None:
        raise CheckpointError(
            f"{location.url} has {parts[0]} and no {METADATA}: the checkpoint was not committed, so it is not whole"
        )
    indexes = [name for name in infos if name.endswith(INDEX)]
    names = [name for name in infos if name.endswith(SUFFIXES)] if indexes else _usual_files(infos)
    for index in indexes:
        if not any(name.endswith(index.removesuffix(INDEX).rpartition(".")[2]) for name in names):
            raise CheckpointError(f"{location.connector.describe(infos[index].key)} is there, and none of its files is")
    return names


def heads_of(infos: list[ObjectInfo], fetch: Fetch) -> dict[str, bytes]:
    """Key -> the first bytes of the object."""
    most = max(_MIN_HEAD, min(_HEAD, _MAX_HEADS // max(len(infos), 1)))
    read = fetch([ByteRange(info.key, 0, min(most, info.size), info.etag) for info in infos])
    return {info.key: head for info, head in zip(infos, read, strict=True)}


def formats_of(
    location: CheckpointLocation, infos: dict[str, ObjectInfo], names: list[str], heads: dict[str, bytes]
) -> dict[str, list[str]]:
    """Format -> its files."""
    files = {}
    if location.single is None:
        files = {kind: [name] for kind, name in (("dcp", METADATA), ("state", STATE)) if name in infos}
    for name in names:
        format_ = _format_of(location, infos[name], heads[infos[name].key])
        if format_ is not None:
            files.setdefault(format_, []).append(name)
    return files


def _usual_files(infos: dict[str, ObjectInfo]) -> list[str]:
    usual = [name for name in infos if name.endswith(SUFFIXES)]
    return usual or [name for name in infos if not name.endswith((".json", ".txt", ".md", ".yaml"))][:_MAX_CANDIDATES]


def _format_of(location: CheckpointLocation, info: ObjectInfo, head: bytes) -> str | None:
    if head.startswith(zip_records.MAGIC):
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
