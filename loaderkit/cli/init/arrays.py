"""Sources of numbers: .npy files, Zarr stores, HDF5 files."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from loaderkit.cli.init.kinds import FoundSource
from loaderkit.cli.init.place import DataPlace, common_folder, without_other_splits
from loaderkit.errors import ConfigError, FormatError
from loaderkit.sources.containers.hdf5 import shapes_of
from loaderkit.sources.formats.npy import NpyHeader, parse_npy_header

_MOST_BEGIN = 64 << 10
_MOST_ENDS = 16
_WINDOW = 2049
_ZARR = re.compile(r"(?:(.*)/)?(zarr\.json|\.zarray)")
_LABELS = re.compile("label|mask|seg")


def npy_source(place: DataPlace, keys: list[str]) -> FoundSource | None:
    """One file of records, or files of tokens; None for others, of which each is a sample."""
    if not all(key.lower().endswith(".npy") for key in keys):
        return None
    header = _header(place, keys[0])
    are_tokens = len(header.shape) == 1 and header.dtype.kind in "iu"
    if place.is_file:
        section: dict[str, Any] = {"kind": "array", "url": place.url}
        if not are_tokens or header.shape[0] < _WINDOW:
            return FoundSource(section, "records of a .npy file")
        notes = (f"windows of one text: {_WINDOW - 1:,} tokens and the next one",)
        return FoundSource({**section, "field": "tokens", "window": _WINDOW}, "windows of a .npy file", notes)
    return _documents(place, keys) if are_tokens else None


def _header(place: DataPlace, key: str) -> NpyHeader:
    """Raises FormatError that names the file."""
    try:
        return parse_npy_header(place.begin(key, _MOST_BEGIN), place.info(key).size)
    except FormatError as error:
        raise FormatError(f"{place.connector.describe(key)}: {error}") from None


def _documents(place: DataPlace, keys: list[str]) -> FoundSource:
    """The token that ends documents is the last one of every file."""
    folder, names, begin, notes = without_other_splits(keys)
    ends = set()
    for name in names[:_MOST_ENDS]:
        info = place.info(folder + name)
        header = _header(place, info.key)
        data = bytearray(header.dtype.itemsize)
        place.connector.read_into(info.key, info.size - len(data), memoryview(data), etag=info.etag)
        ends.add(np.frombuffer(data, header.dtype)[0].item())
    if len(ends) != 1 or len(names) < 2:
        raise ConfigError(
            f"{place.under(folder)} has {len(names):,} .npy files of whole numbers, and which token ends a document cannot be "
            "seen: write `source: {kind: tokens, url: ..., end: 0}` with that token; windows of one file: `loaderkit init FILE`"
        )
    section: dict[str, Any] = {"kind": "tokens", "url": place.under(folder), "end": ends.pop()}
    if begin or any("/" in name for name in names):
        section["include"] = f"{begin or '**/'}*.npy"
    said = f"all files end with the token {section['end']}, so it is taken to end documents"
    return FoundSource(section, "documents in .npy files", (said, *notes), packs=True)


def zarr_source(place: DataPlace) -> FoundSource | None:
    """The arrays of the first store; None if there is none."""
    found = [match for info in place.infos if (match := _ZARR.fullmatch(info.key))]
    if not found:
        return None
    if place.is_cut:
        raise ConfigError(
            f"{place.url} is a Zarr store with more objects than are looked at: write `source: {{kind: zarr, url: ..., "
            "samples: rows, fields: {image: PATH}}` (docs/guide/arrays.md)"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for match in found:
        try:
            described = json.loads(place.begin(match[0], _MOST_BEGIN))
            if match[2] == ".zarray" or described["node_type"] == "array":
                shapes[match[1] or ""] = tuple(described["shape"])
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise FormatError(f"{place.connector.describe(match[0])} describes no array of Zarr: {error!r}") from None
    ends = {path: path.find(".zarr") + 5 if ".zarr" in path else 0 for path in shapes}
    stores = sorted({path[:end] for path, end in ends.items()}) or [""]
    first = {path[end:].strip("/") or "/": shapes[path] for path, end in ends.items() if path[:end] == stores[0]}
    url = place.under(stores[0] if len(stores) == 1 else common_folder(stores))
    return _arrays(place, {"kind": "zarr", "url": url}, first, len(stores))


def hdf5_source(place: DataPlace, keys: list[str]) -> FoundSource:
    """The data sets of the first file."""
    folder, names, _, notes = without_other_splits(keys)
    section: dict[str, Any] = {"kind": "hdf5", "url": place.under(folder)}
    if notes:
        section["include"] = "train*"
    return _arrays(place, section, shapes_of(place.connector, place.info(folder + names[0])), len(names), notes)


def _arrays(
    place: DataPlace,
    section: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    num: int,
    notes: tuple[str, ...] = (),
) -> FoundSource:
    """Rows of arrays that share their first length; or, in several stores, volumes of one shape, each a sample."""
    shapes = {path: shape for path, shape in shapes.items() if shape}
    are_volumes = num > 1 and {*map(len, shapes.values())} == {3} and len({*shapes.values()}) == 1
    if len({shape[0] for shape in shapes.values()}) != 1:
        found = ", ".join(f"{path} {list(shape)}" for path, shape in sorted(shapes.items())[:8]) or "none"
        raise ConfigError(
            f"{place.url} has no arrays of one length ({found}), so what a sample is cannot be told: write `source: {{kind: "
            f"{section['kind']}, url: ..., samples: rows, fields: {{image: PATH}}}}` with arrays of one length"
        )
    fields: dict[str, str] = {}
    for path in sorted(shapes):
        name = re.sub(r"\W", "_", path.rpartition("/")[2]) or "data"
        fields[re.sub(r"\W", "_", path) if name in fields else name] = path
    marks = tuple(filter(_LABELS.search, fields)) if are_volumes else ()
    noun = f"samples in {num:,} {'Zarr stores' if section['kind'] == 'zarr' else 'HDF5 files'}"
    section = {**section, "samples": "whole" if are_volumes else "rows", "fields": fields}
    return FoundSource(section, noun, notes, marks=marks)
