"""Copies a checkpoint to another place, whole or not at all.

read, hash, compare with the manifest ──> .saving-NAME-.../ ──> manifest ──> renamed to NAME/
                                          NAME/ where the store cannot rename; the manifest, which comes last, commits it
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES, Checkpoint, Checksums
from loaderkit.checkpoint.discovery.blocks import hash_objects, hashes_of
from loaderkit.checkpoint.discovery.detect import INDEX, METADATA
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
from loaderkit.checkpoint.save.owner import Heartbeat
from loaderkit.checkpoint.save.placement import listed, marker_key, place, put_marker, read_object
from loaderkit.checkpoint.save.prune import remove_directory
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector, ObjectInfo, ObjectWriter, Writes, writes_of
from loaderkit.errors import CheckpointError, ConnectorError


@dataclass(frozen=True)
class CopiedCheckpoint:
    """The copy's URL and size; `was_there`: an equal one was there already, and nothing was written."""

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
) -> CopiedCheckpoint:
    """Copy a whole checkpoint into the directory `to`, under its own name; one inside a tar is unpacked.

    Its manifest is copied, too; every byte is compared with it while it is copied, and nothing is left of a copy that differs.
    One without a manifest gets one. `progress` is called with the bytes of every part. Raises CheckpointError for a checkpoint
    that is not whole or damaged, and if another one has its name in `to`; ConnectorError.
    """
    given = connectors or {}
    location = locate(url, given)
    try:
        name = os.fspath(url).rstrip("/").rpartition("/")[2].removesuffix(".tar")
        target = save_target(url_below(to, name), given)
        try:
            fetch = fetch_of(location.connector)
            checkpoint = open_checkpoint(location, fetch)
            source = _Source(location, checkpoint, read_manifest(location, checkpoint, "auto", fetch))
            was_there = _is_there(source, target)
            if not was_there:
                _copy(source, target, progress)
        finally:
            target.close()
    finally:
        location.close()
    num_bytes = sum(info.size for info in source.files)
    return CopiedCheckpoint(url_below(to, name), num_bytes, len(source.files), was_there)


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

    def document(self, hashes: Mapping[str, list[str]]) -> dict[str, Any]:
        """The copy's manifest, from the hashes of the files by key."""
        covered = self.checksums.keys() or {info.key for info in needed_objects(self.contents)}
        infos = [info for info in self.files if info.key in covered]
        usual = max((self.block_bytes(info) for info in infos), default=MAX_BLOCK_BYTES)
        objects: dict[str, Any] = {}
        for info in infos:
            entry = {"num_bytes": info.size, "hashes": hashes[info.key]}
            block_bytes = self.block_bytes(info)
            objects[self.name_of(info)] = entry if block_bytes == usual else {**entry, "block_bytes": block_bytes}
        return manifest_of(objects, usual)


def _commits(info: ObjectInfo) -> bool:
    """True for a file that readers take for the sign of a whole checkpoint."""
    return info.key.endswith((METADATA, INDEX))


def _is_there(source: _Source, target: SaveTarget) -> bool:
    """True if an equal checkpoint is there. Raises CheckpointError for another one, or for files that are none of its."""
    where = target.prefix.removesuffix("/")
    present = {info.key for info in listed(target.connector, where if source.is_single else target.prefix)}
    manifest = f"{where}.{NAME}" if source.is_single else f"{target.prefix}{NAME}"
    if manifest not in present:
        # A copy into a directory may have been cut off; a file is there or not, and may be another program's.
        wanted = {target.prefix + source.name_of(info) for info in source.files}
        others = (
            present & {where} if source.is_single else {key for key in present - wanted if not key.endswith(".tmp")}
        )
        if others:
            raise CheckpointError(
                f"{target.connector.describe(where)} is there, and not as a copy of this checkpoint ({min(others)!r}): remove "
                "it, or copy elsewhere"
            )
        return False
    data = read_object(target.connector, manifest)
    *_, there = parse_manifest(target.connector.describe(manifest), data)
    mine = source.checksums or _checksums(source, there)
    if there != {key[len(source.location.prefix) :]: known for key, known in mine.items()}:
        raise CheckpointError(
            f"{target.connector.describe(where)} is another checkpoint of this name: remove it, or copy elsewhere"
        )
    return True


def _checksums(source: _Source, there: Mapping[str, Checksums]) -> dict[str, Checksums]:
    """The checksums of a checkpoint without a manifest, in the blocks of another manifest; it is read for them."""
    infos = needed_objects(source.contents)
    blocks = {}
    for info in infos:
        known = there.get(source.name_of(info))
        blocks[info.key] = MAX_BLOCK_BYTES if known is None else known.block_bytes
    hashes = hashes_of(source.location.connector, [(info, blocks[info.key]) for info in infos])
    return {info.key: Checksums(blocks[info.key], info.size, hashes[info.key]) for info in infos}


def _copy(source: _Source, target: SaveTarget, progress: Callable[[int], None]) -> None:
    writes = writes_of(target.connector)
    if source.is_single:
        where = target.prefix.removesuffix("/")
        document = _write(source, writes, lambda info: where, progress)
        writes.sync(target.parent)
        writes.put(f"{where}.{NAME}", document)
        return
    if cut_off := list(listed(target.connector, target.prefix)):
        remove_directory(writes, target.prefix, cut_off)
    placement = place(target, writes, ())
    folder = placement.folder
    heartbeat = Heartbeat(placement.attempt, partial(put_marker, target, writes, placement))
    try:
        document = _write(source, writes, lambda info: folder + source.name_of(info), progress)
        writes.sync(folder)
        writes.put(folder + NAME, document)
        writes.sync(folder)
        if not placement.in_place and not writes.rename(folder, target.prefix):
            raise ConnectorError(f"{target.connector.describe(folder)} could be renamed before, and now it cannot")
    except BaseException:
        _discard(target, writes, folder)
        raise
    finally:
        heartbeat.stop()
        with suppress(ConnectorError):
            writes.delete(marker_key(target, placement))


def _discard(target: SaveTarget, writes: Writes, folder: str) -> None:
    """Remove what was written and is no checkpoint, as far as the store allows; the rest is found by `find_debris`."""
    with suppress(ConnectorError):
        for info in listed(target.connector, folder):
            with suppress(ConnectorError):
                writes.delete(info.key)
        writes.clear(folder)


def _write(
    source: _Source, writes: Writes, key_of: Callable[[ObjectInfo], str], progress: Callable[[int], None]
) -> bytes:
    """Write all files; the manifest. Raises CheckpointError for a damaged block."""
    connector, known = source.location.connector, source.checksums
    hashes: dict[str, list[str]] = {info.key: [] for info in source.files}
    left = {info.key: info.size for info in source.files}
    for is_last in (False, True):
        group = [info for info in source.files if _commits(info) == is_last]
        with ExitStack() as stack:
            writers = stack.enter_context(_Writers(writes, key_of))
            parts = hash_objects(
                connector,
                [(info, source.block_bytes(info)) for info in group],
                part_bytes=lambda info: writes.part_bytes_of(info.size),
                use=writers.write,
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
                progress(part.num_bytes)
            for info in group:
                if not info.size:
                    writers.commit(info)
    return json.dumps(source.document(hashes)).encode()


class _Writers:
    """The objects that are being written, each created with its first part; those not committed at the end are aborted."""

    def __init__(self, writes: Writes, key_of: Callable[[ObjectInfo], str]) -> None:
        self._writes, self._key_of = writes, key_of
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
