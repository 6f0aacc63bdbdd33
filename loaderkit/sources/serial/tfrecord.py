"""`kind: tfrecord`: records of TensorFlow, a tf.train.Example a sample.

files (listing) ──> the .idx beside each, or the length of every record ──> one range a sample ──> checksums ──> its features

A record is its length (8 bytes), the checksum of that, its data, and the checksum of them: CRC-32C, turned and shifted.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from loaderkit import native
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError
from loaderkit.samples.sample import Sample
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import SourceKind
from loaderkit.sources.fields import Include
from loaderkit.sources.serial.files import SerialArgs, SerialFiles, list_files, load_with
from loaderkit.sources.serial.offsets import Offsets
from loaderkit.sources.serial.records import check_record, find_records
from loaderkit.sources.typed_fields import FieldOrigin, Names

_ALWAYS_A_LIST = "[]"


class TfrecordArgs(SerialArgs):
    """The records of TFRecord files: tf.train.Example, or any bytes."""

    kind: Literal["tfrecord"] = "tfrecord"
    format: Literal["example", "bytes"] = Field(
        "example",
        description="example: a tf.train.Example, whose features become fields; bytes: a record is the field `data`",
    )
    include: Include | None = Field(
        None, description="which files of the folder `url`: globs and braces; default: *.tfrec*"
    )
    fields: Names | None = Field(
        None,
        description="field -> feature, as in {image: image/encoded, label: image/class/label}; with [] behind its name it is a "
        "list also where it has one value, as in {tokens: 'tokens[]'}, or none; or its type, as in {x: float32} or {boxes: "
        "'boxes[] float32'}; default: all features",
    )
    verify: Literal["full", "length"] = Field(
        "full", description="full: compare the checksum of every record's data; length: only that of its length"
    )

    @model_validator(mode="after")
    def _fits(self) -> TfrecordArgs:
        if self.format == "bytes" and self.fields is not None and [*self.fields.values()] != ["data"]:
            raise ValueError("of `format: bytes` `fields` can only rename `data`, as in {image: data}")
        return self

    @property
    def usual(self) -> str:
        return "*.tfrec*"


class _Picked(NamedTuple):
    """A field: the feature it is made of, and whether its value is always a list."""

    origin: FieldOrigin
    is_list: bool

    def of(self, features: dict[str, Any]) -> Any:
        """The field of a record; a list that the record lacks is empty. Raises KeyError, FormatError."""
        origin = self.origin
        found = features.get(origin.key) if self.is_list else features[origin.key]
        value = [] if found is None else _value(found, is_list=self.is_list)
        return value if origin.dtype is None else origin.typed(value)


class TfrecordSource(SerialFiles):
    """The records of all matching files of `connector`; a key ends with the number of the record, from 0."""

    def __init__(self, connector: Connector, args: TfrecordArgs, found_bad: BadShards | None = None) -> None:
        found_bad = found_bad or BadShards()
        infos, self.left_out = list_files(connector, args, lambda key, keys: key.endswith(".idx"), found_bad)
        self._is_full = args.verify == "full"
        self._bytes = None if args.format == "example" else next(iter(args.fields or ("data",)))
        self._picked = None if args.fields is None else [_picked(*pair) for pair in args.fields.items()]
        self._wanted = None if self._picked is None else frozenset(picked.origin.key for picked in self._picked)
        super().__init__(connector, infos, args.limit, found_bad)

    def load(self, info: ObjectInfo) -> Offsets:
        return load_with(self._connector, info, "tfrecord", find_records)

    def parse(self, index: int, data: memoryview) -> Sample:
        """The features of the record: bytes, a whole number or float32 where there is one value, a list of bytes or an array of
        int64 or float32 where there are several; where there is none, an empty list, which says no type."""
        record = check_record(data, is_full=self._is_full)
        if self._bytes is not None:
            return {self._bytes: bytes(record)}
        try:
            features = native.parse_example(record, self._wanted)
        except ValueError as error:
            raise FormatError(f"it is no tf.train.Example: {error} (other records: `format: bytes`)") from None
        if self._picked is None:
            return {name: _value(values, is_list=False) for name, values in features.items()}
        try:
            return {picked.origin.field: picked.of(features) for picked in self._picked}
        except KeyError as error:
            there = ", ".join(map(repr, native.parse_example(record, None))) or "none"
            feature = error.args[0]
            raise FormatError(
                f"it has no feature {feature!r}, only {there}; where it is a list that may be absent, write '{feature}[]' in "
                "`fields`"
            ) from None


def _picked(field: str, text: str) -> _Picked:
    origin = FieldOrigin.parse(field, text)
    return _Picked(origin._replace(key=origin.key.removesuffix(_ALWAYS_A_LIST)), origin.key.endswith(_ALWAYS_A_LIST))


def _value(values: Any, *, is_list: bool) -> Any:
    if type(values) is list:
        return values[0] if len(values) == 1 and not is_list else values
    kind, data = values
    if is_list or len(data) != (4 if kind == "f" else 8):
        return np.frombuffer(data, kind)
    return int.from_bytes(data, "little", signed=True) if kind == "q" else np.float32(struct.unpack("<f", data)[0])


TFRECORD = SourceKind(
    TfrecordArgs,
    lambda args, connector, found_bad: TfrecordSource(connector, args, found_bad),
    lambda args: args.root,
    has_shards=True,
)
