"""What the metadata of a Zarr array say, checked; and its codecs, which then unpack no more than a chunk has room for.

Metadata of version 3: zarr-specs, v3/core and v3/codecs/sharding-indexed; of version 2: v2/v2.0.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from loaderkit.errors import FormatError
from loaderkit.sources.containers.unpacking import UNPACK, Unpack

_MOST_BYTES, _MOST_CHUNKS = 4 << 30, 1 << 22
_TYPES = re.compile(r"bool|u?int(?:8|16|32|64)|float(?:16|32|64)|complex(?:64|128)")
_TYPES_OF_2 = re.compile(r"[<>|=]?[biufc](\d{1,2})")
_CODECS = {"bytes", "endian", "transpose", "blosc", "gzip", "zstd", "crc32c", "sharding_indexed"}
_FILTERS = {"delta", "fixedscaleoffset", "quantize", "bitround", "packbits", "astype"}
_CODECS_OF_2 = {*UNPACK, *_FILTERS, "shuffle", "crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3"}
_LZMA_RAW = 3
_MOST_HEADERS, _MOST_OVERHEAD = (
    64 << 10,
    256,
)  # bytes that packing adds to values: to a chunk, and to one inside a shard
_WIDEST = 16  # bytes of the widest number, complex128, which a filter may make of any other


@dataclass(frozen=True)
class ZarrLayout:
    """An array's version, and the most bytes of its chunks: of an object, unpacked, and of a range of one.

    Of shards `inner` has those of the chunks inside, and `index_bytes` is the length of the index, if it comes first.
    """

    version: Any
    most_stored: int
    most_unpacked: int
    most_in_range: int
    index_bytes: int = 0
    inner: ZarrLayout | None = None


def read_3(described: Any) -> ZarrLayout:
    """Of version 3. Raises FormatError for what is not read, KeyError and the like for what is damaged."""
    if described["node_type"] != "array":
        raise FormatError("is a group, no array")
    kind = described["data_type"]
    if not isinstance(kind, str) or not _TYPES.fullmatch(kind):
        raise FormatError(f"is of {kind!r:.100}, and only numbers are read")
    grid = described["chunk_grid"]
    if grid["name"] != "regular":
        raise FormatError(f"has the chunk grid {grid['name']!r:.100}, and only regular ones are read")
    return _layout_3(described["codecs"], grid["configuration"]["chunk_shape"], np.dtype(kind).itemsize)


def _layout_3(codecs: Any, shape: Any, item_bytes: int) -> ZarrLayout:
    """Of chunks of a shape, packed by codecs."""
    named = [
        (codec, {}) if isinstance(codec, str) else (codec["name"], codec.get("configuration", {})) for codec in codecs
    ]
    shard: Any = None
    has_filters = False
    for name, settings in named:
        plain = name.removeprefix("numcodecs.")
        if name not in _CODECS and (plain == name or plain not in _CODECS_OF_2):
            raise FormatError(
                f"is packed by the codec {name!r:.100}, which is not read: {', '.join(sorted(_CODECS))} are"
            )
        _check_settings(plain, settings)
        has_filters = has_filters or plain in _FILTERS
        shard = settings if name == "sharding_indexed" else shard
    if shard is None:
        most = _room(shape, item_bytes, has_filters)
        _check_chunk(shape, most)
        return ZarrLayout(3, _packed(most), most, _packed(most))
    _layout_3(shard.get("index_codecs", ()), (1,), 16)
    inner = _layout_3(shard["codecs"], shard["chunk_shape"], item_bytes)
    return _shard(shape, _room(shape, item_bytes, has_filters), inner, shard, is_alone=len(named) == 1)


def _shard(shape: Any, most: int, inner: ZarrLayout, settings: Any, *, is_alone: bool) -> ZarrLayout:
    num = prod(shape) // max(1, prod(settings["chunk_shape"]))
    is_first = settings.get("index_location") == "start"
    if num > (_MOST_CHUNKS >> 8 if is_first else _MOST_CHUNKS):
        raise FormatError(f"has shards of {num} chunks, whose index is not read: at most {_MOST_CHUNKS} may be in one")
    if not is_alone:  # only a shard that is not packed itself is read in parts
        _check_chunk(shape, most)
    index_bytes = 16 * num + 4
    stored = _packed(most) + _MOST_OVERHEAD * num
    return ZarrLayout(3, stored, most, inner.most_stored, index_bytes if is_first else 0, inner)


def read_2(described: Any) -> ZarrLayout:
    """Of version 2. Raises FormatError for what is not read, KeyError and the like for what is damaged."""
    kind = described["dtype"]
    matched = _TYPES_OF_2.fullmatch(kind) if isinstance(kind, str) else None
    if not matched:
        raise FormatError(f"is of {kind!r:.100}, and only numbers are read, no objects")
    filters = described.get("filters") or ()
    for codec in (*filters, described.get("compressor")):
        if codec is not None and codec["id"] not in _CODECS_OF_2:
            raise FormatError(
                f"is packed by {codec['id']!r:.100}, which is not read: {', '.join(sorted(_CODECS_OF_2))} are"
            )
        if codec is not None:
            _check_settings(codec["id"], codec)
    most = _room(described["chunks"], int(matched[1]), any(codec["id"] in _FILTERS for codec in filters))
    _check_chunk(described["chunks"], most)
    return ZarrLayout(2, _packed(most), most, _packed(most))


def _check_settings(name: str, settings: Any) -> None:
    """Types that are numbers, of codecs that make values of another type; and no raw lzma, which has no bound of its own."""
    for key in ("dtype", "astype", "encode_dtype", "decode_dtype"):
        kind = settings.get(key) if name in _FILTERS else None
        if kind is not None and not _TYPES_OF_2.fullmatch(np.dtype(kind).str):
            raise FormatError(f"is packed by {name!r}, whose {key} is {kind!r:.100}, and only numbers are read")
    if name == "lzma" and settings.get("format", 1) == _LZMA_RAW:
        raise FormatError("is packed by lzma without a header, which is not read: xz is")


def _room(shape: Any, item_bytes: int, has_filters: bool) -> int:
    """The most bytes that values of a shape have on their way through the codecs."""
    if not all(type(length) is int and length > 0 for length in shape):
        raise FormatError(f"has chunks of shape {shape!r:.100}")
    return int(prod(shape)) * (max(item_bytes, _WIDEST) if has_filters else item_bytes)


def _packed(num_bytes: int) -> int:
    """The most bytes that values take which cannot be packed, codec around codec."""
    return num_bytes + num_bytes // 16 + _MOST_HEADERS


def _check_chunk(shape: Any, num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise FormatError(f"has chunks of shape {list(shape)!r:.100}, {num_bytes} bytes; at most 4 GiB are read")


def bounded(metadata: Any, layout: ZarrLayout) -> Any:
    """The metadata of zarr's own array, with codecs that unpack no more than there is room for."""
    if layout.version == 3:
        return replace(metadata, codecs=_bounded_3(metadata.codecs, layout))
    of_2 = partial(_bounded_2, most=_packed(layout.most_unpacked))
    compressor, filters = metadata.compressor, metadata.filters
    return replace(
        metadata,
        compressor=None if compressor is None else of_2(compressor),
        filters=[of_2(codec) for codec in filters] if filters else None,
    )


def _bounded_2(codec: Any, most: int) -> Any:
    unpack = UNPACK.get(codec.codec_id)
    return codec if unpack is None else _kinds()[0](codec, unpack, most)


def _bounded_3(codecs: Any, layout: ZarrLayout) -> tuple[Any, ...]:
    return tuple(_bounded_codec(codec, codec.to_dict()["name"].removeprefix("numcodecs."), layout) for codec in codecs)


def _bounded_codec(codec: Any, name: str, layout: ZarrLayout) -> Any:
    if name in UNPACK:
        return _kinds()[1](codec, UNPACK[name], _packed(layout.most_unpacked))
    if layout.inner is not None and name == "sharding_indexed":
        return replace(codec, codecs=_bounded_3(codec.codecs, layout.inner))
    return codec


@cache
def _kinds() -> tuple[Any, Any]:
    """The classes of codecs for versions 2 and 3, whose packages are imported where they are used; both only unpack."""
    from numcodecs.abc import Codec
    from zarr.abc.codec import BytesBytesCodec

    class BoundedCodec2(Codec):  # type: ignore[misc]
        """A codec of version 2."""

        codec_id = "bounded"

        def __init__(self, inner: Any, unpack: Unpack, most: int) -> None:
            self._inner, self._unpack, self._most = inner, unpack, most

        def encode(self, buf: Any) -> Any:
            return self._inner.encode(buf)

        def decode(self, buf: Any, out: Any = None) -> Any:
            return self._unpack(memoryview(buf).cast("B"), self._most)

        def get_config(self) -> Any:
            return self._inner.get_config()

    @dataclass(frozen=True)
    class BoundedCodec3(BytesBytesCodec):  # type: ignore[misc]
        """A codec of version 3."""

        inner: Any
        unpack: Unpack
        most: int
        is_fixed_size = False

        async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
            packed = memoryview(chunk_data.as_numpy_array()).cast("B")
            unpacked = await asyncio.to_thread(self.unpack, packed, self.most)
            return chunk_spec.prototype.buffer.from_bytes(unpacked)

        def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
            return int(self.inner.compute_encoded_size(input_byte_length, chunk_spec))

        def to_dict(self) -> Any:
            return self.inner.to_dict()

    return BoundedCodec2, BoundedCodec3
