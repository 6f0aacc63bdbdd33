"""The `.metadata` of a torch.distributed.checkpoint directory: which tensors there are, in which pieces, in which files.

It is a pickle of a few dataclasses, read by `unpickling`: nothing of it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.checkpoint.formats import torch_zip
from loaderkit.checkpoint.formats.restricted_pickle import Opaque, Record, load_pickle, record, shown
from loaderkit.errors import FormatError
from loaderkit.native.garbage import collected_later

_IN_METADATA = (
    "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
    "Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_MAX_DIMS = 64
_MAX_CUT = 8  # dimensions along which a tensor is cut into pieces
_MOST_CORNERS = 2**24  # of the pieces of a tensor: two million pieces by rows and columns


class DcpLocation(NamedTuple):
    """Where torch.save's archive of one piece, or one value, lies: bytes [start, start + length) of a file."""

    path: str
    start: int
    length: int


class DcpPiece(NamedTuple):
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: DcpLocation


class Described(NamedTuple):
    """A tensor of the checkpoint: what it is as a whole, and its pieces, which cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[DcpPiece, ...]


class Contents(NamedTuple):
    """What the checkpoint holds, by name: tensors, and values pickled by themselves; and the paths that the names stand for."""

    tensors: dict[str, Described]
    values: dict[str, DcpLocation]
    paths: dict[str, tuple[str | int, ...]]


@collected_later
def read_metadata(data: bytes) -> Contents:
    """The contents that a `.metadata` file describes. Raises FormatError."""
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
    places = {(fqn, offsets): place for fqn, offsets, place in _places(stored)}
    contents = Contents({}, {}, _paths(metadata.get("planner_data")))
    for name, what in described.items():
        if not isinstance(name, str):
            raise FormatError(f"a name is {shown(name)}, not text")
        if _is(what, "BytesStorageMetadata"):
            place = places.get((name, None))
            if place is None:
                raise FormatError(f"it says nowhere where the value {name!r} lies")
            contents.values[name] = place
        elif _is(what, "TensorStorageMetadata"):
            contents.tensors[name] = _tensor(name, what, places)
        else:
            raise FormatError(f"{name!r} is neither a tensor nor a value: {shown(what)}")
    _check_places(contents)
    return contents


def _paths(planned: Any) -> dict[str, tuple[str | int, ...]]:
    """name -> path in the nested state, as far as what the planner left is that."""
    if not isinstance(planned, dict):
        return {}
    return {
        name: tuple(path)
        for name, path in planned.items()
        if isinstance(name, str) and isinstance(path, (tuple, list)) and all(type(part) in (str, int) for part in path)
    }


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Record) and type(value).__name__ == name


def _places(stored: dict[Any, Any]) -> Iterator[tuple[str, tuple[int, ...] | None, DcpLocation]]:
    for index, info in stored.items():
        if not _is(index, "MetadataIndex") or not _is(info, "_StorageInfo"):
            raise FormatError("its storage_data is not that of files: was it written by a storage of another kind?")
        fqn, offsets = index.get("fqn"), index.get("offset")
        path, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(fqn, str) or not isinstance(path, str) or not _are_sizes((start, length)):
            raise FormatError(
                f"it places {shown(fqn)} at {shown(path)}, {shown(start)}, {shown(length)}: that is no place"
            )
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{fqn!r} is packed ({shown(info.get('transform_descriptors'))}): save it without extensions"
            )
        if path.startswith("/") or ".." in path.split("/"):
            raise FormatError(f"{fqn!r} lies in {path!r}, which leads out of the checkpoint's directory")
        if offsets is not None and not _are_sizes(offsets):
            raise FormatError(f"it places a piece of {fqn!r} at {shown(offsets)} in the tensor: that is no place")
        yield fqn, None if offsets is None else tuple(offsets), DcpLocation(path, start, length)


def _tensor(name: str, what: Record, places: dict[tuple[str, tuple[int, ...] | None], DcpLocation]) -> Described:
    properties, shape, chunks = what.get("properties"), what.get("size"), what.get("chunks")
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or not _are_sizes(shape) or not isinstance(chunks, list):
        raise FormatError(f"its description of the tensor {name!r} is not complete")
    if len(shape) > _MAX_DIMS:
        raise FormatError(f"{name!r} has {len(shape)} dimensions, and torch makes no tensor of more than {_MAX_DIMS}")
    if prod(max(size, 1) for size in shape) * dtype.itemsize > 2**62:
        raise FormatError(f"the tensor {name!r} of shape {list(shape)} is larger than anything")
    pieces = []
    for chunk in chunks:
        offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Record) else (None, None)
        if not (_are_sizes(offsets) and _are_sizes(sizes) and len(offsets) == len(sizes) == len(shape)):
            raise FormatError(f"a piece of the tensor {name!r} is no box of it")
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise FormatError(
                f"a piece of {name!r} at {list(offsets)} of size {list(sizes)} reaches beyond {list(shape)}"
            )
        place = places.get((name, tuple(offsets)))
        if place is None:
            raise FormatError(f"it says nowhere where the piece of {name!r} at {list(offsets)} lies")
        if place.length < prod(sizes) * dtype.itemsize:
            raise FormatError(
                f"the piece of {name!r} at {list(offsets)} of size {list(sizes)} cannot lie in {place.length} bytes"
            )
        pieces.append(DcpPiece(tuple(offsets), tuple(sizes), place))
    _check_cover(name, tuple(shape), pieces)
    return Described(dtype, tuple(shape), tuple(pieces))


def _check_cover(name: str, shape: tuple[int, ...], pieces: list[DcpPiece]) -> None:
    """Raise FormatError unless each element is in one piece.

    Pieces tile a box if and only if their corners, those with an odd number of upper bounds counted negative, cancel out to the
    corners of the box: they are the mixed differences of how often each element is in a piece. So no pair is compared.
    """
    pieces = [piece for piece in pieces if 0 not in piece.sizes]
    if sum(prod(piece.sizes) for piece in pieces) != prod(shape):
        raise FormatError(f"the pieces of {name!r} do not cover its shape {list(shape)}, or overlap")
    if len(pieces) <= 1 or not prod(shape):
        return
    whole = np.array([shape], np.int64)
    lower = np.array([piece.offsets for piece in pieces], np.int64)
    upper = lower + np.array([piece.sizes for piece in pieces], np.int64)
    cut = np.flatnonzero(((lower > 0) | (upper < whole)).any(axis=0))
    if len(cut) > _MAX_CUT or len(cut) * len(lower) * 2 ** len(cut) > _MOST_CORNERS:
        raise FormatError(
            f"{name!r} is cut along {len(cut)} dimensions into {len(pieces)} pieces, and no writer cuts one into so many"
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
        raise FormatError(f"two pieces of {name!r} overlap")


def _check_places(contents: Contents) -> None:
    """Raise FormatError if two places share bytes: what is restored would be more than the files hold."""
    by_path: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in contents.tensors.items():
        for piece in tensor.pieces:
            if 0 not in piece.sizes:
                by_path.setdefault(piece.place.path, []).append((piece.place.start, piece.place.length, name))
    for name, place in contents.values.items():
        by_path.setdefault(place.path, []).append((place.start, place.length, name))
    for path, places in by_path.items():
        places.sort()
        for (start, length, name), (after, _, other) in pairwise(places):
            if start + length > after:
                raise FormatError(f"{name!r} and {other!r} lie at the same bytes of {path!r}, from {after} on")


def _are_sizes(values: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(values, (tuple, list)) and all(type(value) is int and 0 <= value <= 2**62 for value in values)


class Blob(NamedTuple):
    """What lies in the archive of one piece: where its bytes begin in it, and how they are laid out (in elements)."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Layouts:
    """Finds out how small archives are laid out, each kind of them once: torch.save writes tensors of one shape alike, but for
    the tensor and checksums. To compare the bytes that tell takes 10 us, to read the archive 100."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[NDArray[np.int64], bytes, Blob]] = {}  # by size: telling bytes, where and which

    def blob(self, data: memoryview) -> Blob:
        """As `read_blob`, of an archive that is there as a whole."""
        size, array = len(data), np.frombuffer(data, np.uint8)
        known = self._known.get(size)
        if known is not None and array[known[0]].tobytes() == known[1]:
            return known[2]

        def read(start: int, buffer: memoryview) -> None:
            buffer[:] = data[start : start + len(buffer)]

        found = read_blob(read, size)
        telling = np.zeros(size, np.bool_)
        for start, end in torch_zip.telling_bytes(read, size):
            telling[start:end] = True
        where = np.flatnonzero(telling)
        self._known[size] = where, array[where].tobytes(), found
        return found


def read_blob(read: torch_zip.Read, size: int) -> Blob:
    """The one tensor in an archive of `size` bytes, as `FileSystemWriter` makes them. Raises FormatError."""
    archive = torch_zip.read_archive(read, size)
    view = archive.value
    if not isinstance(view, torch_zip.View):
        what = view.what if isinstance(view, Opaque) else type(view).__name__
        raise FormatError(f"it holds no plain tensor, but {what}")
    start = archive.starts[view.storage.key] + view.offset * view.dtype.itemsize
    return Blob(start, view.dtype, view.shape, view.strides)
