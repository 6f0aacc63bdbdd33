"""The `.metadata` of a torch.distributed.checkpoint directory: its tensors, their shards, and the files with the shards.

It is a pickle of a few dataclasses, read by `restricted_pickle`, so nothing in it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from loaderkit._internal.garbage import collector_off
from loaderkit.checkpoint.contents import TensorEntry, TensorShard
from loaderkit.checkpoint.formats import torch_zip
from loaderkit.checkpoint.formats.restricted_pickle import Record, load_pickle, record, shown
from loaderkit.checkpoint.formats.shard_archive import Layouts
from loaderkit.connectors.base import ByteRange
from loaderkit.errors import FormatError

_IN_METADATA = (
    "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
    "Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_MAX_DIMS = 64
MAX_TIED = 32  # tensors that may lie at the same bytes
_MAX_CUT = 8  # dimensions along which a tensor is cut into shards
_MAX_CORNERS = 2**24  # of the shards of a tensor: two million shards by rows and columns


class DcpContents(NamedTuple):
    """The contents of a checkpoint by name: tensors, archives of plain values, and the paths in the nested state."""

    tensors: dict[str, TensorEntry]
    values: dict[str, ByteRange]
    paths: dict[str, tuple[str | int, ...]]


@collector_off()
def read_metadata(data: bytes, prefix: str = "") -> DcpContents:
    """The contents that a `.metadata` file describes; `prefix`, its directory, begins the keys. Raises FormatError."""
    names: dict[str, Any] = {**torch_zip.names()}
    for name in _IN_METADATA:
        names[f"torch.distributed.checkpoint.metadata.{name}"] = record(name)
    names["torch.distributed.checkpoint.filesystem._StorageInfo"] = record("_StorageInfo")
    metadata = load_pickle(data, names)
    if not _is(metadata, "Metadata"):
        raise FormatError(f"it holds no Metadata of torch.distributed.checkpoint, but {shown(metadata)}")
    described, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise FormatError("it lacks state_dict_metadata or storage_data: was it written by a storage of another kind?")
    archives = {(fqn, offsets): archive for fqn, offsets, archive in _archives(stored, prefix)}
    contents = DcpContents({}, {}, _paths(metadata.get("planner_data")))
    layouts = Layouts()
    for name, what in described.items():
        if not isinstance(name, str):
            raise FormatError(f"a name is {shown(name)}, not text")
        if _is(what, "BytesStorageMetadata"):
            archive = archives.get((name, None))
            if archive is None:
                raise FormatError(f"it has no location for the value {name!r}")
            contents.values[name] = archive
        elif _is(what, "TensorStorageMetadata"):
            contents.tensors[name] = _tensor(name, what, archives, layouts)
        else:
            raise FormatError(f"{name!r} is neither a tensor nor a value: {shown(what)}")
    _check_overlap(contents, len(prefix))
    return contents


def _paths(planned: Any) -> dict[str, tuple[str | int, ...]]:
    """name -> path in the nested state, where the planner has stored one."""
    if not isinstance(planned, dict):
        return {}
    return {
        name: tuple(path)
        for name, path in planned.items()
        if isinstance(name, str) and isinstance(path, (tuple, list)) and all(type(key) in (str, int) for key in path)
    }


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Record) and type(value).__name__ == name


def _archives(stored: dict[Any, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...] | None, ByteRange]]:
    """(name, offsets of a shard or None, archive) of all shards and values."""
    for index, info in stored.items():
        if not _is(index, "MetadataIndex") or not _is(info, "_StorageInfo"):
            raise FormatError("its storage_data is not that of files: was it written by a storage of another kind?")
        fqn, offsets = index.get("fqn"), index.get("offset")
        path, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(fqn, str) or not isinstance(path, str) or not _are_sizes((start, length)):
            raise FormatError(
                f"its location of {shown(fqn)} is invalid: {shown(path)}, {shown(start)}, {shown(length)}"
            )
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{fqn!r} is packed ({shown(info.get('transform_descriptors'))}): save it without extensions"
            )
        if path.startswith("/") or ".." in path.split("/"):
            raise FormatError(f"{fqn!r} lies in {path!r}, which leads out of the checkpoint's directory")
        if offsets is not None and not _are_sizes(offsets):
            raise FormatError(f"the offsets {shown(offsets)} of a shard of {fqn!r} are invalid")
        yield fqn, None if offsets is None else tuple(offsets), ByteRange(prefix + path, start, length)


def _tensor(
    name: str, what: Record, archives: dict[tuple[str, tuple[int, ...] | None], ByteRange], layouts: Layouts
) -> TensorEntry:
    properties, shape, chunks = what.get("properties"), what.get("size"), what.get("chunks")
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or not _are_sizes(shape) or not isinstance(chunks, list):
        raise FormatError(f"its description of the tensor {name!r} is not complete")
    if len(shape) > _MAX_DIMS:
        raise FormatError(f"{name!r} has {len(shape)} dimensions, and torch makes no tensor of more than {_MAX_DIMS}")
    if prod(max(size, 1) for size in shape) * dtype.itemsize > 2**62:
        raise FormatError(f"the tensor {name!r} of shape {list(shape)} is larger than anything")
    shards = []
    for chunk in chunks:
        offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Record) else (None, None)
        if not (_are_sizes(offsets) and _are_sizes(sizes) and len(offsets) == len(sizes) == len(shape)):
            raise FormatError(f"a shard of the tensor {name!r} is no box of it")
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise FormatError(
                f"a shard of {name!r} at {list(offsets)} of size {list(sizes)} reaches beyond {list(shape)}"
            )
        archive = archives.get((name, tuple(offsets)))
        if archive is None:
            raise FormatError(f"it has no location for the shard of {name!r} at {list(offsets)}")
        if archive.length < prod(sizes) * dtype.itemsize:
            raise FormatError(
                f"the shard of {name!r} at {list(offsets)} of size {list(sizes)} cannot lie in {archive.length} bytes"
            )
        key, start, length, _ = archive
        shards.append(TensorShard(tuple(offsets), tuple(sizes), key, start, length, is_archive=True, layouts=layouts))
    _check_cover(name, tuple(shape), shards)
    return TensorEntry(dtype, tuple(shape), tuple(shards))


def _check_cover(name: str, shape: tuple[int, ...], shards: list[TensorShard]) -> None:
    """Raise FormatError unless each element is in one shard.

    Shards tile a box if and only if their corners, those with an odd number of upper bounds counted negative, cancel out to the
    corners of the box: they are the mixed differences of how often each element is in a shard. So no pair is compared.
    """
    shards = [shard for shard in shards if 0 not in shard.sizes]
    if sum(prod(shard.sizes) for shard in shards) != prod(shape):
        raise FormatError(f"the shards of {name!r} do not cover its shape {list(shape)}, or overlap")
    if len(shards) <= 1 or not prod(shape):
        return
    whole = np.array([shape], np.int64)
    lower = np.array([shard.offsets for shard in shards], np.int64)
    upper = lower + np.array([shard.sizes for shard in shards], np.int64)
    cut = np.flatnonzero(((lower > 0) | (upper < whole)).any(axis=0))
    if len(cut) > _MAX_CUT or len(cut) * len(lower) * 2 ** len(cut) > _MAX_CORNERS:
        raise FormatError(
            f"{name!r} is cut along {len(cut)} dimensions into {len(shards)} shards, more than any writer makes"
        )
    lower, upper = np.concatenate([lower, 0 * whole]), np.concatenate([upper, whole])
    signs = np.ones(len(lower), np.int64)
    signs[-1] = -1
    corners = np.empty((0, len(lower)), np.int64)
    for dim in cut:
        times = corners.shape[1] // len(lower)
        ends = np.concatenate([np.tile(lower[:, dim], times), np.tile(upper[:, dim], times)])
        corners = np.concatenate([np.tile(corners, 2), ends[None]])
        signs = np.concatenate([signs, -signs])
    order = np.lexsort(corners) if len(cut) else np.arange(len(signs))
    corners, signs = corners[:, order], signs[order]
    is_other = np.concatenate([[True], (corners[:, 1:] != corners[:, :-1]).any(axis=0)])
    if np.add.reduceat(signs, np.flatnonzero(is_other)).any():
        raise FormatError(f"two shards of {name!r} overlap")


def _check_overlap(contents: DcpContents, len_prefix: int) -> None:
    """Raise FormatError if two archives share bytes: the checkpoint would have more bytes than its files.

    A few tensors may have one archive in common, as tied weights do.
    """
    by_key: dict[str, list[tuple[int, int, str]]] = {}
    tied: dict[tuple[str, int, int], set[str]] = {}
    for name, entry in contents.tensors.items():
        for shard in entry.shards:
            if 0 not in shard.sizes:
                names = tied.setdefault((shard.key, shard.start, shard.length), set())
                if not names or name in names or len(names) == MAX_TIED:
                    by_key.setdefault(shard.key, []).append((shard.start, shard.length, name))
                names.add(name)
    for name, archive in contents.values.items():
        by_key.setdefault(archive.key, []).append((archive.start, archive.length, name))
    for key, archives in by_key.items():
        archives.sort()
        for (start, length, name), (after, _, other) in pairwise(archives):
            if start + length > after:
                raise FormatError(
                    f"{name!r} and {other!r} lie at the same bytes of {key[len_prefix:]!r}, from {after} on"
                )


def _are_sizes(values: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(values, (tuple, list)) and all(type(value) is int and 0 <= value <= 2**62 for value in values)
