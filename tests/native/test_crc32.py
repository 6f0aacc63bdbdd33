"""The CRC-32 in C, against zlib's."""

from __future__ import annotations

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from loaderkit import native


@given(st.binary(max_size=700), st.integers(0, 20))
def test_equals_zlib(data: bytes, offset: int) -> None:
    for part in (data, memoryview(data)[offset:], bytearray(data)):
        assert native.crc32(part) == zlib.crc32(part)


def test_equals_zlib_on_many_bytes(rng: random.Random) -> None:
    data = rng.randbytes(2**20 + 77)
    for _ in range(20):
        lo = rng.randrange(len(data))
        hi = rng.randrange(lo, len(data) + 1)
        assert native.crc32(memoryview(data)[lo:hi]) == zlib.crc32(data[lo:hi])
