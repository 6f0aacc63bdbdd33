"""Counts durations in buckets, which give any percentile within 10 %, in bounded memory."""

from __future__ import annotations

import math

_BUCKETS_PER_OCTAVE = 4
_NUM_BUCKETS = 40 * _BUCKETS_PER_OCTAVE  # from 1 ns to a quarter of an hour


class Histogram:
    """Durations in buckets a quarter of an octave wide."""

    __slots__ = ("_counts", "_merged", "_others")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by bucket; a stage fills about 20 of the 160
        self._others: list[dict[int, int]] = []  # counts of other histograms, summed when the counts are read
        self._merged: dict[int, int] | None = None

    @classmethod
    def of(cls, counts: dict[int, int]) -> Histogram:
        """A histogram that takes over `counts`: number of durations by bucket."""
        histogram = cls()
        histogram._counts = counts
        return histogram

    def add(self, seconds: float, count: int) -> None:
        """Count a duration `count` times."""
        bucket = int(math.log2(seconds * 1e9) * _BUCKETS_PER_OCTAVE) if seconds > 1e-9 else 0
        bucket = min(bucket, _NUM_BUCKETS - 1)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def copy(self) -> Histogram:
        """The histogram as it is now; for any thread."""
        return Histogram.of(self.counts.copy())

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram, which its thread may be writing to."""
        self._others.append(other._counts.copy())

    def minus(self, earlier: Histogram) -> Histogram:
        """The durations added since `earlier`."""
        return Histogram.of({bucket: count - earlier.counts.get(bucket, 0) for bucket, count in self.counts.items()})

    @property
    def counts(self) -> dict[int, int]:
        """Number of durations by bucket."""
        if not self._others:
            return self._counts
        if self._merged is None:
            merged = dict(self._counts)
            for other in self._others:
                for bucket, count in other.items():
                    merged[bucket] = merged.get(bucket, 0) + count
            self._merged = merged
        return self._merged

    def durations(self) -> list[tuple[float, int]]:
        """(seconds, how many) of every bucket, by its middle."""
        return [(_duration_of(bucket), count) for bucket, count in self.counts.items() if count]

    def share_above(self, seconds: float) -> float:
        """The share of all time that was spent in durations above `seconds`; 0 for an empty histogram."""
        all_s = above_s = 0.0
        for bucket, count in self.counts.items():
            duration_s = _duration_of(bucket)
            all_s += count * duration_s
            above_s += count * duration_s * (duration_s > seconds)
        return above_s / all_s if all_s else 0.0

    def num_above(self, seconds: float) -> int:
        """How many durations were above `seconds`."""
        return sum(count for bucket, count in self.counts.items() if _duration_of(bucket) > seconds)

    def percentile(self, share: float) -> float | None:
        """The duration in seconds below which `share` of all durations lie; None for an empty histogram."""
        total = sum(self.counts.values())
        if total == 0:
            return None
        reached = 0
        for bucket, count in sorted(self.counts.items()):
            reached += count
            if reached >= share * total:
                return _duration_of(bucket)
        raise AssertionError("the counts sum to their total")


def _duration_of(bucket: int) -> float:
    """The middle of a bucket in seconds."""
    return float(2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE) * 1e-9)
