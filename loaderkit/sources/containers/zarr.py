"""Zarr stores, read by zarr-python through a connector: each chunk is an object, or, of a shard, a range of one.

What a store says of itself is checked before zarr sees it: numbers only, and codecs that unpack bytes, which they do within the
bounds of `zarr_layout`. A chunk that is not there holds the fill value, as Zarr defines it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError, MissingExtraError, ObjectNotFoundError
from loaderkit.sources.containers.formats import ContainerArgs, ContainerFormat, StoredArray, ZarrArgs
from loaderkit.sources.containers.source import kind_of
from loaderkit.sources.containers.zarr_layout import ZarrLayout, bounded, read_2, read_3

_MOST_METADATA = 64 << 20
_ARRAYS = ("zarr.json", ".zarray")
_MARKS = (*_ARRAYS, ".zgroup")
_METADATA = (*_MARKS, ".zattrs", ".zmetadata")


def _find(connector: Connector, args: ContainerArgs) -> list[ObjectInfo]:
    """The stores, by their topmost metadata; of one that has none the error comes when it is opened. A folder that holds the
    arrays themselves is a store, whatever its name."""
    if args.is_one:
        return [ObjectInfo(args.key, 0, "")]
    if any(_is_array(connector, path) for path in args.fields.values()):
        return [ObjectInfo("", 0, "")]
    found: dict[str, ObjectInfo] = {}
    for info in connector.list(""):
        folder, _, name = info.key.rpartition("/")
        if folder and name in _MARKS:
            found[folder] = ObjectInfo(folder, 0, "")
    keys = [key for key in found if not any(key[:end] in found for end in _ends(key))]
    return [found[key] for key in sorted(keys, key=lambda key: key.encode("utf-8", "surrogateescape"))]


def _is_array(connector: Connector, path: str) -> bool:
    """Whether an array lies there; a group may, too."""
    for name in _ARRAYS:
        data = _bytes_of(connector, _joined(path, name), _MOST_METADATA)
        if data is not None:
            return name == ".zarray" or b'"array"' in data
    return False


def _ends(key: str) -> list[int]:
    return [number for number, letter in enumerate(key) if letter == "/"]


def _open(connector: Connector, info: ObjectInfo, paths: Mapping[str, str]) -> Mapping[str, StoredArray]:
    try:
        import zarr
    except ImportError as error:
        raise MissingExtraError(f"Zarr needs zarr 3 ({error}): pip install 'loaderkit[volumes]'") from error
    arrays: dict[str, Any] = {}
    for field, path in paths.items():
        layout = _layout(connector, info.key, path)
        store = _store()(connector, info.key, layout)
        array = zarr.open_array(store, path=path, mode="r", zarr_format=layout.version)
        metadata = bounded(array.metadata, layout)
        arrays[field] = zarr.Array(zarr.AsyncArray(metadata, array.store_path))
    return arrays


def _layout(connector: Connector, store: str, path: str) -> ZarrLayout:
    """What an array's metadata say. Raises FormatError for one that is no array, or has other values or codecs."""
    for name, read in (("zarr.json", read_3), (".zarray", read_2)):
        data = _bytes_of(connector, _joined(store, path, name), _MOST_METADATA)
        if data is None:
            continue
        try:
            return read(json.loads(data))
        except FormatError as error:  # which is a ValueError
            raise FormatError(f"its array {path or '/'!r} {error}") from None
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise FormatError(f"its array {path or '/'!r} has a damaged {name}: {error!r:.200}") from None
    missing = " nor ".join(_joined(path, name) for name in _ARRAYS)
    raise FormatError(f"it has no array {path or '/'!r} (neither {missing}): check `fields`")


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _bytes_of(connector: Connector, key: str, most: int | None = None) -> bytearray | None:
    try:
        info = connector.stat(key)
    except ObjectNotFoundError:
        return None
    if most is not None and info.size > most:
        raise FormatError(f"its {key!r} has {info.size} bytes, more than {most}")
    data = bytearray(info.size)
    connector.read_into(key, 0, memoryview(data), etag=info.etag)
    return data


@cache
def _store() -> Any:  # noqa: C901 - the methods that zarr asks for
    """The class of stores for zarr, which is imported where it is used."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

    class ConnectorStore(Store):  # type: ignore[misc]
        """What lies below `prefix` of a connector, to be read."""

        supports_writes = supports_deletes = supports_listing = False

        def __init__(self, connector: Connector, prefix: str, layout: ZarrLayout) -> None:
            super().__init__(read_only=True)
            self._connector, self._prefix, self._layout = connector, prefix, layout

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

        def _read(self, key: str, wanted: Any) -> Any:
            key = _joined(self._prefix, key)
            try:
                info = self._connector.stat(key)
            except ObjectNotFoundError:
                return None
            start, stop, most = 0, info.size, self._layout.most_stored
            if key.rpartition("/")[2] in _METADATA:
                most = _MOST_METADATA
            elif isinstance(wanted, RangeByteRequest):
                start, stop = wanted.start, min(wanted.end, stop)
                is_index = (wanted.start, wanted.end) == (0, self._layout.index_bytes)
                most = self._layout.index_bytes if is_index else self._layout.most_in_range
            elif isinstance(wanted, OffsetByteRequest):
                start = wanted.offset
            elif isinstance(wanted, SuffixByteRequest):
                start = max(0, stop - wanted.suffix)
            if stop - start > most:
                raise FormatError(
                    f"its {key!r} has {stop - start} bytes for what needs {most} at most: it is damaged, or made to fill the "
                    "memory"
                )
            data = np.empty(max(0, stop - start), np.uint8)
            self._connector.read_into(key, start, data.data, etag=info.etag)
            return data

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            data = await asyncio.to_thread(self._read, key, byte_range)
            if data is None or prototype is None:
                return data
            return prototype.buffer.from_array_like(data)

        async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
            return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

        async def exists(self, key: str) -> bool:
            return await asyncio.to_thread(self._read, key, RangeByteRequest(0, 0)) is not None

        async def set(self, key: str, value: Any) -> None:
            raise PermissionError(f"{key}: the store is only read")

        async def delete(self, key: str) -> None:
            raise PermissionError(f"{key}: the store is only read")

        def list(self) -> AsyncIterator[str]:
            return _nothing()

        def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            return _nothing()

        def list_dir(self, prefix: str) -> AsyncIterator[str]:
            return _nothing()

    return ConnectorStore


async def _nothing() -> AsyncIterator[str]:
    """Nothing is listed: arrays are opened by their paths."""
    keys: tuple[str, ...] = ()
    for key in keys:
        yield key


ZARR = kind_of(ZarrArgs, ContainerFormat("Zarr", "Zarr store", _find, _open))
