"""Checksums of an object's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_BLOCK_BYTES = 256 * 2**10


class Checksums(NamedTuple):
    """xxh3_64 hashes, as hexadecimal digits, of an object's blocks of `block_bytes`; the last block may be shorter."""

    block_bytes: int
    num_bytes: int
    hashes: Sequence[str]

    def end_of(self, number: int) -> int:
        """The end of a block, in bytes."""
        return min((number + 1) * self.block_bytes, self.num_bytes)
