"""Makes a save the checkpoint: once everything is durable, by one step; and clears what saves left that died before it.

A new checkpoint is written beside its place and renamed, or, where the store cannot rename, written in place, `.metadata` after
all the files that it names. An existing one stays: the new files get other names and lie beside the old ones, and replacing
`.metadata` is the one step. While it is replaced the manifest holds for both. So readers see the old checkpoint or the new one.

    new, renamed     files, .metadata, manifest ──> durable ──> rename
    in place         files ──> durable ──> manifest of both ──> .metadata ──> manifest ──> old files removed
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES
from loaderkit.checkpoint.discovery.detect import METADATA, SUFFIXES
from loaderkit.checkpoint.discovery.locate import SaveTarget
from loaderkit.checkpoint.discovery.manifest import NAME, manifest_of, parse_manifest
from loaderkit.checkpoint.formats.dcp import read_metadata
from loaderkit.checkpoint.save.engine import SavedFile
from loaderkit.checkpoint.save.placement import (
    Placement,
    Trace,
    generation_of,
    listed,
    marker_key,
    place,
    read_object,
    traces,
)
from loaderkit.connectors.base import Writes
from loaderkit.errors import CheckpointError, ConnectorError, FormatError, ObjectNotFoundError

logger = logging.getLogger("loaderkit")


def begin(target: SaveTarget, writes: Writes) -> Placement:
    """Clear what dead saves left, and give this one a place. Raises CheckpointError, ConnectorError."""
    found = traces(target)
    running = [trace for trace in found if trace.is_running]
    for trace in found:
        if not trace.is_running:
            try:
                clear(target, writes, trace, _of(trace.name, running))
            except (ConnectorError, FormatError) as error:
                where = target.connector.describe(trace.base)
                logger.warning("what a save that died left at %s is not cleared: %s", where, error)
    others = _of(target.name, running)
    if target.name and not others:
        writes.clear(target.prefix)
    names = [info.key[len(target.prefix) :] for info in listed(target.connector, target.prefix)]
    foreign = [name for name in names if "/" not in name and name.endswith(SUFFIXES)]
    if foreign:
        raise CheckpointError(
            f"{target.url} holds {foreign[0]!r}, a checkpoint of another format: nobody could read it beside this one; save "
            "to another directory"
        )
    return place(target, writes, others)


def _of(name: str, running: Iterable[Trace]) -> list[Placement]:
    """Where the files of that checkpoint go that are being written now."""
    return [trace.placement for trace in running if trace.name == name and trace.placement is not None]


def clear(target: SaveTarget, writes: Writes, trace: Trace, others: Sequence[Placement] = ()) -> None:
    """Remove what a dead save left; its marker last. `others` save the same checkpoint now.

    Raises ConnectorError, FormatError.
    """
    placement = trace.placement
    if placement is None and next(listed(target.connector, trace.marker), None) is not None:
        return  # written meanwhile, or by another version
    if placement is not None and placement.in_place:
        final = target._replace(name=trace.name)
        names = [info.key[len(final.prefix) :] for info in listed(target.connector, final.prefix)]
        kept = {None, *(other.generation for other in others)}
        if METADATA not in names:  # the other files are another writer's, which may not be done
            kept |= {generation_of(name) for name in names} - {placement.generation}
        tidy(final, writes, [name for name in names if generation_of(name) not in kept])
        if trace.name and not others:
            writes.clear(final.prefix)
    for key in trace.keys:
        if key != trace.marker:
            writes.delete(key)
    for folder in trace.folders:
        writes.clear(folder)
    writes.delete(trace.marker)
    writes.sync(target.parent)


def commit(
    target: SaveTarget, writes: Writes, placement: Placement, files: Iterable[SavedFile], metadata: bytes
) -> None:
    """Make the save the checkpoint. `files` are those of all ranks, `metadata` is what names them.

    Raises CheckpointError if a file is not there as it was written, ConnectorError; then the previous checkpoint stands, or
    if the error came after the one step, the new one.
    """
    objects = {file.name: _entry(file.num_bytes, file.block_bytes, file.hexadecimal()) for file in files}
    _check_files(target, placement, objects)
    description = _described(metadata)
    if placement.in_place:
        _replace(target, writes, objects, metadata, description)
    else:
        writes.put(placement.folder + METADATA, metadata)
        writes.put(placement.folder + NAME, _encoded(manifest_of(objects | {METADATA: description})))
        writes.sync(placement.folder)
        if not writes.rename(placement.folder, target.prefix):
            raise CheckpointError(
                f"{target.url}: the store does not rename any more, so what was saved stays in {placement.folder!r}"
            )
    writes.delete(marker_key(target, placement))


def _check_files(target: SaveTarget, placement: Placement, objects: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless all ranks' files are seen from here."""
    sizes = {info.key[len(placement.folder) :]: info.size for info in listed(target.connector, placement.folder)}
    for name, item in objects.items():
        if sizes.get(name) != item["num_bytes"]:
            there = f"has {sizes[name]} bytes" if name in sizes else "is not there"
            raise CheckpointError(
                f"{target.url} is not committed: {name!r} {there}, and {item['num_bytes']} were written. Is it the same "
                "directory on all machines?"
            )


def _replace(
    target: SaveTarget, writes: Writes, objects: dict[str, Any], metadata: bytes, description: dict[str, Any]
) -> None:
    """Commit where the files lie already."""
    old_names, old = _named_by(target), _manifest(target)
    writes.sync(target.prefix)
    if old is not None:
        both = manifest_of(objects | old["objects"], old["block_bytes"], replacing={METADATA: description})
        writes.put(target.prefix + NAME, _encoded(both))
    writes.put(target.prefix + METADATA, metadata)
    writes.put(target.prefix + NAME, _encoded(manifest_of(objects | {METADATA: description})))
    if old_names:
        tidy(target, writes, old_names)


def tidy(target: SaveTarget, writes: Writes, names: Iterable[str]) -> None:
    """Remove those of the files `names` that the checkpoint's `.metadata` does not name, after the manifest is without them.

    Raises FormatError if `.metadata` cannot be read, or is not that of the manifest; then nothing is removed.
    """
    needed: set[str] = set()
    try:
        metadata = read_object(target.connector, target.prefix + METADATA)
    except ObjectNotFoundError:
        pass
    else:
        needed = _files_of(metadata)
        if (manifest := _manifest(target)) is not None:
            _restrict(target, writes, manifest, needed, metadata)
    for name in sorted(set(names) - needed - {METADATA, NAME}):
        writes.delete(target.prefix + name)
    writes.sync(target.prefix)


def _restrict(target: SaveTarget, writes: Writes, manifest: dict[str, Any], needed: set[str], metadata: bytes) -> None:
    """Make a manifest of two checkpoints that of the one whose `.metadata` is there. Raises FormatError if it is of neither."""
    said = [manifest["objects"].get(METADATA), manifest.get("replacing", {}).get(METADATA)]
    if "replacing" not in manifest and manifest["objects"].keys() <= needed | {METADATA}:
        return
    for entry in filter(None, said):
        block_bytes = entry.get("block_bytes", manifest["block_bytes"])
        if _described(metadata, block_bytes)["hashes"] == entry["hashes"]:
            kept = {name: item for name, item in manifest["objects"].items() if name in needed}
            writes.put(target.prefix + NAME, _encoded(manifest_of(kept | {METADATA: entry}, manifest["block_bytes"])))
            return
    raise FormatError(f"{target.connector.describe(target.prefix + METADATA)} is not that of its manifest")


def _named_by(target: SaveTarget) -> set[str]:
    """The files that the checkpoint's `.metadata` names; none without one, or if it cannot be read."""
    try:
        return _files_of(read_object(target.connector, target.prefix + METADATA))
    except (ObjectNotFoundError, FormatError):
        return set()


def _files_of(metadata: bytes) -> set[str]:
    contents = read_metadata(metadata)
    names = {shard.key for entry in contents.tensors.values() for shard in entry.shards}
    return names | {item.key for item in contents.values.values()}


def _manifest(target: SaveTarget) -> dict[str, Any] | None:
    """The manifest that is there; None without one, or if it is none."""
    key = target.prefix + NAME
    try:
        data = read_object(target.connector, key)
        parse_manifest(key, data)
    except (ObjectNotFoundError, FormatError):
        return None
    manifest: dict[str, Any] = json.loads(data)
    return manifest


def _described(data: bytes, block_bytes: int = MAX_BLOCK_BYTES) -> dict[str, Any]:
    """The size and hashes of a small object, as the manifest has them."""
    blocks = [data[lo : lo + block_bytes] for lo in range(0, len(data), block_bytes)]
    return _entry(len(data), block_bytes, [xxhash.xxh3_64_hexdigest(block) for block in blocks])


def _entry(num_bytes: int, block_bytes: int, hashes: list[str]) -> dict[str, Any]:
    return {"num_bytes": num_bytes, "block_bytes": block_bytes, "hashes": hashes}


def _encoded(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest).encode()
