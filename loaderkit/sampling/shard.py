"""What one of several processes that load is to do.

Every process is told the whole: where to go on, and how much of everything there is for all of them. It takes its share by
arithmetic, so nothing has to be agreed upon while they work.
"""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """Process `number` of `of`. It makes the batches number, number + of, ..., counted from where all were told to continue."""

    number: int = 0
    of: int = 1

    def num_batches(self, total: int) -> int:
        """How many of the batches that may be open at once; at least one."""
        return max(1, total // self.of + (self.number < total % self.of))

    def num_bytes(self, total: int) -> int:
        """How much of the memory."""
        return total // self.of

    def num_workers(self, total: int) -> int:
        """How many of the workers: as many as all others, or batches would wait for the process that has fewer."""
        return -(-total // self.of)


WHOLE = Shard()
"""That of one process, or of none."""
