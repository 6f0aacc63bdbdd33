"""Checksums of the blocks of an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_BLOCK_BYTES = 256 * 2**10  # with one checksum


class Checksums(NamedTuple):
    """Hashes of an object's blocks of `block_bytes`, the last one shorter: xxh3 of 64 bits as hexadecimal digits."""

    block_bytes: int
    num_bytes: int
    hashes: Sequence[str]

    def end_of(self, number: int) -> int:
        """Where a block ends."""
        return min((number + 1) * self.block_bytes, self.num_bytes)
