"""Malformed safetensors files are refused by name, and nothing is written to."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from malformed import refused

pytestmark = pytest.mark.filterwarnings("ignore")


def with_header(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


class TestSafetensors:
    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (struct.pack("<Q", 2**40) + b"{", "claims 1099511627776 bytes"),
            (struct.pack("<Q", 90_000_000) + b"{}", "its header ends at byte 90000008"),
            (with_header(b"{]"), "no JSON"),
            (with_header(b"{" + b'"a":[' * 100_000), "no JSON"),
            (with_header({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "overlap"),
            (with_header({"a": entry(offsets=(8, 16))}, b"\0" * 16), "does not begin"),
            (with_header({"a": entry(), "b": entry(offsets=(16, 24))}, b"\0" * 24), "hole"),
            (with_header({"a": entry(shape=(3,))}), "takes 12 bytes"),
            (with_header({"a": entry(shape=(-2,))}), "not lists of whole numbers"),
            (with_header({"a": entry(shape=(2**40, 2**40), offsets=(0, 2**62))}), "takes"),
            (with_header({"a": entry(dtype="F33")}), "F33"),
            (with_header({"a": {"dtype": "F32"}}), "no dtype, shape"),
            (with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}'), "'a' twice"),
            (with_header({"a": entry()}, b"\0" * 7), "'a' ends at byte"),
            (with_header({"a": entry()}, b"\0" * 9), "1 bytes after"),
            (b"\1\0\0", "truncated"),
            (with_header({"a": entry(shape=[1] * 65)}), "65 dimensions"),
            (with_header({"a": entry(shape=(0, 2**62, 4), offsets=(0, 0))}, b""), "takes"),
            (with_header(("{" + ",".join(f'"{n % 200_000}":1' for n in range(200_001)) + "}").encode()), "'0' twice"),
        ],
    )
    def test_refuses(self, data: bytes, match: str) -> None:
        refused(data, match)
