"""`kind: mds`: MosaicML's shards, as mosaicml-streaming writes them.

index.json ──> shards ──their headers, once──> where samples begin ──> one range a sample ──> its columns

A shard is the number of its samples, where each begins and the last ends (uint32 all), JSON that says what the index says, and
the samples. A sample is the sizes of its columns whose size differs, uint32, and the columns in the order of the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, FormatError, ObjectNotFoundError, SourceError
from loaderkit.samples.sample import Sample
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import SourceKind
from loaderkit.sources.serial.files import SerialFiles, load_with
from loaderkit.sources.serial.mds_encodings import Encoding, encoding_of
from loaderkit.sources.serial.offsets import Int64s, Offsets
from loaderkit.sources.typed_fields import FieldOrigin, Names

_MOST_INDEX = 1 << 30  # bytes: of a million shards
_NO_BLANKS = np.zeros(0, np.int64)


def _checked_split(value: str | None) -> str | None:
    if value is not None and ("/" in value or value.startswith(".")):
        raise ValueError(f"the name of a folder, not {value!r}")
    return value


class MdsArgs(StoreArgs):
    """The samples of MDS shards, by the index.json beside them."""

    kind: Literal["mds"] = "mds"
    url: str = Field(min_length=1, description="the folder with index.json, or with folders of splits that have one")
    split: Annotated[str | None, AfterValidator(_checked_split)] = Field(
        None, min_length=1, description="the folder of the split, as train"
    )
    fields: Names | None = Field(
        None,
        description="field -> column, as in {image: x, label: y}; or its type, as in {y: int64} or {label: y int64}; default: "
        "all columns",
    )

    @property
    def root(self) -> str:
        """The connector's root."""
        return self.url if self.split is None else f"{self.url.rstrip('/')}/{self.split}"


class _MdsShard(NamedTuple):
    key: str
    size: int
    num: int


class MdsSource(SerialFiles):
    """The samples of all shards, in the order of the index; a key ends with the number of the sample in its shard."""

    def __init__(self, connector: Connector, args: MdsArgs, found_bad: BadShards | None = None) -> None:
        found_bad = found_bad or BadShards()
        name = connector.describe("index.json")
        shards, encodings = _parsed(_load_index(connector, name), name)
        self._shards = {shard.key: shard for shard in shards if shard.num}
        self._encodings = {column: _encoding(column, text, name) for column, text in encodings.items()}
        self.has_untyped_arrays = "json" in encodings.values()
        self.is_typed = not self.has_untyped_arrays
        self._picked = None if args.fields is None else [FieldOrigin.parse(*pair) for pair in args.fields.items()]
        for origin in self._picked or ():
            if not {origin.key, origin.key.partition(".")[0]} & {*encodings}:
                raise ConfigError(f"source.fields: {name} has no column {origin.key!r}, only {', '.join(encodings)}")
        there = {info.key: info for info in connector.list("")}
        for key in [key for key in self._shards if key not in there]:
            where = connector.describe(key)
            found_bad.leave_out(key, where, ObjectNotFoundError(f"there is no {where}, which {name} names"))
        infos = [there[key] for key in self._shards if key in there]
        if not infos:
            found_bad.refuse_empty()
            raise SourceError(f"{name} names no shard with samples")
        super().__init__(connector, infos, args.limit, found_bad)

    def load(self, info: ObjectInfo) -> Offsets:
        shard, name = self._shards[info.key], self._connector.describe(info.key)
        if info.size != shard.size:
            raise FormatError(
                f"{name} has {info.size} bytes, and index.json says {shard.size}: it is truncated, or another"
            )
        offsets = load_with(self._connector, info, "mds", _find_samples)
        if len(offsets.starts) - 1 != shard.num:
            raise FormatError(
                f"{name} has {len(offsets.starts) - 1} samples, and index.json says {shard.num}: it is damaged"
            )
        return offsets

    def parse(self, index: int, data: memoryview) -> Sample:
        """The columns of the sample: numbers, texts, arrays, the bytes of pictures."""
        at = 4 * sum(encoding.size is None for encoding in self._encodings.values())
        sizes = iter(np.frombuffer(data[:at], "<u4").tolist() if at <= len(data) else [])
        sample = Sample()
        for name, (decode, size) in self._encodings.items():
            end = at + (next(sizes, len(data) + 1) if size is None else size)
            if end > len(data):
                raise FormatError(f"its column {name!r} ends behind it: it is damaged")
            try:
                sample[name] = decode(data[at:end])
            except (FormatError, ValueError, KeyError, IndexError, RecursionError) as error:
                raise FormatError(f"its column {name!r} cannot be decoded: {error}") from None
            at = end
        if at != len(data):
            raise FormatError(f"its columns have {at} bytes, and it {len(data)}: it is damaged")
        return sample if self._picked is None else {origin.field: origin.of(sample) for origin in self._picked}


def _find_samples(connector: Connector, info: ObjectInfo) -> Iterator[tuple[Int64s, Int64s]]:
    """Where the samples of a shard begin, and its end, from its header. Raises FormatError."""
    name = connector.describe(info.key)
    count = bytearray(4)
    if info.size >= len(count):
        connector.read_into(info.key, 0, memoryview(count), etag=info.etag)
    num = int.from_bytes(count, "little")
    first = 4 * (num + 2)
    if info.size < first:
        raise FormatError(f"{name} has {info.size} bytes, too few for the header of {num} samples: it is damaged")
    numbers = np.empty(num + 1, "<u4")
    connector.read_into(info.key, 4, numbers.data.cast("B"), etag=info.etag)
    starts = numbers.astype(np.int64)
    if starts[0] < first or starts[-1] != info.size or (starts[1:] <= starts[:-1]).any():
        raise FormatError(f"{name}: its samples do not lie one behind another up to its end: it is damaged")
    yield starts, _NO_BLANKS


def _load_index(connector: Connector, name: str) -> list[dict[str, Any]]:
    try:
        info = connector.stat("index.json")
    except ObjectNotFoundError as error:
        raise SourceError(
            f"there is no {name}, which MDS has: give the folder that it lies in, or its `split`"
        ) from error
    if info.size > _MOST_INDEX:
        raise FormatError(f"{name} has {info.size} bytes, and an index at most {_MOST_INDEX}")
    data = bytearray(info.size)
    connector.read_into("index.json", 0, memoryview(data), etag=info.etag)
    try:
        index = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is no JSON: {error}") from None
    shards = index.get("shards") if isinstance(index, dict) else None
    if not isinstance(shards, list) or not shards or not all(isinstance(shard, dict) for shard in shards):
        raise FormatError(f"{name} has no list of `shards`: it is no index of MDS")
    return shards


def _parsed(shards: list[dict[str, Any]], name: str) -> tuple[list[_MdsShard], dict[str, Any]]:
    """The shards, and the encodings by column, which are the same in all of them. Raises FormatError, SourceError."""
    found: dict[str, _MdsShard] = {}
    layouts = [_layout(shard) for shard in shards]
    for shard, layout in zip(shards, layouts, strict=True):
        raw = shard.get("raw_data")
        key, size = (raw.get("basename"), raw.get("bytes")) if isinstance(raw, dict) else (None, None)
        if (shard.get("version"), shard.get("format")) != (2, "mds"):
            raise FormatError(f"{name}: the shard {key!r} is no MDS of version 2, the only one that is read")
        if shard.get("zip_data") is not None:
            raise SourceError(
                f"{name}: the shard {key!r} is compressed, so that no sample can be read by itself: write without `compression`"
            )
        if not (type(key) is str and type(size) is type(shard.get("samples")) is int) or layout is None or key in found:
            raise FormatError(f"{name} is damaged: what it says of the shard {key!r} does not fit")
        if layout != layouts[0]:
            raise SourceError(f"{name}: the shard {key!r} has other columns than the first one: mix two sources")
        found[key] = _MdsShard(key, size, shard["samples"])
    return [*found.values()], dict(layouts[0] or ())


def _layout(shard: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """(column, encoding) of all columns; None if they do not fit."""
    names, encodings = shard.get("column_names"), shard.get("column_encodings")
    if not isinstance(names, list) or not isinstance(encodings, list) or len(names) != len(encodings):
        return None
    is_well = all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    return [*zip(names, encodings, strict=True)] if is_well else None


def _encoding(column: Any, text: Any, name: str) -> Encoding:
    encoding = encoding_of(text) if isinstance(text, str) else None
    if encoding is None:
        why = "runs code when it is read" if text == "pkl" else "is not known"
        raise SourceError(f"{name}: the column {column!r} has the encoding {text!r}, which {why}: write it as another")
    return encoding


MDS = SourceKind(
    MdsArgs,
    lambda args, connector, found_bad: MdsSource(connector, args, found_bad),
    lambda args: args.root,
    has_shards=True,
)
