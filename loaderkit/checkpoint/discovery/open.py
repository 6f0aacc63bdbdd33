"""Open a checkpoint: recognise its format by its content, find it whole, and reduce it to boxes of bytes.

Nothing is written anywhere here. What is partial (a shard missing or short, an index without its files, not committed) is
refused by name, and so is what holds two formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from loaderkit.checkpoint.contents import Checkpoint, Shard, TensorEntry, strides_of
from loaderkit.checkpoint.discovery.detect import INDEX, METADATA, Fetch, heads_of, kinds_of, looked_at
from loaderkit.checkpoint.discovery.locate import CheckpointLocation
from loaderkit.checkpoint.formats import dcp, safetensors, torch_zip
from loaderkit.checkpoint.names import Index, Leaf, flatten
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import CheckpointError, FormatError
from loaderkit.native.garbage import collected_later

_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\..*)", re.DOTALL)
_MAX_INDEX = 2**28
_MAXMETADATA = 2**31
_MOST_REST = 2**20  # of a header: what is longer is read by itself
_MOST_RESTS = 64  # read at once
_FORMATS = {
    "safetensors": "safetensors",
    "torch": "torch.save",
    "dcp": "torch.distributed.checkpoint",
    "legacy": "a torch.save file older than torch 1.6",
}


def open_checkpoint(location: CheckpointLocation, fetch: Fetch) -> Checkpoint:
    """What is at a place. `fetch` reads many ranges at once. Raises CheckpointError, FormatError, ConnectorError."""
    infos = {info.key[len(location.prefix) :]: info for info in location.children()}
    looked = looked_at(location, infos)
    heads = heads_of([infos[name] for name in looked], fetch)
    kinds = kinds_of(location, infos, looked, heads)
    if len(kinds) > 1:
        (first, some), (second, others), *_ = kinds.items()
        raise CheckpointError(
            f"{location.url} holds two formats, {_FORMATS[first]} ({some[0]}) and {_FORMATS[second]} ({others[0]}): name the "
            "file that is meant"
        )
    if not kinds:
        names = ", ".join(list(infos)[:3]) or "nothing"
        raise CheckpointError(
            f"{location.url} holds no checkpoint: expected safetensors, torch.save or torch.distributed.checkpoint; there is "
            f"{names}"
        )
    ((kind, files),) = kinds.items()
    if kind == "legacy":
        raise CheckpointError(
            f"{location.connector.describe(infos[files[0]].key)} is {_FORMATS[kind]}, which can only be read by running it: "
            "load it with torch.load(weights_only=True) and save it again"
        )
    checkpoint = Checkpoint(location.url, kind, location.connector, location.prefix, infos)
    if location.single is None and not any(name.endswith(INDEX) for name in infos):
        _check_numbered(checkpoint, files)
    readers = {"safetensors": _open_safetensors, "torch": _open_torch, "dcp": _open_dcp}
    readers[kind](checkpoint, files, fetch, heads)
    return checkpoint


def _reader(checkpoint: Checkpoint, info: ObjectInfo, head: bytes) -> Callable[[int, memoryview], None]:
    """Reads in an object whose beginning is there already."""

    def read(start: int, buffer: memoryview) -> None:
        known = head[start : start + len(buffer)]
        buffer[: len(known)] = known
        if len(known) < len(buffer):
            checkpoint.connector.read_into(info.key, start + len(known), buffer[len(known) :], etag=info.etag)

    return read


def _named(checkpoint: Checkpoint, info: ObjectInfo, error: Exception) -> FormatError:
    return FormatError(f"{checkpoint.describe(info.key)}: {error}")


# ------------------------------------------------------------------------------------------------------ safetensors


def _open_safetensors(checkpoint: Checkpoint, files: list[str], fetch: Fetch, heads: dict[str, bytes]) -> None:
    wanted = _indexed(checkpoint, files, ".safetensors")
    infos = [checkpoint.objects[name] for name in (files if wanted is None else wanted)]
    for number, info in enumerate(infos):
        if number % _MOST_RESTS == 0:
            _complete(infos[number : number + _MOST_RESTS], fetch, heads)
        checkpoint.read.add(info.key)
        try:
            entries, _ = safetensors.read_header(_reader(checkpoint, info, heads.pop(info.key)), info.size)
        except FormatError as error:
            raise _named(checkpoint, info, error) from None
        _add_entries(checkpoint, info, entries)
    _check_index(checkpoint, wanted)


@collected_later
def _add_entries(checkpoint: Checkpoint, info: ObjectInfo, entries: list[safetensors.Entry]) -> None:
    for entry in entries:
        _require_new(checkpoint, entry.name, info)
        shape = entry.shape
        shard = Shard((0,) * len(shape), shape, info.key, entry.start, entry.end - entry.start, strides_of(shape))
        checkpoint.tensors[entry.name] = TensorEntry(entry.dtype, shape, (shard,))


def _complete(infos: list[ObjectInfo], fetch: Fetch, heads: dict[str, bytes]) -> None:
    """Read the rest of headers that are somewhat longer than what is there of them."""
    ranges = []
    for info in infos:
        there = len(heads[info.key])
        missing = safetensors.header_end(heads[info.key]) - there
        if 0 < missing <= min(_MOST_REST, info.size - there):
            ranges.append(ByteRange(info.key, there, missing, info.etag))
    for item, rest in zip(ranges, fetch(ranges), strict=True):
        heads[item.key] += rest


def _require_new(checkpoint: Checkpoint, name: str, info: ObjectInfo) -> None:
    if name in checkpoint.tensors or name in checkpoint.values:
        raise CheckpointError(
            f"{checkpoint.describe(info.key)}: {name!r} is in another file of {checkpoint.name}, too: name one file"
        )


def _indexed(checkpoint: Checkpoint, files: list[str], suffix: str) -> dict[str, list[str]] | None:
    """File -> the names that the directory's index says are in it; None without an index."""
    indexes = [name for name in checkpoint.objects if name.endswith(suffix + INDEX)]
    if not indexes:
        return None
    if len(indexes) > 1:
        raise CheckpointError(
            f"{checkpoint.name} has two indexes, {indexes[0]} and {indexes[1]}: name the file that is meant"
        )
    info = checkpoint.objects[indexes[0]]
    if info.size > _MAX_INDEX:
        raise _named(checkpoint, info, FormatError(f"{info.size} bytes are too many for an index"))
    data = bytearray(info.size)
    checkpoint.connector.read_into(info.key, 0, memoryview(data), etag=info.etag)
    checkpoint.read.add(info.key)
    try:
        names = json.loads(data)["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise TypeError("its weight_map is no table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _named(checkpoint, info, FormatError(f"it is no index of a checkpoint: {error!r}")) from None
    wanted: dict[str, list[str]] = {}
    for name, file in names.items():
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise _named(checkpoint, info, FormatError(f"it places {name!r} in {file!r}, which is no file beside it"))
        wanted.setdefault(file, []).append(name)
    if missing := [file for file in wanted if file not in checkpoint.objects]:
        raise CheckpointError(
            f"{checkpoint.name} is not whole: {len(missing)} of {len(wanted)} shards are missing, such as {missing[0]!r}, "
            f"which {indexes[0]} names"
        )
    if other := [file for file in wanted if file not in files]:
        raise _named(
            checkpoint, checkpoint.objects[other[0]], FormatError(f"it is no {suffix[1:]} file, and the index names it")
        )
    return wanted


def _check_numbered(checkpoint: Checkpoint, files: list[str]) -> None:
    """Raise CheckpointError if a shard is missing of those whose names say how many there are: the index is written last."""
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        numbers.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, count, suffix), there in numbers.items():
        num_shards, first = int(count), 0 if 0 in there else 1
        missing = next((n for n in range(first, first + num_shards) if n not in there), None)
        if missing is not None:
            raise CheckpointError(
                f"{checkpoint.name} is not whole: it has no index and {len(there)} of {num_shards} shards; "
                f"'{stem}-{missing:0{len(count)}}-of-{count}{suffix}' is missing. Name a shard to restore what is in it alone"
            )


def _check_index(checkpoint: Checkpoint, wanted: dict[str, list[str]] | None) -> None:
    for file, names in (wanted or {}).items():
        for name in names:
            if name not in checkpoint.tensors and name not in checkpoint.values:
                raise CheckpointError(
                    f"{checkpoint.name} is not whole: {file} has no tensor {name!r}, and the index says it has"
                )


# ------------------------------------------------------------------------------------------------------- torch.save


def _open_torch(checkpoint: Checkpoint, files: list[str], fetch: Fetch, heads: dict[str, bytes]) -> None:
    wanted = _indexed(checkpoint, files, ".bin")
    if wanted is None and len(files) > 1:
        raise CheckpointError(
            f"{checkpoint.name} holds {len(files)} torch.save files ({', '.join(files[:4])}) and no index that says how they "
            "belong together: name the one that is meant"
        )
    for name in files if wanted is None else wanted:
        info = checkpoint.objects[name]
        checkpoint.read.add(info.key)

        def fetch_here(ranges: Sequence[tuple[int, int]], info: ObjectInfo = info) -> list[bytes]:
            return fetch([ByteRange(info.key, start, length, info.etag) for start, length in ranges])

        try:
            archive = torch_zip.read_archive(_reader(checkpoint, info, heads.pop(info.key)), info.size, fetch_here)
            leaves = flatten(archive.value, _is_view, max(1000, archive.num_pickled), empty=checkpoint.empty)
        except (FormatError, CheckpointError) as error:
            raise type(error)(f"{checkpoint.describe(info.key)}: {error}") from None
        _add_leaves(checkpoint, info, leaves, archive.starts)
    _check_index(checkpoint, wanted)


@collected_later
def _add_leaves(checkpoint: Checkpoint, info: ObjectInfo, leaves: dict[str, Leaf], starts: dict[str, int]) -> None:
    for name, leaf in leaves.items():
        _require_new(checkpoint, name, info)
        checkpoint.paths[name] = leaf.path
        if _is_view(leaf.value):
            checkpoint.tensors[name] = _stored(leaf.value, starts, info.key)
        else:
            checkpoint.values[name] = leaf.value


def _is_view(value: Any) -> bool:
    return isinstance(value, torch_zip.View)


def _stored(view: torch_zip.View, starts: dict[str, int], key: str) -> TensorEntry:
    base, item = starts[view.storage.key], view.dtype.itemsize
    shard = Shard(
        (0,) * len(view.shape), view.shape, key, base + view.offset * item, view.num_spanned * item, view.strides
    )
    storage = (key, base, view.storage.num_elements * view.storage.dtype.itemsize)
    return TensorEntry(view.dtype, view.shape, (shard,), storage)


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint


def _open_dcp(checkpoint: Checkpoint, files: list[str], fetch: Fetch, heads: dict[str, bytes]) -> None:
    info = checkpoint.objects[METADATA]
    if info.size > _MAXMETADATA:
        raise _named(checkpoint, info, FormatError(f"{info.size} bytes are too many for it"))
    data = bytearray(info.size)
    checkpoint.connector.read_into(info.key, 0, memoryview(data), etag=info.etag)
    checkpoint.read.add(info.key)
    try:
        contents = dcp.read_metadata(bytes(data))
    except FormatError as error:
        raise _named(checkpoint, info, error) from None
    _check_files(checkpoint, contents)
    _add_contents(checkpoint, contents)


@collected_later
def _add_contents(checkpoint: Checkpoint, contents: dcp.Contents) -> None:
    layouts = dcp.Layouts()
    for name, path in contents.paths.items():
        checkpoint.paths[name] = tuple(Index(key) if isinstance(key, int) else key for key in path)
    for name, tensor in contents.tensors.items():
        shards = tuple(
            Shard(
                piece.offsets,
                piece.sizes,
                checkpoint.prefix + piece.place.path,
                piece.place.start,
                piece.place.length,
                is_archive=True,
                layouts=layouts,
            )
            for piece in tensor.pieces
            if prod(piece.sizes)
        )
        checkpoint.tensors[name] = TensorEntry(tensor.dtype, tensor.shape, shards)
    for name, place in contents.values.items():
        key = checkpoint.prefix + place.path
        checkpoint.pickled[name] = ByteRange(key, place.start, place.length, checkpoint.objects[place.path].etag)


def _places(contents: dcp.Contents) -> Iterable[tuple[str, dcp.DcpLocation]]:
    for name, tensor in contents.tensors.items():
        for piece in tensor.pieces:
            yield name, piece.place
    yield from contents.values.items()


def _check_files(checkpoint: Checkpoint, contents: dcp.Contents) -> None:
    """Every file named is there and long enough; else the checkpoint is refused, naming what is missing."""
    missing: dict[str, str] = {}
    for name, place in _places(contents):
        info = checkpoint.objects.get(place.path)
        if info is None and "/" in place.path:
            info = next(
                (
                    i
                    for i in checkpoint.connector.list(checkpoint.prefix + place.path)
                    if i.key == checkpoint.prefix + place.path
                ),
                None,
            )
            if info is not None:
                checkpoint.objects[place.path] = info
        if info is None:
            missing.setdefault(place.path, name)
        elif place.start + place.length > info.size:
            raise CheckpointError(
                f"{checkpoint.name} is not whole: {place.path} has {info.size} bytes, and {name!r} ends at byte "
                f"{place.start + place.length}"
            )
    if missing:
        file, name = next(iter(missing.items()))
        raise CheckpointError(
            f"{checkpoint.name} is not whole: {len(missing)} of its files are missing, such as {file!r} with {name!r}"
        )
