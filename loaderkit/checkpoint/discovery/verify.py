"""Compares every byte of a checkpoint with its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import xxhash

from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.discovery.blocks import HashedPart, hash_objects
from loaderkit.checkpoint.discovery.locate import locate
from loaderkit.checkpoint.discovery.manifest import read_manifest
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector


@dataclass
class Verification:
    """The outcome: how much was read and compared, and what differs, one text a range of bytes."""

    num_bytes: int = 0
    num_blocks: int = 0
    damage: list[str] = field(default_factory=list)


def verify_checkpoint(
    url: str | os.PathLike[str],
    *,
    connectors: Mapping[str, Connector] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Verification:
    """Read all files of a checkpoint once and compare every block with the manifest; a block that differs is read once more.

    `progress` is called with the bytes of every part. Raises CheckpointError for a checkpoint that has no manifest or
    is not whole.
    """
    location = locate(url, connectors or {})
    try:
        fetch = fetch_of(location.connector)
        checkpoint = open_checkpoint(location, fetch)
        checksums = read_manifest(location.of(checkpoint), checkpoint, True, fetch)
        infos = {info.key: info for info in checkpoint.objects.values()}
        objects = [(infos[key], known.block_bytes) for key, known in checksums.items()]
        outcome = Verification()
        for part in hash_objects(location.connector, objects):
            outcome.num_bytes += part.num_bytes
            outcome.num_blocks += len(part.hashes)
            for start, end in damaged_ranges(location.connector, part, checksums):
                outcome.damage.append(f"bytes {start} to {end} of {location.connector.describe(part.info.key)}")
            progress(part.num_bytes)
        return outcome
    finally:
        location.close()


def damaged_ranges(connector: Connector, part: HashedPart, checksums: Mapping[str, Checksums]) -> list[tuple[int, int]]:
    """The ranges [start, end) of a part whose bytes differ from the manifest, even when they are read once more."""
    known = checksums[part.info.key]
    damaged: list[tuple[int, int]] = []
    for number, value in enumerate(part.hashes, part.first_block):
        if value == known.hashes[number]:
            continue
        start, end = number * known.block_bytes, known.end_of(number)
        data = bytearray(end - start)
        connector.read_into(part.info.key, start, memoryview(data), etag=part.info.etag)
        if xxhash.xxh3_64_hexdigest(data) == known.hashes[number]:
            continue
        if damaged and damaged[-1][1] == start:
            start = damaged.pop()[0]
        damaged.append((start, end))
    return damaged
