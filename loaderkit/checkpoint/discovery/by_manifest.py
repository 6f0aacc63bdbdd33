"""Lists the objects of a checkpoint from its manifest, since parsing its description takes tens of milliseconds."""

from __future__ import annotations

from collections.abc import Mapping

from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.discovery.description import DESCRIPTIONS, SAFETENSORS, Description
from loaderkit.checkpoint.discovery.detect import Fetch
from loaderkit.checkpoint.discovery.manifest import NAME, block_of, damaged_block, parse_manifest
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import FormatError

_MOST_BYTES = 1 << 20  # of a manifest that is read here


def objects_by_manifest(infos: Mapping[str, ObjectInfo], fetch: Fetch) -> tuple[Description, list[ObjectInfo]] | None:
    """The kind of description and the objects of a checkpoint whose directory has `infos`, by name: if its files have
    the sizes in its manifest, and its description has the checksums (in safetensors also the beginning of each file).
    Else None."""
    descriptions = [known for known in DESCRIPTIONS if known.key in infos]
    checksums = _checksums_in(infos.get(NAME), fetch)
    if len(descriptions) != 1 or checksums is None or descriptions[0].key not in checksums:
        return None
    (description,) = descriptions
    if any(name not in infos or infos[name].size != item.num_bytes for name, item in checksums.items()):
        return None
    numbers = [(description.key, number) for number in range(len(checksums[description.key].hashes))]
    if description is SAFETENSORS:  # a header begins each
        numbers += [(name, 0) for name, item in checksums.items() if name.endswith(description.suffix) and item.hashes]
    blocks = [block_of(infos[name], checksums[name], number) for name, number in numbers]
    by_key = {infos[name].key: item for name, item in checksums.items()}
    if damaged_block(blocks, by_key, fetch) is not None:
        return None
    return description, [infos[name] for name in checksums]


def _checksums_in(manifest: ObjectInfo | None, fetch: Fetch) -> Mapping[str, Checksums] | None:
    """The checksums in a manifest, by name. None if there is no manifest, if the object is none, or while the
    checkpoint is saved again."""
    if manifest is None or manifest.size > _MOST_BYTES:
        return None
    (data,) = fetch([ByteRange(manifest.key, 0, manifest.size, manifest.etag)])
    try:
        tables = parse_manifest(NAME, bytes(data))
    except FormatError:
        return None
    return tables[0] if len(tables) == 1 else None
