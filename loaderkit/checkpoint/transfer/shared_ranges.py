"""Byte ranges that several ranks need: each is read by the rank that owns it, and sent to the others.

Every rank computes the same owners from the same ranges, so the division itself is never sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loaderkit.checkpoint.transfer.layout import ReadLimits

Ranks = tuple[int, ...]


class NeededRange(NamedTuple):
    """Bytes [start, end) of an object, for the tensor `label`, that `ranks` need (in ascending order)."""

    key: str
    start: int
    end: int
    label: str
    ranks: Ranks


@dataclass(slots=True)
class OwnedRange:
    """Bytes [start, end) of an object that `owner` reads and `ranks`, with the owner among them, need."""

    key: str
    start: int
    end: int
    label: str
    ranks: Ranks = ()
    owner: int = 0

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def assign_owners(needed: Iterable[NeededRange], limits: ReadLimits, num_ranks: int) -> list[OwnedRange]:
    """Ranges of at most `limits.most_bytes` that cover the needed ones, by object and start; they do not overlap.

    Neighbours that the same ranks need are joined over gaps up to `limits.coalesce_gap`; a large range that overlaps no other
    stays as it is, so that it can be read and received in the tensor's own memory. The owner of a range is, of the ranks that
    need it, the one that owns the fewest bytes so far: all ranks own about as much, and read neighbours at the same time.
    """
    ordered = sorted(needed)
    owned: list[OwnedRange] = []
    last: NeededRange | None = None
    for needed_range in ordered:
        _add(owned, needed_range, last, limits)
        last = needed_range
    _set_ranks(owned, ordered)
    loads = [0] * num_ranks
    for owned_range in owned:
        owned_range.owner = min(owned_range.ranks, key=lambda rank: (loads[rank], rank))
        loads[owned_range.owner] += owned_range.num_bytes
    return owned


def _add(owned: list[OwnedRange], needed: NeededRange, last: NeededRange | None, limits: ReadLimits) -> None:
    """Extend the last owned range by `needed`, or append new ones. `last` is the needed range before."""
    start = needed.start
    current = owned[-1] if owned else None
    if current is not None and current.key == needed.key:
        fits = max(current.end, needed.end) - current.start <= limits.most_bytes
        if start < current.end:
            if fits:
                current.end = max(current.end, needed.end)
                return
            start = current.end  # its first bytes belong to the current range
        elif (
            fits
            and last is not None
            and last.ranks == needed.ranks
            and start - current.end <= limits.coalesce_gap
            and max(needed.end - start, current.num_bytes) < limits.least_direct
        ):
            current.end = needed.end
            return
    while start < needed.end:
        end = min(needed.end, start + limits.most_bytes)
        owned.append(OwnedRange(needed.key, start, end, needed.label))
        start = end


def _set_ranks(owned: list[OwnedRange], needed: Sequence[NeededRange]) -> None:
    ranks: list[set[int]] = [set() for _ in owned]
    starts = [(owned_range.key, owned_range.start) for owned_range in owned]
    for needed_range in needed:
        first = max(0, bisect_right(starts, (needed_range.key, needed_range.start)) - 1)
        for number in range(first, len(owned)):
            if starts[number] >= (needed_range.key, needed_range.end):
                break
            ranks[number].update(needed_range.ranks)
    for owned_range, needing in zip(owned, ranks, strict=True):
        owned_range.ranks = tuple(sorted(needing))


def overlap(extents: Sequence[tuple[int, int, int]]) -> bool:
    """True if two half-open extents (start, end, rank) of different ranks overlap."""
    reach: tuple[int, int] | None = None  # the farthest end so far, and its rank
    other = 0  # the farthest end of any other rank
    for start, end, rank in sorted(extents):
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
