"""Commits a save: once everything is durable, one step makes it the checkpoint. It also clears what earlier saves left
that died.

A new checkpoint is written beside its place and renamed, or, where the store cannot rename, written in place, its description
(`.metadata`, or another format's) after all the files that it names. An existing one stays: the new files get other
names and lie beside the old ones, and replacing the description is the one step. While it is replaced the manifest holds for
both. So readers see the old checkpoint or the new one. What goes with a description (`.index.json`) is written after it, and is
not in the manifest: it follows from the description, and the next save completes it.

    new, renamed     files, description, manifest ──> durable ──> rename
    new, in place    files ──> durable ──> manifest, beside it ──> description ──> manifest
    again            files ──> durable ──> manifest of both ──> description ──> manifest ──> old files removed
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES
from loaderkit.checkpoint.discovery.description import DCP, Description, description_in
from loaderkit.checkpoint.discovery.kinds import SUFFIXES
from loaderkit.checkpoint.discovery.locate import SaveTarget
from loaderkit.checkpoint.discovery.manifest import NAME, manifest_of, parse_manifest
from loaderkit.checkpoint.save.engine import SavedFile
from loaderkit.checkpoint.save.placement import (
    Placement,
    UnfinishedSave,
    generation_of,
    listed,
    marker_key,
    own_keys,
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


def begin(target: SaveTarget, writes: Writes, kind: Description = DCP, first_generation: int = 0) -> Placement:
    """Clear what dead saves left, and give this one a place, as `place` does. `kind` is the format that will be written.

    Raises CheckpointError if there is a checkpoint of another format, ConnectorError.
    """
    others = clear_dead(target, writes)
    names = [info.key[len(target.prefix) :] for info in listed(target.connector, target.prefix)]
    there = description_in(names)
    own = there.suffix if there is not None else "/"
    foreign = [name for name in names if "/" not in name and name.endswith(SUFFIXES) and not name.endswith(own)]
    if there is not None and there != kind:
        foreign = [there.key]
    if foreign:
        raise CheckpointError(
            f"{target.url} holds {foreign[0]!r}, a checkpoint of another format, and no reader could tell which of the two is "
            "meant: save to another directory"
        )
    return place(target, writes, others, first_generation)


def clear_dead(target: SaveTarget, writes: Writes) -> list[Placement]:
    """Clear what dead saves left in the directory that a checkpoint is in; returns where saves of the same checkpoint
    write now."""
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
    """Where running saves of that checkpoint put their files."""
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
        kind = description_in(names)
        if kind is None:  # the other files are another writer's, which may not be done
            kept |= {generation_of(name) for name in names} - {placement.generation}
        if NAME not in names and kind is not None:
            _complete(final, writes, save, kind)
        own = [name for name in names if kind is None or name.endswith(kind.suffix)]
        tidy(final, writes, [name for name in own if generation_of(name) not in kept], kind)
        if save.name and not others:
            _clear_rest(writes, final.prefix)
    keys = [key for key in save.keys if key != save.marker]
    for folder in save.folders:
        keys = own_keys(target.connector, folder, keys)
    for key in keys:
        writes.delete(key)
    for folder in save.folders:
        _clear_rest(writes, folder)
    writes.delete(save.marker)
    writes.sync(target.parent)


def _complete(final: SaveTarget, writes: Writes, save: UnfinishedSave, kind: Description) -> None:
    """Give a checkpoint the manifest that a save has left beside it which died after the one step."""
    with suppress(ObjectNotFoundError):
        saved = read_object(final.connector, save.folders[0] + NAME)
        described = read_object(final.connector, final.prefix + kind.key)
        if _objects_of(json.loads(saved), described, kind) is not None:
            writes.put(final.prefix + NAME, saved)


def _clear_rest(writes: Writes, prefix: str) -> None:
    with suppress(AccessDeniedError):  # to list unfinished uploads takes a permission of its own
        writes.clear(prefix)


def commit(
    target: SaveTarget,
    writes: Writes,
    placement: Placement,
    files: Iterable[SavedFile],
    description: bytes,
    *,
    kind: Description = DCP,
) -> None:
    """Make the save the checkpoint. `files` are the files of all ranks, `description` is the file that names them.

    Raises CheckpointError if a file is not there as it was written, ConnectorError; then the previous checkpoint is
    still there or, if the error came after the one step, the new one. What cannot be cleared after that is a warning,
    and the next save clears it.
    """
    objects = {file.name: _entry(file.num_bytes, file.block_bytes, file.hexadecimal()) for file in files}
    commit_objects(target, writes, placement, objects, description, kind=kind)


def commit_objects(
    target: SaveTarget,
    writes: Writes,
    placement: Placement,
    objects: dict[str, Any],
    description: bytes,
    *,
    kind: Description = DCP,
) -> None:
    """`commit`, with size, size of a block and hashes of each file by its name, as a manifest has them."""
    _check_files(target, placement, objects)
    manifest = _encoded(manifest_of(objects | {kind.key: _described(description)}))
    old_names: set[str] = set()
    if placement.in_place:
        old_names = _replace(
            target, writes, placement, kind, objects=objects, description=description, manifest=manifest
        )
    else:
        writes.put(placement.folder + kind.key, description)
        for name, data in kind.companions_of(description).items():
            writes.put(placement.folder + name, data)
        writes.put(placement.folder + NAME, manifest)
        writes.sync(placement.folder)
        if not writes.rename(placement.folder, target.prefix):
            raise CheckpointError(
                f"{target.url}: the store does not rename any more, so what was saved stays in {placement.folder!r}"
            )
    try:
        if old_names:
            tidy(target, writes, old_names, kind)
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
    kind: Description,
    *,
    objects: dict[str, Any],
    description: bytes,
    manifest: bytes,
) -> set[str]:
    """Commit files that are in their final place already; returns the names of the files that are no longer needed."""
    old = _description(target, kind)
    old_names = _names_in(old, kind)
    old_manifest = _manifest(target)
    old_objects = None
    if old is not None and old_names and old_manifest is not None:
        old_objects = _objects_of(old_manifest, old, kind)
    writes.sync(target.prefix)
    beside = saving_folder(target, placement) + NAME
    if old_objects is not None:
        both = manifest_of(objects | old_objects, replacing={kind.key: _described(description)})
        writes.put(target.prefix + NAME, _encoded(both))
    else:
        writes.put(beside, manifest)  # so that the next save can complete this one
    writes.put(target.prefix + kind.key, description)
    for name, data in kind.companions_of(description).items():
        writes.put(target.prefix + name, data)
    writes.put(target.prefix + NAME, manifest)
    if old_objects is None:
        writes.delete(beside)
        _clear_rest(writes, saving_folder(target, placement))
    return old_names


def tidy(target: SaveTarget, writes: Writes, names: Iterable[str], kind: Description | None) -> None:
    """Remove the files among `names` that the checkpoint's description does not name, once the manifest no longer has
    them; and write what goes with the description, if it is missing. `kind` is None if there is no checkpoint.

    Raises FormatError if the description cannot be read, or differs from the manifest; then nothing is removed.
    """
    described, manifest = None if kind is None else _description(target, kind), _manifest(target)
    needed: set[str] = set()
    if kind is not None and described is not None:
        companions = kind.companions_of(described)
        needed = {kind.key, *kind.files_of(described), *companions}
        objects = None if manifest is None else _objects_of(manifest, described, kind)
        if manifest is not None and objects is None:
            raise FormatError(f"{target.connector.describe(target.prefix + kind.key)} is not that of its manifest")
        _put_missing(target, writes, companions)
        if (
            objects is not None
            and manifest is not None
            and (objects.keys() != manifest["objects"].keys() or "replacing" in manifest)
        ):
            writes.put(target.prefix + NAME, _encoded(manifest_of(objects)))
    for name in sorted(set(names) - needed - {NAME}):
        writes.delete(target.prefix + name)
    writes.sync(target.prefix)


def _put_missing(target: SaveTarget, writes: Writes, companions: Mapping[str, bytes]) -> None:
    for name, data in companions.items():
        there = None
        with suppress(ObjectNotFoundError):
            there = read_object(target.connector, target.prefix + name)
        if there != data:
            writes.put(target.prefix + name, data)


def _objects_of(manifest: Mapping[str, Any], description: bytes, kind: Description) -> dict[str, Any] | None:
    """The manifest's entries for the description and the files that it names; None if the manifest is for another
    description.

    Raises FormatError if that cannot be read.
    """
    needed, defaults = kind.files_of(description), {"block_bytes": manifest["block_bytes"]}
    for entry in (manifest["objects"].get(kind.key), manifest.get("replacing", {}).get(kind.key)):
        described = None if entry is None else defaults | entry
        if described is not None and described == _described(description, described["block_bytes"]):
            kept = {name: defaults | item for name, item in manifest["objects"].items() if name in needed}
            return kept | {kind.key: described}
    return None


def _description(target: SaveTarget, kind: Description) -> bytes | None:
    """The checkpoint's description; None without one."""
    try:
        return read_object(target.connector, target.prefix + kind.key)
    except ObjectNotFoundError:
        return None


def _names_in(description: bytes | None, kind: Description) -> set[str]:
    """The files that a description names, and those that go with it; none if it cannot be read."""
    try:
        return set() if description is None else {*kind.files_of(description), *kind.companions_of(description)}
    except FormatError:
        return set()


def _manifest(target: SaveTarget) -> dict[str, Any] | None:
    """The manifest that is there; None if there is none, or if the file is no manifest."""
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
