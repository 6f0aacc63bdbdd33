"""Open a checkpoint: tell its format, check that it is whole, and read its contents.

A partial checkpoint (a file missing or short, an index without its files, not committed) is refused with the name of what is
missing, and so is a directory of which it cannot be told what is meant. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from loaderkit._internal.garbage import collector_off
from loaderkit.checkpoint.contents import Checkpoint, TensorEntry, TensorShard, strides_of
from loaderkit.checkpoint.discovery.detect import CheckpointFiles, Fetch, choose, heads_of
from loaderkit.checkpoint.discovery.kinds import METADATA, SHARD
from loaderkit.checkpoint.discovery.locate import CheckpointLocation
from loaderkit.checkpoint.discovery.open_torch import open_common, open_deepspeed, open_torch
from loaderkit.checkpoint.discovery.opened_files import (
    MAX_INDEX,
    check_index,
    indexed_names,
    named_error,
    read_whole,
    reader_in,
    require_new,
)
from loaderkit.checkpoint.formats import dcp, safetensors
from loaderkit.checkpoint.formats.state_file import STATE, decoded_values, read_state
from loaderkit.checkpoint.names import Index
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import CheckpointError, FormatError

_MAX_METADATA = 2**31
_COMMON, _BACKEND = "common.pt", "metadata.json"  # of Megatron's torch_dist: what is not sharded, and that it is such
_MAX_REST = 2**20  # bytes; a longer rest of a header is read by itself
_MAX_RESTS = 64  # read at once


def open_checkpoint(location: CheckpointLocation, fetch: Fetch, *, export: bool = False) -> Checkpoint:
    """The checkpoint at a location, or with `export` the export. `fetch` reads many ranges at once. The checkpoint may
    be in a folder below; its name and prefix then say so: see `CheckpointLocation.of`.

    Raises CheckpointError, FormatError, ConnectorError.
    """
    chosen, infos, location = choose(location, fetch)
    if chosen.kind == "legacy":
        raise CheckpointError(
            f"{location.connector.describe(infos[chosen.files[0]].key)} is a torch.save file older than torch 1.6, which can "
            "only be read by running it: load it with torch.load(weights_only=True) and save it again"
        )
    kind = "safetensors" if chosen.kind == "state" else chosen.kind
    checkpoint = Checkpoint(location.url, kind, location.connector, location.prefix, infos, beside=[*chosen.beside])
    if chosen.kind == "state":
        _open_state(checkpoint, fetch, export)
        return checkpoint
    if location.single is None and chosen.index is None:
        _check_numbered(checkpoint, chosen.files)
    is_single = location.single is not None
    readers: dict[str, Callable[..., None]] = {
        "safetensors": partial(_open_safetensors, is_single=is_single),
        "torch": partial(open_torch, is_single=is_single),
        "deepspeed": open_deepspeed,
        "dcp": _open_dcp,
    }
    readers[chosen.kind](checkpoint, chosen, fetch)
    return checkpoint


# ------------------------------------------------------------------------------------------------------ safetensors


def _open_safetensors(checkpoint: Checkpoint, chosen: CheckpointFiles, fetch: Fetch, *, is_single: bool) -> None:
    indexed = indexed_names(checkpoint, chosen, ".safetensors")
    names = chosen.files if indexed is None else [*indexed]
    infos = [checkpoint.objects[name] for name in names]
    for name, (info, entries, metadata) in zip(names, _headers(checkpoint, infos, fetch, chosen.heads), strict=True):
        if "loaderkit" in metadata and indexed is None and not is_single:
            raise CheckpointError(
                f"{checkpoint.describe(info.key)} is {metadata['loaderkit']}, and that is not there: the "
                "checkpoint was not committed, or a file of it was copied; name the file to read it by itself"
            )
        known = entries if indexed is None else [entry for entry in entries if entry.name in indexed[name]]
        _add_entries(checkpoint, info, known)
    check_index(checkpoint, indexed)


def _headers(
    checkpoint: Checkpoint, infos: list[ObjectInfo], fetch: Fetch, heads: dict[str, bytes]
) -> Iterator[tuple[ObjectInfo, list[safetensors.HeaderEntry], dict[str, str]]]:
    """(the file, its tensors, its metadata) of each; `heads` are the files' first bytes."""
    for number, info in enumerate(infos):
        if number % _MAX_RESTS == 0:
            _complete(infos[number : number + _MAX_RESTS], fetch, heads)
        checkpoint.read.add(info.key)
        try:
            entries, metadata = safetensors.read_header(reader_in(checkpoint, info, heads.pop(info.key)), info.size)
        except FormatError as error:
            raise named_error(checkpoint, info, error) from None
        yield info, entries, metadata


@collector_off()
def _add_entries(
    checkpoint: Checkpoint, info: ObjectInfo, entries: list[safetensors.HeaderEntry], prefix: str = ""
) -> None:
    for entry in entries:
        name, shape = prefix + entry.name, entry.shape
        require_new(checkpoint, name, info)
        shard = TensorShard((0,) * len(shape), shape, info.key, entry.start, entry.end - entry.start, strides_of(shape))
        checkpoint.tensors[name] = TensorEntry(entry.dtype, shape, (shard,))


def _complete(infos: list[ObjectInfo], fetch: Fetch, heads: dict[str, bytes]) -> None:
    """Add the rest of headers that are somewhat longer than the bytes in `heads`."""
    ranges = []
    for info in infos:
        have = len(heads[info.key])
        missing = safetensors.header_end(heads[info.key]) - have
        if 0 < missing <= min(_MAX_REST, info.size - have):
            ranges.append(ByteRange(info.key, have, missing, info.etag))
    for item, rest in zip(ranges, fetch(ranges), strict=True):
        heads[item.key] += rest


def _check_numbered(checkpoint: Checkpoint, files: list[str]) -> None:
    """Raise CheckpointError if a file is missing of those whose names give a total: writers write the index last."""
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(SHARD.fullmatch, files)):
        numbers.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, count, suffix), present in numbers.items():
        num_shards, first = int(count), 0 if 0 in present else 1
        missing = next((n for n in range(first, first + num_shards) if n not in present), None)
        if missing is not None:
            raise CheckpointError(
                f"{checkpoint.name} is not whole: it has no index and {len(present)} of {num_shards} shards; "
                f"'{stem}-{missing:0{len(count)}}-of-{count}{suffix}' is missing. Name one shard to restore only its tensors"
            )


def _open_state(checkpoint: Checkpoint, fetch: Fetch, is_export: bool) -> None:
    """A checkpoint whose safetensors files the file STATE names."""
    info = checkpoint.objects[STATE]
    try:
        state = read_state(read_whole(checkpoint, info, MAX_INDEX))
        checkpoint.values.update(decoded_values(state))
    except FormatError as error:
        raise named_error(checkpoint, info, error) from None
    if state.export and not is_export:
        precision = state.export.get("dtype")
        then = ", and loaderkit.checkpoint.dequantize" if precision == "int8" else ""
        raise CheckpointError(
            f"{checkpoint.name} is an export in {precision} of {state.export.get('of')}, no checkpoint: training would go on "
            f"from rounded numbers. Load its files with safetensors or from_pretrained, or use restore(url, export=True){then}"
        )
    if missing := [name for name in state.files if name not in checkpoint.objects]:
        raise CheckpointError(
            f"{checkpoint.name} is not whole: {len(missing)} of its {len(state.files)} files are missing, such as "
            f"{missing[0]!r}"
        )
    infos = [checkpoint.objects[name] for name in state.files]
    for item, entries, _ in _headers(checkpoint, infos, fetch, heads_of(infos, fetch)):
        named = state.files[item.key[len(checkpoint.prefix) :]]
        if {entry.name for entry in entries} != {*named.names}:
            raise CheckpointError(
                f"{checkpoint.describe(item.key)} has other tensors than {STATE} says: it was replaced"
            )
        _add_entries(checkpoint, item, entries, named.prefix)
        for name in named.names:
            checkpoint.paths[named.prefix + name] = _path(state.path_of(named.prefix + name, named.prefix))
    for alias, name in state.aliases.items():
        require_new(checkpoint, alias, info)
        if name not in checkpoint.tensors:
            raise named_error(
                checkpoint, info, FormatError(f"{alias!r} is the same tensor as {name!r}, which is not there")
            )
        checkpoint.tensors[alias] = checkpoint.tensors[name]
        checkpoint.paths[alias] = _path(state.path_of(alias))
    for name in checkpoint.values:
        checkpoint.paths[name] = _path(state.path_of(name))


def _path(path: tuple[str | int, ...]) -> tuple[Any, ...]:
    return tuple(Index(key) if isinstance(key, int) else key for key in path)


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint


def _open_dcp(checkpoint: Checkpoint, chosen: CheckpointFiles, fetch: Fetch) -> None:
    for description in chosen.files:
        info = checkpoint.objects[description]
        try:
            folder = info.key.removesuffix(METADATA)
            contents = dcp.read_metadata(read_whole(checkpoint, info, _MAX_METADATA), folder)
        except FormatError as error:
            raise named_error(checkpoint, info, error) from None
        _check_files(checkpoint, contents)
        for name in (*contents.tensors, *contents.values):
            require_new(checkpoint, name, info)
        _add_contents(checkpoint, contents)
    if _COMMON in checkpoint.beside and _BACKEND in checkpoint.objects and chosen.files == [METADATA]:
        open_common(checkpoint, checkpoint.objects[_COMMON], fetch)


@collector_off()
def _add_contents(checkpoint: Checkpoint, contents: dcp.DcpContents) -> None:
    for name, path in contents.paths.items():
        checkpoint.paths[name] = _path(path)
    for name, entry in contents.tensors.items():
        filled = tuple(shard for shard in entry.shards if 0 not in shard.sizes)
        checkpoint.tensors[name] = entry if len(filled) == len(entry.shards) else replace(entry, shards=filled)
    for name, archive in contents.values.items():
        etag = checkpoint.objects[archive.key[len(checkpoint.prefix) :]].etag
        checkpoint.pickled[name] = archive._replace(etag=etag)


def _ends(contents: dcp.DcpContents) -> Iterator[tuple[str, str, int]]:
    """(name, key, end) of all archives."""
    for name, entry in contents.tensors.items():
        for shard in entry.shards:
            yield name, shard.key, shard.start + shard.length
    for name, archive in contents.values.items():
        yield name, archive.key, archive.start + archive.length


def _check_files(checkpoint: Checkpoint, contents: dcp.DcpContents) -> None:
    """Raise CheckpointError unless every file that is named is there and long enough."""
    missing: dict[str, str] = {}
    for name, key, end in _ends(contents):
        path = key[len(checkpoint.prefix) :]
        info = checkpoint.objects.get(path)
        if info is None and "/" in path:  # in a directory below, which is not listed
            info = next((info for info in checkpoint.connector.list(key) if info.key == key), None)
            if info is not None:
                checkpoint.objects[path] = info
        if info is None:
            missing.setdefault(path, name)
        elif end > info.size:
            raise CheckpointError(
                f"{checkpoint.name} is not whole: {path} has {info.size} bytes, and {name!r} ends at byte {end}"
            )
    if missing:
        file, name = next(iter(missing.items()))
        raise CheckpointError(
            f"{checkpoint.name} is not whole: {len(missing)} of its files are missing, such as {file!r} with {name!r}"
        )
