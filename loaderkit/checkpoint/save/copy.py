"""Copies a checkpoint to another place, whole or not at all.

read, hash, compare with the manifest ──> .saving-NAME-.../ ──> manifest ──> renamed to NAME/
                                          NAME/ where the store cannot rename; the manifest, which comes last, commits it
    in the place of another ──> files beside its own ──> replaced by one step, as when it is saved again
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import xxhash

from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES, Checkpoint, Checksums
from loaderkit.checkpoint.discovery.blocks import hash_objects, hashes_of
from loaderkit.checkpoint.discovery.description import description_in
from loaderkit.checkpoint.discovery.kinds import DESCRIBING
from loaderkit.checkpoint.discovery.listing import url_below
from loaderkit.checkpoint.discovery.locate import CheckpointLocation, SaveTarget, locate, save_target
from loaderkit.checkpoint.discovery.manifest import (
    NAME,
    manifest_key,
    manifest_of,
    needed_objects,
    parse_manifest,
    read_manifest,
)
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.discovery.verify import damaged_ranges
from loaderkit.checkpoint.save.commit import clear_dead, commit_objects
from loaderkit.checkpoint.save.owner import Heartbeat
from loaderkit.checkpoint.save.placement import (
    Placement,
    generation_of,
    listed,
    marker_key,
    place,
    put_marker,
    read_object,
)
from loaderkit.checkpoint.save.prune import remove_directory
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector, ObjectInfo, ObjectWriter, Writes, writes_of
from loaderkit.errors import CheckpointError, ConnectorError


@dataclass(frozen=True)
class CopiedCheckpoint:
    """The copy's URL and size; `was_there` is True if an equal copy was there already, and nothing was written."""

    url: str
    num_bytes: int
    num_files: int
    was_there: bool


def copy_checkpoint(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    connectors: Mapping[str, Connector] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    pace: Callable[[int], None] = lambda num_bytes: None,
    replace: bool = False,
    direct: bool = False,
) -> CopiedCheckpoint:
    """Copy a whole checkpoint into the directory `to`, under its own name; one inside a tar is unpacked.

    Its manifest is copied, too; every byte is compared with it while it is copied, and nothing is left of a copy that differs.
    One without a manifest gets one. `progress` is called with the bytes of every part; `pace` before they are written, on the
    thread that does it, and may wait. `replace`: another checkpoint of that name is replaced, if it is one of
    torch.distributed.checkpoint as this one, with other names of files. `direct`: read past the page cache.

    Raises CheckpointError for a checkpoint that is not whole or damaged, and if another one has its name in `to`;
    ConnectorError.
    """
    given = connectors or {}
    location = locate(url, given)
    try:
        fetch = fetch_of(location.connector)
        checkpoint = open_checkpoint(location, fetch)
        location = location.of(checkpoint)
        name = _name_of(location)
        target = save_target(url_below(to, name), given)
        try:
            if folders := [name for name in checkpoint.beside if name.endswith("/")]:
                raise CheckpointError(
                    f"{location.url}: below it there are files of checkpoints in {folders[0]!r}, which would not be copied: "
                    "copy the directory with another program"
                )
            source = _Source(location, checkpoint, read_manifest(location, checkpoint, "auto", fetch))
            was_there = _is_there(source, target, replace)
            if not was_there:
                _copy(source, target, _Flow(progress, pace, direct))
        finally:
            target.close()
    finally:
        location.close()
    num_bytes = sum(info.size for info in source.files)
    return CopiedCheckpoint(url_below(to, name), num_bytes, len(source.files), was_there)


def _name_of(location: CheckpointLocation) -> str:
    """The name of a checkpoint's file or directory; a checkpoint in an archive has the archive's name."""
    parts = location.url.rstrip("/").split("/")
    name = parts[-2] if location.named else parts[-1]
    return name.removesuffix(".tar") if location.single is None else name


class _Flow(NamedTuple):
    """How bytes are copied: `progress` is told of bytes, `pace` limits the speed, `direct` passes by the page cache."""

    progress: Callable[[int], None]
    pace: Callable[[int], None]
    direct: bool


class _Source:
    """The checkpoint to copy: its files, each with its name in the checkpoint's directory; what commits it comes last."""

    def __init__(self, location: CheckpointLocation, contents: Checkpoint, checksums: Mapping[str, Checksums]) -> None:
        self.location, self.contents, self.checksums = location, contents, checksums
        own = manifest_key(location)
        files = {info.key: info for info in contents.objects.values() if info.key != own}
        self.files = [info for info in files.values() if not info.key.endswith(".tmp")]
        self.files.sort(key=_commits)

    @property
    def is_single(self) -> bool:
        """True for a checkpoint that is one file, and no directory."""
        return self.location.single is not None

    def block_bytes(self, info: ObjectInfo) -> int:
        """The size of the blocks in which a file is hashed."""
        known = self.checksums.get(info.key)
        return MAX_BLOCK_BYTES if known is None else known.block_bytes

    def name_of(self, info: ObjectInfo) -> str:
        """A file's name in the checkpoint's directory."""
        return info.key[len(self.location.prefix) :]

    def objects(self, hashes: Mapping[str, list[str]]) -> dict[str, Any]:
        """Size, size of a block and hashes of each file by its name, as a manifest has them, from the hashes by key."""
        infos = [info for info in self._covered() if info.key in hashes]
        return {
            self.name_of(info): {
                "num_bytes": info.size,
                "block_bytes": self.block_bytes(info),
                "hashes": hashes[info.key],
            }
            for info in infos
        }

    def _covered(self) -> list[ObjectInfo]:
        covered = self.checksums.keys() or {info.key for info in needed_objects(self.contents)}
        return [info for info in self.files if info.key in covered]

    def document(self, hashes: Mapping[str, list[str]]) -> dict[str, Any]:
        """The copy's manifest, from the hashes of the files by key."""
        infos = self._covered()
        usual = max((self.block_bytes(info) for info in infos), default=MAX_BLOCK_BYTES)
        objects: dict[str, Any] = {}
        for info in infos:
            entry = {"num_bytes": info.size, "hashes": hashes[info.key]}
            block_bytes = self.block_bytes(info)
            objects[self.name_of(info)] = entry if block_bytes == usual else {**entry, "block_bytes": block_bytes}
        return manifest_of(objects, usual)


def _commits(info: ObjectInfo) -> bool:
    """True for a file whose presence tells readers that a checkpoint is whole."""
    return info.key.endswith(DESCRIBING)


def _is_there(source: _Source, target: SaveTarget, replace: bool) -> bool:
    """True if an equal checkpoint is there. Raises CheckpointError for another one, unless it can be replaced."""
    where = target.prefix.removesuffix("/")
    present = {info.key for info in listed(target.connector, where if source.is_single else target.prefix)}
    manifest = f"{where}.{NAME}" if source.is_single else f"{target.prefix}{NAME}"
    if manifest not in present:
        if source.is_single and where in present:  # it may be another program's
            raise _another(target, where)
        return False
    data = read_object(target.connector, manifest)
    *_, there = parse_manifest(target.connector.describe(manifest), data)
    mine = source.checksums or _checksums(source, there)
    if there == {key[len(source.location.prefix) :]: known for key, known in mine.items()}:
        return True
    if not replace:
        raise _other_checkpoint(target)
    return False


def _other_checkpoint(target: SaveTarget) -> CheckpointError:
    where = target.connector.describe(target.prefix.removesuffix("/"))
    return CheckpointError(f"{where} is another checkpoint of this name: remove it, or copy elsewhere")


def _another(target: SaveTarget, key: str) -> CheckpointError:
    where = target.connector.describe(target.prefix.removesuffix("/"))
    return CheckpointError(
        f"{where} is there, and not as a copy of this checkpoint ({key!r}): remove it, or copy elsewhere"
    )


def _checksums(source: _Source, there: Mapping[str, Checksums]) -> dict[str, Checksums]:
    """The checksums of a checkpoint without a manifest, in the blocks of another manifest; it is read for them."""
    infos = needed_objects(source.contents)
    blocks = {}
    for info in infos:
        known = there.get(source.name_of(info))
        blocks[info.key] = MAX_BLOCK_BYTES if known is None else known.block_bytes
    hashes = hashes_of(source.location.connector, [(info, blocks[info.key]) for info in infos])
    return {info.key: Checksums(blocks[info.key], info.size, hashes[info.key]) for info in infos}


def _copy(source: _Source, target: SaveTarget, flow: _Flow) -> None:
    writes = writes_of(target.connector)
    if source.is_single:
        where = target.prefix.removesuffix("/")
        hashes = _write(source, source.files, writes, lambda info: where, flow)
        writes.sync(target.parent)
        writes.put(f"{where}.{NAME}", json.dumps(source.document(hashes)).encode())
        return
    others = clear_dead(target, writes)
    present = list(listed(target.connector, target.prefix))
    is_replaced = any(info.key == target.prefix + NAME for info in present)
    if is_replaced:
        keys, names = {info.key for info in present}, {source.name_of(info) for info in source.files}
        kind = description_in(names)
        if kind is None or target.prefix + kind.key not in keys:
            raise _other_checkpoint(target)
        if keys & {target.prefix + name for name in names if name.endswith(kind.suffix)}:
            raise _other_checkpoint(target)
    elif present:
        _remove_cut_off(source, target, present)
    generations = [generation_of(source.name_of(info)) for info in source.files]
    first_generation = max((number for number in generations if number is not None), default=0)
    placement = place(target, writes, others, first_generation)
    heartbeat = Heartbeat(placement.attempt, partial(put_marker, target, writes, placement))
    try:
        if is_replaced:
            _replace(source, target, writes, placement, flow)
        else:
            _make(source, target, writes, placement, flow)
    finally:
        heartbeat.stop()
        if not is_replaced:
            with suppress(ConnectorError):
                writes.delete(marker_key(target, placement))


def _remove_cut_off(source: _Source, target: SaveTarget, present: list[ObjectInfo]) -> None:
    """Remove what is there of a copy that was cut off. Raises CheckpointError for files that do not belong to it."""
    wanted = {target.prefix + source.name_of(info) for info in source.files}
    if others := [info.key for info in present if info.key not in wanted and not info.key.endswith(".tmp")]:
        raise _another(target, min(others))
    remove_directory(target.connector, target.prefix, present)


def _replace(source: _Source, target: SaveTarget, writes: Writes, placement: Placement, flow: _Flow) -> None:
    """Replace another checkpoint by one step. What is written until an error is cleared by the next save or copy."""
    kind = description_in({source.name_of(info) for info in source.files})
    assert kind is not None
    (description,) = (info for info in source.files if source.name_of(info) == kind.key)
    metadata = read_object(source.location.connector, description.key)
    known = source.checksums.get(description.key)
    if known is not None and known != Checksums(known.block_bytes, len(metadata), _hashes(metadata, known.block_bytes)):
        raise CheckpointError(f"{source.contents.describe(description.key)} is not that of its manifest")
    following = {kind.key, *kind.companions_of(metadata)}  # which the commit writes
    others = [info for info in source.files if source.name_of(info) not in following]
    hashes = _write(source, others, writes, lambda info: target.prefix + source.name_of(info), flow)
    commit_objects(target, writes, placement, source.objects(hashes), metadata, kind=kind)


def _hashes(data: bytes, block_bytes: int) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(data[lo : lo + block_bytes]) for lo in range(0, len(data), block_bytes)]


def _make(source: _Source, target: SaveTarget, writes: Writes, placement: Placement, flow: _Flow) -> None:
    folder = placement.folder
    try:
        hashes = _write(source, source.files, writes, lambda info: folder + source.name_of(info), flow)
        writes.sync(folder)
        writes.put(folder + NAME, json.dumps(source.document(hashes)).encode())
        writes.sync(folder)
        if not placement.in_place and not writes.rename(folder, target.prefix):
            raise ConnectorError(f"{target.connector.describe(folder)} could be renamed before, and now it cannot")
    except BaseException:
        _discard(target, writes, folder)
        raise


def _discard(target: SaveTarget, writes: Writes, folder: str) -> None:
    """Remove what was written and is no checkpoint yet, as far as the store allows; `find_debris` finds the rest."""
    with suppress(ConnectorError):
        for info in listed(target.connector, folder):
            with suppress(ConnectorError):
                writes.delete(info.key)
        writes.clear(folder)


def _write(
    source: _Source, files: Sequence[ObjectInfo], writes: Writes, key_of: Callable[[ObjectInfo], str], flow: _Flow
) -> dict[str, list[str]]:
    """Write files; the hashes of their blocks by key. Raises CheckpointError for a damaged block."""
    connector, known = source.location.connector, source.checksums
    hashes: dict[str, list[str]] = {info.key: [] for info in files}
    left = {info.key: info.size for info in files}
    for is_last in (False, True):
        group = [info for info in files if _commits(info) == is_last]
        with ExitStack() as stack:
            writers = stack.enter_context(_Writers(writes, key_of, flow.pace))
            parts = hash_objects(
                connector,
                [(info, source.block_bytes(info)) for info in group],
                part_bytes=lambda info: writes.part_bytes_of(info.size),
                use=writers.write,
                direct=flow.direct,
            )
            for part in stack.enter_context(closing(parts)):
                key = part.info.key
                if key in known and (damaged := damaged_ranges(connector, part, known)):
                    start, end = damaged[0]
                    raise CheckpointError(
                        f"{source.contents.describe(key)} is damaged, so nothing is copied: its bytes {start} to {end} are not "
                        "those of its manifest"
                    )
                hashes[key] += part.hashes
                left[key] -= part.num_bytes
                if not left[key]:
                    writers.commit(part.info)
                flow.progress(part.num_bytes)
            for info in group:
                if not info.size:
                    writers.commit(info)
    return hashes


class _Writers:
    """The objects that are being written. Each is created with its first part; those not committed at the end are aborted."""

    def __init__(self, writes: Writes, key_of: Callable[[ObjectInfo], str], pace: Callable[[int], None]) -> None:
        self._writes, self._key_of, self._pace = writes, key_of, pace
        self._lock = threading.Lock()
        self._writers: dict[str, ObjectWriter] = {}

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            with suppress(ConnectorError):  # the error that ends the copy says more
                writer.abort()

    def write(self, info: ObjectInfo, start: int, data: memoryview) -> None:
        """Write a part; any thread."""
        self._pace(len(data))
        self._writer(info).write(start, data)

    def commit(self, info: ObjectInfo) -> None:
        """Make an object whole, all parts of which are written."""
        self._writer(info).commit()
        del self._writers[info.key]

    def _writer(self, info: ObjectInfo) -> ObjectWriter:
        with self._lock:
            writer = self._writers.get(info.key)
            if writer is None:
                writer = self._writers[info.key] = self._writes.create(self._key_of(info), info.size)
            return writer
