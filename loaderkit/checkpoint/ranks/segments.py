"""How ranks divide what several of them need: byte ranges of the checkpoint, each read by one rank and passed on to others.

Every rank computes the same from the same, so nothing of it is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loaderkit.checkpoint.transfer.layout import ReadLimits

Ranks = tuple[int, ...]


class NeededRange(NamedTuple):
    """Bytes [start, end) of an object, for the tensor `label`, that the ranks `takers` need (in ascending order)."""

    key: str
    start: int
    end: int
    label: str
    takers: Ranks


@dataclass(slots=True)
class OwnedRange:
    """Bytes [start, end) of an object that `owner` reads and `takers`, itself among them, need."""

    key: str
    start: int
    end: int
    label: str
    takers: Ranks = ()
    owner: int = 0

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def divided(intervals: Iterable[NeededRange], limits: ReadLimits, num_ranks: int) -> list[OwnedRange]:
    """Segments of at most `limits.most_bytes` that cover the intervals, by object and place, no byte in two of them.

    Neighbours with the same takers are joined over gaps that may be read over; an interval of some size that meets no other
    keeps a segment of its own, so that it can be read and received where it belongs. The owner of a segment is that of its
    takers who owns the least up to there: so all own about as much, and neighbours are read at the same time.
    """
    ordered = sorted(intervals)
    segments: list[OwnedRange] = []
    last: NeededRange | None = None
    for interval in ordered:
        _add(segments, interval, last, limits)
        last = interval
    _give_takers(segments, ordered)
    loads = [0] * num_ranks
    for segment in segments:
        segment.owner = min(segment.takers, key=lambda rank: (loads[rank], rank))
        loads[segment.owner] += segment.num_bytes
    return segments


def _add(segments: list[OwnedRange], interval: NeededRange, last: NeededRange | None, limits: ReadLimits) -> None:
    start = interval.start
    now = segments[-1] if segments else None
    if now is not None and now.key == interval.key:
        fits = max(now.end, interval.end) - now.start <= limits.most_bytes
        if start < now.end:
            if fits:
                now.end = max(now.end, interval.end)
                return
            start = now.end  # the first bytes of it come with those before
        elif (
            fits
            and last is not None
            and last.takers == interval.takers
            and start - now.end <= limits.coalesce_gap
            and max(interval.end - start, now.num_bytes) < limits.least_direct
        ):
            now.end = interval.end
            return
    while start < interval.end:
        end = min(interval.end, start + limits.most_bytes)
        segments.append(OwnedRange(interval.key, start, end, interval.label))
        start = end


def _give_takers(segments: list[OwnedRange], intervals: Sequence[NeededRange]) -> None:
    found: list[set[int]] = [set() for _ in segments]
    places = [(segment.key, segment.start) for segment in segments]
    for interval in intervals:
        first = max(0, bisect_right(places, (interval.key, interval.start)) - 1)
        for number in range(first, len(segments)):
            if places[number] >= (interval.key, interval.end):
                break
            found[number].update(interval.takers)
    for segment, takers in zip(segments, found, strict=True):
        segment.takers = tuple(sorted(takers))


def overlap(boxes: Sequence[tuple[int, int, int]]) -> bool:
    """Whether two of the half-open (start, end, rank) that are of different ranks have anything in common."""
    reach: tuple[int, int] | None = None  # the farthest end up to here, and whose it is
    other = 0  # the farthest end of any other rank
    for start, end, rank in sorted(boxes):
        before = other if reach is not None and reach[1] == rank else (reach[0] if reach is not None else 0)
        if start < before:
            return True
        if reach is None or end > reach[0]:
            if reach is not None and reach[1] != rank:
                other = max(other, reach[0])
            reach = (end, rank)
        elif rank != reach[1]:
            other = max(other, end)
    return False
