"""Zarr stores, read by zarr-python through a connector: each chunk is an object, or, of a shard, a range of one.

What a store says of itself is checked before zarr sees it: numbers only, and codecs that unpack bytes. A chunk that is not
there holds the fill value, as Zarr defines it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError, MissingExtraError, ObjectNotFoundError
from loaderkit.sources.containers.formats import ContainerArgs, ContainerFormat, StoredArray, ZarrArgs
from loaderkit.sources.containers.source import kind_of

_MOST_METADATA, _MOST_BYTES = 64 << 20, 4 << 30
_ARRAYS = ("zarr.json", ".zarray")
_MARKS = (*_ARRAYS, ".zgroup")
_TYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_TYPES_OF_2 = re.compile(r"[<>|][biufc]\d{1,2}")
_CODECS = {"bytes", "endian", "transpose", "blosc", "gzip", "zstd", "crc32c", "sharding_indexed"}
_CODECS_OF_2 = {
    "blosc", "zlib", "gzip", "zstd", "lz4", "bz2", "lzma", "shuffle", "delta", "fixedscaleoffset", "quantize", "bitround",
    "packbits", "astype", "crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3",
}  # fmt: skip


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
        version = _checked(connector, info.key, path)
        arrays[field] = zarr.open_array(_store()(connector, info.key), path=path, mode="r", zarr_format=version)
    return arrays


def _checked(connector: Connector, store: str, path: str) -> Any:
    """The version of an array's format. Raises FormatError for one that is no array, or has other values or codecs."""
    for name, check, version in (("zarr.json", _check_3, 3), (".zarray", _check_2, 2)):
        data = _bytes_of(connector, _joined(store, path, name), _MOST_METADATA)
        if data is None:
            continue
        try:
            check(json.loads(data))
        except FormatError as error:  # which is a ValueError
            raise FormatError(f"its array {path or '/'!r} {error}") from None
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise FormatError(f"its array {path or '/'!r} has a damaged {name}: {error!r:.200}") from None
        return version
    missing = " nor ".join(_joined(path, name) for name in _ARRAYS)
    raise FormatError(f"it has no array {path or '/'!r} (neither {missing}): check `fields`")


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _check_3(described: Any) -> None:
    if described["node_type"] != "array":
        raise FormatError("is a group, no array")
    kind = described["data_type"]
    if not isinstance(kind, str) or not _TYPES.fullmatch(kind):
        raise FormatError(f"is of {kind!r:.100}, and only numbers are read")
    _check_codecs(described["codecs"])


def _check_codecs(codecs: Any) -> None:
    for codec in codecs:
        name = codec if isinstance(codec, str) else codec["name"]
        settings = {} if isinstance(codec, str) else codec.get("configuration", {})
        if name not in _CODECS and name.removeprefix("numcodecs.") not in _CODECS_OF_2:
            raise FormatError(
                f"is packed by the codec {name!r:.100}, which is not read: {', '.join(sorted(_CODECS))} are"
            )
        for inner in ("codecs", "index_codecs"):
            _check_codecs(settings.get(inner, ()))


def _check_2(described: Any) -> None:
    kind = described["dtype"]
    if not isinstance(kind, str) or not _TYPES_OF_2.fullmatch(kind):
        raise FormatError(f"is of {kind!r:.100}, and only numbers are read, no objects")
    for codec in (*(described.get("filters") or ()), described.get("compressor")):
        if codec is not None and codec["id"] not in _CODECS_OF_2:
            raise FormatError(
                f"is packed by {codec['id']!r:.100}, which is not read: {', '.join(sorted(_CODECS_OF_2))} are"
            )


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

        def __init__(self, connector: Connector, prefix: str) -> None:
            super().__init__(read_only=True)
            self._connector, self._prefix = connector, prefix

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
            start, stop = 0, info.size
            if isinstance(wanted, RangeByteRequest):
                start, stop = wanted.start, min(wanted.end, stop)
            elif isinstance(wanted, OffsetByteRequest):
                start = wanted.offset
            elif isinstance(wanted, SuffixByteRequest):
                start = max(0, stop - wanted.suffix)
            if stop - start > _MOST_BYTES:
                raise FormatError(f"its {key!r} has {info.size} bytes; at most 4 GiB are read of a chunk")
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
