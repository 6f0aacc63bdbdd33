"""A manifest: checksums of a checkpoint's objects, block by block, in a file beside them.

`loaderkit manifest URL` writes it; a restore compares every block that it reads. It covers all bytes of the checkpoint's
files, descriptions as well as tensors, and their sizes, so that a file that is cut short is noticed at once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import xxhash

from loaderkit._internal import hashing
from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES, Checkpoint, Checksums
from loaderkit.checkpoint.discovery.blocks import hashes_of
from loaderkit.checkpoint.discovery.detect import Fetch
from loaderkit.checkpoint.discovery.locate import CheckpointLocation, locate
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, writes_of
from loaderkit.errors import (
    AccessDeniedError,
    CheckpointError,
    ConfigError,
    ConnectorError,
    ExpiredCredentialsError,
    FormatError,
    ObjectNotFoundError,
    printable,
)

NAME = "loaderkit-manifest.json"
_VERSION = 1
_MAX_MANIFEST = 2**30
_MAX_COMPARED = 128  # blocks of descriptions that are read at once, in 32 MiB
Verify = Literal["auto"] | bool
logger = logging.getLogger("loaderkit")


def manifest_key(location: CheckpointLocation) -> str:
    """The key of a checkpoint's manifest: in its directory, or beside its one file."""
    if location.single is not None:
        return f"{location.single.key}.{NAME}"
    return f"{location.prefix}{NAME}"


def needed_objects(checkpoint: Checkpoint) -> list[ObjectInfo]:
    """The objects of a checkpoint, without manifests and unrelated files."""
    keys = {shard.key for entry in checkpoint.tensors.values() for shard in entry.shards}
    keys |= {item.key for item in checkpoint.pickled.values()} | checkpoint.read
    return [info for info in checkpoint.objects.values() if info.key in keys]


def manifest_of(
    objects: Mapping[str, Any], block_bytes: int = MAX_BLOCK_BYTES, replacing: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of a manifest. `objects` are num_bytes, hashes and, where it differs, block_bytes by name;
    `replacing` is the same for the objects that are being replaced: they are the checkpoint's until the save is
    committed."""
    manifest = {"version": _VERSION, "hash": hashing.NAME, "block_bytes": block_bytes, "objects": dict(objects)}
    return manifest | ({"replacing": dict(replacing)} if replacing else {})


def write_manifest(
    url: str | os.PathLike[str],
    *,
    connectors: Mapping[str, Connector] | None = None,
    block_bytes: int = MAX_BLOCK_BYTES,
) -> dict[str, Any]:
    """Read a checkpoint once and write the checksums of its blocks beside it; returns the manifest.

    Raises CheckpointError for a checkpoint that is not whole, or that is where nothing can be written; ConfigError.
    """
    if not 4096 <= block_bytes <= MAX_BLOCK_BYTES:
        raise ConfigError(f"block_bytes is {block_bytes}: expected 4096 to {MAX_BLOCK_BYTES}")
    location = locate(url, connectors or {})
    try:
        try:
            writes = writes_of(location.connector)
        except ConnectorError as error:
            raise CheckpointError(
                f"{location.url}: no manifest can be written there: write it before packing or uploading ({error})"
            ) from None
        checkpoint = open_checkpoint(location, fetch_of(location.connector))
        location = location.of(checkpoint)
        infos = needed_objects(checkpoint)
        hashes = hashes_of(location.connector, [(info, block_bytes) for info in infos])
        cut = len(location.prefix)
        objects = {info.key[cut:]: {"num_bytes": info.size, "hashes": hashes[info.key]} for info in infos}
        manifest = manifest_of(objects, block_bytes)
        writes.put(manifest_key(location), json.dumps(manifest).encode())
        return manifest
    finally:
        location.close()


def read_manifest(
    location: CheckpointLocation, checkpoint: Checkpoint, verify: Verify, fetch: Fetch
) -> dict[str, Checksums]:
    """The checksums of a checkpoint's objects by key; their sizes are compared at once. Empty without a manifest; with
    "auto" also if the store does not say whether there is one.

    Raises CheckpointError if `verify` is True and there is none, or if an object differs from the manifest in size.
    """
    if verify not in ("auto", True, False):
        raise ConfigError(f"verify {verify!r}: expected 'auto', True or False")
    if verify is False:
        return {}
    key = manifest_key(location)
    try:
        info = location.connector.stat(key)
    except ObjectNotFoundError:
        if verify is True:
            raise CheckpointError(
                f"{location.url} has no manifest ({key}), and verify is True: write one with `loaderkit manifest`"
            ) from None
        return {}
    except AccessDeniedError as error:
        # S3 answers 403 for a missing object, too, if the user may read and not list.
        is_there = any(item.key == key for item in checkpoint.objects.values())
        if verify is True or is_there or isinstance(error, ExpiredCredentialsError):
            raise
        logger.warning("%s is taken to have no manifest, so nothing is compared: %s", printable(location.url), error)
        return {}
    if info.size > _MAX_MANIFEST:
        raise FormatError(f"{location.connector.describe(key)}: {info.size} bytes are too many for a manifest")
    data = bytearray(info.size)
    location.connector.read_into(key, 0, memoryview(data), etag=info.etag)
    *others, last = parse_manifest(location.connector.describe(key), data)
    for parsed in others:  # it is being saved again, and has the old description or the new one
        with suppress(CheckpointError):
            return _compared(location, checkpoint, parsed, fetch)
    return _compared(location, checkpoint, last, fetch)


def _compared(
    location: CheckpointLocation, checkpoint: Checkpoint, parsed: Mapping[str, Checksums], fetch: Fetch
) -> dict[str, Checksums]:
    """The checksums by key. Raises CheckpointError unless the objects have these sizes, and these descriptions."""
    checksums = {location.prefix + name: item for name, item in parsed.items()}
    if gone := sorted(checksums.keys() - {item.key for item in checkpoint.objects.values()}):
        raise CheckpointError(
            f"{location.url} is not whole: its manifest has {', '.join(map(repr, gone[:5]))}"
            f"{f' and {len(gone) - 5} more' if len(gone) > 5 else ''}, and there is no such file; if it was removed on "
            "purpose, write the manifest again"
        )
    for item in needed_objects(checkpoint):
        known = checksums.get(item.key)
        if known is None or known.num_bytes != item.size:
            said = "does not have it" if known is None else f"says {known.num_bytes}"
            raise CheckpointError(
                f"{checkpoint.describe(item.key)} has {item.size} bytes, and the manifest {said}: the file is cut short, or "
                "was replaced; if that was on purpose, write the manifest again"
            )
    _check_descriptions(checkpoint, checksums, fetch)
    return checksums


def parse_manifest(name: str, data: bytes | bytearray) -> list[dict[str, Checksums]]:
    """The checksums that a manifest has by name; two tables if objects are being replaced, before and after it. Raises
    FormatError."""
    try:
        manifest = json.loads(data)
        if manifest["version"] != _VERSION or manifest["hash"] != hashing.NAME:
            raise ValueError(f"version {manifest['version']!r}, hash {manifest['hash']!r}")
        tables = [_parse_objects(manifest["objects"], manifest["block_bytes"])]
        if "replacing" in manifest:
            tables.append(tables[0] | _parse_objects(manifest["replacing"], manifest["block_bytes"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{name} is no manifest of loaderkit: {error!r}") from None
    return tables


def _parse_objects(objects: dict[str, Any], block_bytes: Any) -> dict[str, Checksums]:
    checksums = {}
    for key, item in objects.items():
        size, hashes, block = item["num_bytes"], item["hashes"], item.get("block_bytes", block_bytes)
        if type(block) is not int or not 4096 <= block <= MAX_BLOCK_BYTES:
            raise ValueError(f"block_bytes {block!r}")
        if type(size) is not int or not isinstance(hashes, list) or len(hashes) != -(-size // block):
            raise ValueError(f"{key!r} has {len(hashes)} hashes of {size} bytes")
        checksums[key] = Checksums(block, size, hashes)
    return checksums


def _check_descriptions(checkpoint: Checkpoint, checksums: Mapping[str, Checksums], fetch: Fetch) -> None:
    """Compare the descriptions, which lie before and after the tensors. Raises CheckpointError."""
    extents: dict[str, list[tuple[int, int]]] = {}
    for entry in checkpoint.tensors.values():
        for shard in entry.shards:
            extents.setdefault(shard.key, []).append((shard.start, shard.start + shard.length))
    for item in checkpoint.pickled.values():
        extents.setdefault(item.key, []).append((item.start, item.start + item.length))
    ranges: list[ByteRange] = []
    for info in needed_objects(checkpoint):
        known = checksums[info.key]
        inside = extents.get(info.key, [(info.size, info.size)])
        first, last = min(inside)[0], max(end for _, end in inside)
        head = range(-(-first // known.block_bytes))
        tail = range(last // known.block_bytes, len(known.hashes)) if last < info.size else ()
        ranges += [block_of(info, known, number) for number in sorted({*head, *tail})]
    if (block := damaged_block(ranges, checksums, fetch)) is not None:
        raise CheckpointError(
            f"{checkpoint.describe(block.key)} is damaged: its bytes {block.start} to {block.start + block.length}, which hold "
            "its description, are not those of its manifest"
        )


def block_of(info: ObjectInfo, checksums: Checksums, number: int) -> ByteRange:
    """The bytes of one of an object's blocks."""
    begin = number * checksums.block_bytes
    return ByteRange(info.key, begin, min(checksums.block_bytes, info.size - begin), info.etag)


def damaged_block(blocks: Sequence[ByteRange], checksums: Mapping[str, Checksums], fetch: Fetch) -> ByteRange | None:
    """The first of some blocks whose bytes differ from their checksums, which are given by key."""
    for begin in range(0, len(blocks), _MAX_COMPARED):
        some = blocks[begin : begin + _MAX_COMPARED]
        for block, data in zip(some, fetch(some), strict=True):
            known = checksums[block.key]
            if xxhash.xxh3_64_hexdigest(data) != known.hashes[block.start // known.block_bytes]:
                return block
    return None
