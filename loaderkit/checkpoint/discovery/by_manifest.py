"""What a manifest tells of a checkpoint without its description being parsed, which takes tens of milliseconds a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.discovery.description import DESCRIPTIONS, SAFETENSORS, Description
from loaderkit.checkpoint.discovery.detect import Fetch
from loaderkit.checkpoint.discovery.manifest import NAME, parse_manifest
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import FormatError

_MOST_BYTES = 1 << 20  # of a manifest that is read here


def told_by_manifest(infos: Mapping[str, ObjectInfo], fetch: Fetch) -> tuple[Description, list[ObjectInfo]] | None:
    """The format and the objects of a checkpoint, of which `infos` has all by name: of one whose files have the sizes of its
    manifest, and whose description, and with safetensors the begin of each file, have its checksums. None: not known so."""
    descriptions = [known for known in DESCRIPTIONS if known.key in infos]
    checksums = _checksums_in(infos.get(NAME), fetch)
    if len(descriptions) != 1 or checksums is None or descriptions[0].key not in checksums:
        return None
    (description,) = descriptions
    if any(name not in infos or infos[name].size != item.num_bytes for name, item in checksums.items()):
        return None
    blocks = [(description.key, number) for number in range(len(checksums[description.key].hashes))]
    if description is SAFETENSORS:  # a header begins each
        blocks += [(name, 0) for name, item in checksums.items() if name.endswith(description.suffix) and item.hashes]
    data = fetch([_range(infos[name], checksums[name], number) for name, number in blocks])
    pairs = zip(blocks, data, strict=True)
    if any(xxhash.xxh3_64_hexdigest(part) != checksums[name].hashes[number] for (name, number), part in pairs):
        return None
    return description, [infos[name] for name in checksums]


def _checksums_in(manifest: ObjectInfo | None, fetch: Fetch) -> Mapping[str, Checksums] | None:
    """Those of a manifest, by name; None without one, for what is none, and while the checkpoint is saved again."""
    if manifest is None or manifest.size > _MOST_BYTES:
        return None
    (data,) = fetch([ByteRange(manifest.key, 0, manifest.size, manifest.etag)])
    try:
        tables = parse_manifest(NAME, bytes(data))
    except FormatError:
        return None
    return tables[0] if len(tables) == 1 else None


def _range(info: ObjectInfo, checksums: Checksums, number: int) -> ByteRange:
    begin = number * checksums.block_bytes
    return ByteRange(info.key, begin, min(checksums.block_bytes, info.size - begin), info.etag)
