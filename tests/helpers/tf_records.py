"""TFRecord files and tf.train.Example, written as their formats say, from nothing of loaderkit's."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]


def crc32c(data: bytes) -> int:
    """Bit by bit, as the polynomial is defined."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """The checksum as it stands in a file."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    """One record: length, its checksum, data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def records_in(data: bytes) -> list[bytes]:
    """What is in the records of a file, in a reader of its own."""
    found = []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert data[8:12] == masked(data[:8])
        found.append(data[12 : 12 + length])
        assert data[12 + length : 16 + length] == masked(found[-1])
        data = data[16 + length :]
    return found


@cache
def protobuf() -> Any:
    """Google's own class of tf.train.Example, made from its definition."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    kinds = {"BytesList": 12, "FloatList": 2, "Int64List": 3}
    for name, kind in kinds.items():
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (field, name) in enumerate(zip(("bytes_list", "float_list", "int64_list"), kinds, strict=True), 1):
        feature.field.add(name=field, number=number, label=1, type=11, type_name=f".tf.{name}", oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".tf.Feature")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".tf.Features.FeatureEntry")
    file.message_type.add(name="Example").field.add(
        name="features", number=1, label=1, type=11, type_name=".tf.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def example(features: Mapping[str, Any]) -> bytes:
    """A serialised Example of lists of bytes, float or int, by Google's protobuf."""
    message = protobuf()()
    for name, values in features.items():
        feature = message.features.feature[name]
        kind = "bytes_list" if type(values[0]) is bytes else "float_list" if type(values[0]) is float else "int64_list"
        getattr(feature, kind).value.extend(values)
    data: bytes = message.SerializeToString(deterministic=True)
    return data
