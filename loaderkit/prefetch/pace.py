"""How long a sample takes, and so how many of them make a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Interleaved rounds on pictures of 0.75 ms, two threads, in shares of a bare pool: chunks of 3.5 ms 0.963, 5 ms 0.975, 7 ms
# 0.968, 10 ms 0.967, 20 ms 0.956: what a chunk's pictures take stays in a core's own cache from stage to stage. Shorter ones
# exchange the GIL more often, which costs more the more threads there are.
_CHUNK_TARGET_S = 0.006
_FIRST_CHUNK_SIZE = 8
# The latest chunk's part in how long a sample takes; the mean of all at the beginning.
_SMOOTHING = 0.1


class Pace:
    """How long one worker takes for a sample, as far as is known; whoever writes it holds the lock there is, if any."""

    __slots__ = ("_num_landed", "sample_s")

    def __init__(self) -> None:
        self.sample_s: float | None = None
        self._num_landed = 0  # chunks

    def landed(self, sample_s: float) -> None:
        """A chunk is through all stages: what each of its samples took."""
        self._num_landed += 1
        weight = max(_SMOOTHING, 1 / self._num_landed)  # what one sample took that was made alone counts no more
        self.sample_s = sample_s if self.sample_s is None else (1 - weight) * self.sample_s + weight * sample_s

    def chunk_size(self, batch_size: int, num_workers: int) -> int:
        """How many samples a chunk of a batch should have."""
        if self.sample_s is None:
            return max(1, min(_FIRST_CHUNK_SIZE, -(-batch_size // num_workers)))
        wanted = int(_CHUNK_TARGET_S / max(self.sample_s, 1e-9))
        if wanted >= batch_size:
            return batch_size
        wanted = max(1, min(wanted, -(-batch_size // num_workers)))
        return -(-batch_size // -(-batch_size // wanted))  # all alike: a short one is left over otherwise


def trim(scratch: dict[str, Any], chunk_size: Callable[[], int]) -> None:
    """Free what longer chunks needed of a scratch, a sample, that is for chunks of this size now."""
    if scratch:
        num_places = chunk_size()
        for pieces in scratch.values():
            if isinstance(pieces, list):
                del pieces[num_places:]
