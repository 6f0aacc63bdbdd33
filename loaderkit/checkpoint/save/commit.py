"""Makes a save the checkpoint: once everything is durable, by one step; and clears what saves left that died before it.

A new checkpoint is written beside its place and renamed, or, where the store cannot rename, written in place, `.metadata` after
all the files that it names. An existing one stays: the new files get other names and lie beside the old ones, and replacing
`.metadata` is the one step. While it is replaced the manifest holds for both. So readers see the old checkpoint or the new one.

    new, renamed     files, .metadata, manifest ──> durable ──> rename
    new, in place    files ──> durable ──> manifest, beside it ──> .metadata ──> manifest
    again            files ──> durable ──> manifest of both ──> .metadata ──> manifest ──> old files removed
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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
    UnfinishedSave,
    generation_of,
    listed,
    marker_key,
    place,
    read_object,
    saving_folder,
    unfinished_saves,
)
from loaderkit.connectors.base import Writes
from loaderkit.errors import (
    AccessDeniedError,
    CheckpointError,
    ConnectorError,
    FormatError,
    ObjectNotFoundError,
    printable,
)

logger = logging.getLogger("loaderkit")


def begin(target: SaveTarget, writes: Writes, first_generation: int = 0) -> Placement:
    """Clear what dead saves left, and give this one a place, as `place` does. Raises CheckpointError, ConnectorError."""
    others = clear_dead(target, writes)
    names = [info.key[len(target.prefix) :] for info in listed(target.connector, target.prefix)]
    foreign = [name for name in names if "/" not in name and name.endswith(SUFFIXES)]
    if foreign:
        raise CheckpointError(
            f"{target.url} holds {foreign[0]!r}, a checkpoint of another format, and no reader could tell which of the two is "
            "meant: save to another directory"
        )
    return place(target, writes, others, first_generation)


def clear_dead(target: SaveTarget, writes: Writes) -> list[Placement]:
    """Clear what dead saves left in the directory that a checkpoint is in; where those write that save the same one now."""
    found = unfinished_saves(target)
    running = [save for save in found if save.is_running]
    for save in found:
        if not save.is_running:
            try:
                clear(target, writes, save, _of(save.name, running))
            except (ConnectorError, FormatError) as error:
                where = target.connector.describe(save.base)
                logger.warning("what a save that died left at %s is not cleared: %s", where, error)
    others = _of(target.name, running)
    if target.name and not others:
        _clear_rest(writes, target.prefix)
    return others


def _of(name: str, running: Iterable[UnfinishedSave]) -> list[Placement]:
    """Where the files of that checkpoint go that are being written now."""
    return [save.placement for save in running if save.name == name and save.placement is not None]


def clear(target: SaveTarget, writes: Writes, save: UnfinishedSave, others: Sequence[Placement] = ()) -> None:
    """Remove what a dead save left; its marker last. `others` save the same checkpoint now.

    Raises ConnectorError, FormatError.
    """
    placement = save.placement
    if placement is None and any(info.key == save.marker for info in listed(target.connector, save.marker)):
        return  # written meanwhile, or by another version
    if placement is not None and placement.in_place:
        final = target._replace(name=save.name)
        names = [info.key[len(final.prefix) :] for info in listed(target.connector, final.prefix)]
        kept = {None, *(other.generation for other in others)}
        if METADATA not in names:  # the other files are another writer's, which may not be done
            kept |= {generation_of(name) for name in names} - {placement.generation}
        if NAME not in names:
            _complete(final, writes, save)
        tidy(final, writes, [name for name in names if generation_of(name) not in kept])
        if save.name and not others:
            _clear_rest(writes, final.prefix)
    for key in save.keys:
        if key != save.marker:
            writes.delete(key)
    for folder in save.folders:
        _clear_rest(writes, folder)
    writes.delete(save.marker)
    writes.sync(target.parent)


def _complete(final: SaveTarget, writes: Writes, save: UnfinishedSave) -> None:
    """Give a checkpoint the manifest that a save, which died after the one step, has left beside it."""
    with suppress(ObjectNotFoundError):
        saved = read_object(final.connector, save.folders[0] + NAME)
        metadata = read_object(final.connector, final.prefix + METADATA)
        if _objects_of(json.loads(saved), metadata) is not None:
            writes.put(final.prefix + NAME, saved)


def _clear_rest(writes: Writes, prefix: str) -> None:
    with suppress(AccessDeniedError):  # to list unfinished uploads takes a permission of its own
        writes.clear(prefix)


def commit(
    target: SaveTarget, writes: Writes, placement: Placement, files: Iterable[SavedFile], metadata: bytes
) -> None:
    """Make the save the checkpoint. `files` are those of all ranks, `metadata` is what names them.

    Raises CheckpointError if a file is not there as it was written, ConnectorError; then the previous checkpoint stands, or
    if the error came after the one step, the new one. What cannot be cleared after that is a warning, and the next save's.
    """
    objects = {file.name: _entry(file.num_bytes, file.block_bytes, file.hexadecimal()) for file in files}
    commit_objects(target, writes, placement, objects, metadata)


def commit_objects(
    target: SaveTarget, writes: Writes, placement: Placement, objects: dict[str, Any], metadata: bytes
) -> None:
    """`commit`, with size, size of a block and hashes of each file by its name, as a manifest has them."""
    _check_files(target, placement, objects)
    manifest = _encoded(manifest_of(objects | {METADATA: _described(metadata)}))
    old_names: set[str] = set()
    if placement.in_place:
        old_names = _replace(target, writes, placement, objects=objects, metadata=metadata, manifest=manifest)
    else:
        writes.put(placement.folder + METADATA, metadata)
        writes.put(placement.folder + NAME, manifest)
        writes.sync(placement.folder)
        if not writes.rename(placement.folder, target.prefix):
            raise CheckpointError(
                f"{target.url}: the store does not rename any more, so what was saved stays in {placement.folder!r}"
            )
    try:
        if old_names:
            tidy(target, writes, old_names)
        writes.delete(marker_key(target, placement))
    except (ConnectorError, FormatError) as error:
        logger.warning("%s is committed; what it replaced is not cleared yet: %s", printable(target.url), error)


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
    target: SaveTarget,
    writes: Writes,
    placement: Placement,
    *,
    objects: dict[str, Any],
    metadata: bytes,
    manifest: bytes,
) -> set[str]:
    """Commit where the files lie already; the names of the files that are needed no more."""
    old = _metadata(target)
    old_names = _names_in(old)
    old_manifest = _manifest(target)
    old_objects = None
    if old is not None and old_names and old_manifest is not None:
        old_objects = _objects_of(old_manifest, old)
    writes.sync(target.prefix)
    beside = saving_folder(target, placement) + NAME
    if old_objects is not None:
        both = manifest_of(objects | old_objects, replacing={METADATA: _described(metadata)})
        writes.put(target.prefix + NAME, _encoded(both))
    else:
        writes.put(beside, manifest)  # so that the next save can complete this one
    writes.put(target.prefix + METADATA, metadata)
    writes.put(target.prefix + NAME, manifest)
    if old_objects is None:
        writes.delete(beside)
        _clear_rest(writes, saving_folder(target, placement))
    return old_names


def tidy(target: SaveTarget, writes: Writes, names: Iterable[str]) -> None:
    """Remove those of the files `names` that the checkpoint's `.metadata` does not name, after the manifest is without them.

    Raises FormatError if `.metadata` cannot be read, or is not that of the manifest; then nothing is removed.
    """
    metadata, manifest = _metadata(target), _manifest(target)
    needed = set() if metadata is None else _files_of(metadata)
    if metadata is not None and manifest is not None:
        objects = _objects_of(manifest, metadata)
        if objects is None:
            raise FormatError(f"{target.connector.describe(target.prefix + METADATA)} is not that of its manifest")
        if objects.keys() != manifest["objects"].keys() or "replacing" in manifest:
            writes.put(target.prefix + NAME, _encoded(manifest_of(objects)))
    for name in sorted(set(names) - needed - {METADATA, NAME}):
        writes.delete(target.prefix + name)
    writes.sync(target.prefix)


def _objects_of(manifest: Mapping[str, Any], metadata: bytes) -> dict[str, Any] | None:
    """What a manifest has of the files that `.metadata` names, and of it; None if the manifest is of another `.metadata`.

    Raises FormatError if that cannot be read.
    """
    needed, defaults = _files_of(metadata), {"block_bytes": manifest["block_bytes"]}
    for entry in (manifest["objects"].get(METADATA), manifest.get("replacing", {}).get(METADATA)):
        described = None if entry is None else defaults | entry
        if described is not None and described == _described(metadata, described["block_bytes"]):
            kept = {name: defaults | item for name, item in manifest["objects"].items() if name in needed}
            return kept | {METADATA: described}
    return None


def _metadata(target: SaveTarget) -> bytes | None:
    """The checkpoint's `.metadata`; None without one."""
    try:
        return read_object(target.connector, target.prefix + METADATA)
    except ObjectNotFoundError:
        return None


def _names_in(metadata: bytes | None) -> set[str]:
    """The files that `.metadata` names; none if it cannot be read."""
    try:
        return set() if metadata is None else _files_of(metadata)
    except FormatError:
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
