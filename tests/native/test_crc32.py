"""The CRC-32 in C, against zlib's; and the hashes of blocks with it, against xxhash's."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from loaderkit import native
from loaderkit._internal.hashing import address_of_hash


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


@pytest.mark.skipif(native.hash_blocks is None or address_of_hash() is None, reason="needs the C module and XXH3 in it")
@given(st.binary(max_size=900), st.integers(1, 300))
def test_hashes_of_blocks(data: bytes, block: int) -> None:
    hashes, crc = native.hash_blocks(data, block, address_of_hash())
    assert crc == zlib.crc32(data)
    assert native.hash_blocks(data, block, address_of_hash(), False) == (hashes, 0)
    wanted = [xxhash.xxh3_64_intdigest(data[lo : lo + block]) for lo in range(0, len(data), block)]
    assert np.frombuffer(hashes, np.uint64).tolist() == wanted


@pytest.mark.skipif(native.hash_blocks is None, reason="needs the C module")
def test_blocks_that_cannot_be_hashed() -> None:
    for block, address in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one byte"):
            native.hash_blocks(b"a", block, address)
