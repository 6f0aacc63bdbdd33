"""The share of one of several loading processes.

Every process is told the whole: the position to continue from, and the totals of all resources. It computes its share,
so the processes need no communication.
"""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """Process `number` of `of`; it makes the batches number, number + of, ..., counted from the common position."""

    number: int = 0
    of: int = 1

    def num_batches(self, total: int) -> int:
        """Its share of the batches in flight; at least one."""
        return max(1, total // self.of + (self.number < total % self.of))

    def num_bytes(self, total: int) -> int:
        """Its share of the memory."""
        return total // self.of

    def num_workers(self, total: int) -> int:
        """Its share of the workers, rounded up: an equal number in each process, so that none is slower."""
        return -(-total // self.of)


WHOLE = Shard()
"""The share of a single process."""
