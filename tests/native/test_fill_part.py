"""Parts of files from pieces, in C and in Python: the bytes, and checksums and hashes against zlib's and xxhash's."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest
import xxhash

from loaderkit import native
from loaderkit._internal.hashing import address_of_hash

WAYS = [native._fill_in_python, native.fill_part]
ADDRESS = address_of_hash()
compiled: Any = native._kernels


def made_of(pieces: list[tuple[int, bytes | None]], size: int, rng: random.Random) -> tuple[Any, list[Any], Any]:
    """(rows of pieces, each with where it begins and its bytes or None for zeros, what they refer to, the memory they make)."""
    memory = np.frombuffer(bytearray(rng.randbytes(size)), np.uint8).copy()
    wanted, held, rows = memory.copy(), [], []
    for begin, data in pieces:
        crc = rng.choice([native.NO_CRC, zlib.crc32(b"before")])
        if data is None:
            wanted[begin : begin + 5] = 0
            rows.append([begin, begin + 5, native.ZEROS, crc])
            continue
        held.append(np.frombuffer(b"?" + data, np.uint8)[1:])
        wanted[begin : begin + len(data)] = held[-1]
        rows.append([begin, begin + len(data), held[-1].ctypes.data, crc])
    return np.array(rows, np.int64).reshape(-1, 4), [memory, held], wanted


@pytest.mark.parametrize("fill_part", WAYS)
@pytest.mark.parametrize("block", [1, 7, 64, 1000, 70_000, 2**18])
def test_random_pieces(fill_part: Any, block: int, rng: random.Random) -> None:
    for _ in range(10):
        size = rng.randrange(1, 40 * min(block, 10_000))
        cuts = sorted(rng.randrange(size + 1) for _ in range(2 * rng.randrange(12)))
        pieces: list[tuple[int, bytes | None]] = []
        for lo, hi in zip(cuts[::2], cuts[1::2], strict=True):
            pieces.append((lo, None if hi - lo == 5 else rng.randbytes(hi - lo)))
        rows, (memory, _), wanted = made_of(pieces, size, rng)
        before = rows.copy()
        num_blocks = -(-size // block)
        is_hashed = np.array([rng.random() < 0.7 for _ in range(num_blocks)])
        hashes = np.full(num_blocks, 7, np.uint64)
        assert 0 <= fill_part(memory, rows, block, hashes, is_hashed) < 60
        assert memory.tobytes() == wanted.tobytes()
        for number, is_one in enumerate(is_hashed):
            data = wanted[number * block : (number + 1) * block].tobytes()
            assert hashes[number] == (xxhash.xxh3_64_intdigest(data) if is_one else 7)
        for (begin, end, _, crc), (*_, after) in zip(before.tolist(), rows.tolist(), strict=True):
            assert after == (crc if crc < 0 else zlib.crc32(wanted[begin:end].tobytes(), crc))


@pytest.mark.parametrize("fill_part", WAYS)
@pytest.mark.parametrize("size", [0, 3, 2**20 + 1])  # the larger one without the GIL
def test_what_is_there_already(fill_part: Any, size: int, rng: random.Random) -> None:
    data = rng.randbytes(size)
    memory, hashes = np.frombuffer(bytearray(data), np.uint8), np.zeros(-(-size // 2**18), np.uint64)
    rows = np.array([[0, size, memory.ctypes.data, 0]], np.int64)
    fill_part(memory, rows, 2**18, hashes, np.ones(len(hashes), np.bool_))
    assert memory.tobytes() == data
    assert rows[0, 3] == zlib.crc32(data)
    assert hashes.tolist() == [xxhash.xxh3_64_intdigest(data[lo : lo + 2**18]) for lo in range(0, size, 2**18)]


@pytest.mark.skipif(ADDRESS is None, reason="needs the function XXH3 of xxhash")
def test_arguments_that_do_not_fit() -> None:
    if compiled.fill_part(bytearray(), bytearray(), 1, bytearray(), b"", ADDRESS) is None:
        pytest.skip("needs a CPU with carry-less multiplication")
    memory, hashes = np.zeros(8, np.uint8), np.zeros(2, np.uint64)

    def fill(*rows: list[int], block: int = 4, address: Any = ADDRESS, blocks: int = 2) -> None:
        rows_of = np.array(rows, np.int64).reshape(-1, 4)
        compiled.fill_part(memory, rows_of, block, hashes, np.ones(blocks, np.bool_), address)

    fill([0, 3, 0, -1], [3, 8, 0, -1])
    for rows in ([[0, 9, 0, -1]], [[-1, 2, 0, -1]], [[2, 1, 0, -1]], [[0, 5, 0, -1], [4, 8, 0, -1]]):
        with pytest.raises(ValueError, match="in order"):
            fill(*rows)
    for wrong in ({"block": 0}, {"block": 8}, {"address": 0}, {"blocks": 1}):
        with pytest.raises(ValueError, match="at least one byte"):
            fill(**wrong)
