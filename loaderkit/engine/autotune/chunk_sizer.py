"""Measures how long a sample takes, and so decides how many samples make a chunk."""

from __future__ import annotations

from typing import Any

# Interleaved rounds on pictures of 0.75 ms, two threads, in shares of a bare pool: chunks of 3.5 ms 0.963, 5 ms 0.975, 7 ms
# 0.968, 10 ms 0.967, 20 ms 0.956: what a chunk's pictures take stays in a core's own cache from stage to stage. Shorter ones
# exchange the GIL more often, which costs more the more threads there are. Since all decoding of a chunk is one call, what a
# chunk costs besides its pictures counts for more: 9 ms 1.007 of 6 ms (12 pairs of processes), 15 ms 1.00.
CHUNK_TARGET_S = 0.009
# Slow samples come in chunks of a few, as what a chunk costs besides them, 0.3 to 0.6 ms by user code that leaves the caches
# cold, was 4 to 8 % of the time where each had a chunk of its own (8 ms by Pillow, two processes; now 3 %, as DataLoader).
_FEW = 4
_SHARED_S = 1e-3  # a batch that takes longer is shared by workers that would find no other one open
_FIRST_TARGET_S = 0.02  # the first sample is made cold, and takes longer than those to come
_FIRST_CHUNK_SIZE = 8
# The latest chunk's part in how long a sample takes; the mean of all at the beginning.
_SMOOTHING = 0.1
# One batch in _TRIAL_EVERY has chunks of twice the length, to see what a chunk costs besides its samples (a query, a slow
# disk's answer); not where a chunk takes longer than _MOST_TRIED_S already.
_TRIAL_EVERY = 64
_MOST_TRIED_S = 0.02
_MOST_BYTES_PER_S = 4e9  # that one thread makes
_UNLIKE = 1.5  # times as long: of chunks that tell what they cost besides
_TRIAL_SMOOTHING = 0.3
_LEAST_SHARE = 0.1  # of a chunk's time that is taken for its samples': what was true may be so no longer


class ChunkSizer:
    """How long one worker takes for a sample, as far as is known; written under the engine's lock, if it has one.

    A chunk takes `fixed + length * each`. The part for its samples is to take `CHUNK_TARGET_S`, whatever the fixed part
    is: if that counted as the samples' time, chunks would be short, and the fixed part would be paid more often.
    """

    __slots__ = ("_fixed_share", "_length", "_num_landed", "_num_opened", "_took_s", "sample_s")

    def __init__(self) -> None:
        self.sample_s: float | None = None
        self._num_landed = 0  # chunks
        self._num_opened = 0  # batches, since one chunk has landed
        self._took_s = self._length = 0.0  # of a chunk in the mean
        self._fixed_share = 0.0  # of that, what does not depend on its length

    def first(self, took_s: float, sample_bytes: float) -> None:
        """The first sample took so long, although perhaps not all of its bytes were read. Large samples then begin with small
        chunks, which need little memory."""
        self.sample_s = max(took_s, sample_bytes / _MOST_BYTES_PER_S)

    def landed(self, took_s: float, length: int) -> None:
        """A chunk of `length` samples is through all stages."""
        if self._num_landed and not 1 / _UNLIKE < length / self._length < _UNLIKE:
            fixed_s = (self._took_s * length - took_s * self._length) / (length - self._length)
            share = min(max(0.0, fixed_s / self._took_s), 1.0) if self._took_s > 0 else 0.0
            self._fixed_share += _TRIAL_SMOOTHING * (share - self._fixed_share)
        self._num_landed += 1
        weight = max(_SMOOTHING, 1 / self._num_landed)  # the sample that was made alone no longer counts
        sample_s = took_s / length
        self.sample_s = sample_s if self.sample_s is None else self.sample_s + weight * (sample_s - self.sample_s)
        self._took_s += weight * (took_s - self._took_s)
        self._length += weight * (length - self._length)

    def chunk_size(self, batch_size: int, num_workers: int, num_open: int) -> int:
        """How many samples a chunk of a batch should have, where `num_open` batches may be open at a time."""
        if self.sample_s is None:
            return max(1, min(_FIRST_CHUNK_SIZE, -(-batch_size // num_workers)))
        own_s, target_s = self.sample_s, CHUNK_TARGET_S if self._num_landed else _FIRST_TARGET_S
        own_s *= max(_LEAST_SHARE, 1 - self._fixed_share)
        by_time = target_s / max(own_s, 1e-9)
        wanted = int(max(by_time, min(_FEW, _FEW * by_time)))
        if wanted >= batch_size:
            num_sharing = max(1, -(-num_workers // num_open)) if own_s * batch_size > _SHARED_S else 1
            return -(-batch_size // num_sharing)
        wanted = max(1, min(wanted, -(-batch_size // num_workers)))
        return -(-batch_size // -(-batch_size // wanted))  # all alike: a short one is left over otherwise

    def next_chunk_size(self, batch_size: int, num_workers: int, num_open: int) -> int:
        """The same for the batch that is opened now, whose size may be a trial."""
        size = self.chunk_size(batch_size, num_workers, num_open)
        if not self._num_landed or self._took_s >= _MOST_TRIED_S:
            return size
        self._num_opened += 1
        is_trial = self._num_opened % _TRIAL_EVERY == 1
        return min(2 * size, max(size, -(-batch_size // num_workers))) if is_trial else size


def trim(scratch: dict[str, Any], chunk_size: int) -> None:
    """Free the part of a scratch, in entries a sample, that only longer chunks needed; a chunk of `chunk_size` has used
    it."""
    for pieces in scratch.values():
        if isinstance(pieces, list):
            del pieces[2 * chunk_size :]  # the next chunk may be one on trial
