"""Divides what several ranks hold alike, so that all ranks write about as many bytes.

Most blocks stay whole: they go, the largest first, to the rank with the least to write. Only as many of the largest blocks are
cut as it takes to level the rest. How much of those each rank gets is water-filling, group of ranks by group of ranks, repeated
until it does not change any more; the cuts are then made as McNaughton's rule for preemptive machines makes them: the blocks
are laid end to end, and each rank gets one stretch of the line, so each rank adds one cut at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple

MIN_CUT_BYTES = 16 * 2**10
"""A block of fewer bytes is not cut: each rank may have a value of its own under that name, such as the state of a
random number generator (5,056 bytes) or the statistics of a batch norm, and parts of two ranks' values make no whole
one."""
_ALIGNMENT = 64  # bytes: of items in a file, so that large ones can be written from where they lie
_CUTS_PER_SHARE = 400  # a cut is made up to 1/400 of a rank's share off its place, where that saves it
_MAX_SWEEPS = 50

Ranks = tuple[int, ...]


class HeldBox(NamedTuple):
    """A box of a tensor, of `shape` elements of `itemsize` bytes, that each of `ranks` (ascending) holds."""

    shape: tuple[int, ...]
    itemsize: int
    ranks: Ranks
    can_cut: bool = True

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize


class Span(NamedTuple):
    """Elements [first, end), in C order, of the block with the given number."""

    block: int
    first: int
    end: int


def divide(blocks: Sequence[HeldBox], num_ranks: int) -> list[list[Span]]:
    """What each rank writes. Every element of a block is in one span, of a rank that holds it; an empty block has one, too.

    If all ranks hold all, the most bytes of a rank are at most 1.02 times the least, or differ from them by less than
    MIN_CUT_BYTES, as long as no larger block must stay whole.
    """
    loads = [0] * num_ranks
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    groups: dict[Ranks, list[int]] = {}
    for number, block in enumerate(blocks):
        if len(block.ranks) == 1:
            spans[block.ranks[0]].append(_whole(number, block))
            loads[block.ranks[0]] += block.num_bytes
        else:
            groups.setdefault(block.ranks, []).append(number)
    cut = {ranks: _to_cut(blocks, numbers, len(ranks)) for ranks, numbers in groups.items()}
    for ranks in sorted(groups, key=len):  # those with the least choice first
        whole = sorted(set(groups[ranks]) - set(cut[ranks]), key=lambda number: (-blocks[number].num_bytes, number))
        for number in whole:
            rank = min(ranks, key=lambda rank: (loads[rank], len(spans[rank]), rank))
            spans[rank].append(_whole(number, blocks[number]))
            loads[rank] += blocks[number].num_bytes
    amounts = {ranks: sum(blocks[number].num_bytes for number in numbers) for ranks, numbers in cut.items() if numbers}
    for ranks, shares in _fill(loads, amounts).items():
        slack = sum(blocks[number].num_bytes for number in groups[ranks]) // len(ranks) // _CUTS_PER_SHARE
        for rank, share in zip(ranks, _cut_line(blocks, cut[ranks], shares, slack), strict=True):
            spans[rank] += share
    return [sorted(share) for share in spans]


def _whole(number: int, block: HeldBox) -> Span:
    return Span(number, 0, prod(block.shape))


def _to_cut(blocks: Sequence[HeldBox], numbers: Sequence[int], num_ranks: int) -> list[int]:
    """The largest blocks of a group of ranks: as many as must be cut to level what whole blocks leave uneven."""
    able = [number for number in numbers if blocks[number].can_cut and blocks[number].num_bytes >= MIN_CUT_BYTES]
    able.sort(key=lambda number: (-blocks[number].num_bytes, number))
    num_bytes = 0
    for count, number in enumerate(able):
        if num_bytes >= 2 * num_ranks * blocks[number].num_bytes:
            return able[:count]
        num_bytes += blocks[number].num_bytes
    return able


def _fill(loads: Sequence[int], amounts: Mapping[Ranks, int]) -> dict[Ranks, list[float]]:
    """How many bytes of its group's amount each rank gets, in the order of the group, so that the sums are as even as can be.

    One group after the other is distributed again on top of the other groups' bytes; each time the sum of squares
    becomes smaller.
    """
    levels = [float(load) for load in loads]
    shares = {ranks: [0.0] * len(ranks) for ranks in sorted(amounts, key=len)}
    close = sum(amounts.values()) / len(loads) / 1e4
    for _ in range(_MAX_SWEEPS):
        moved = 0.0
        for ranks, before in shares.items():
            for rank, share in zip(ranks, before, strict=True):
                levels[rank] -= share
            shares[ranks] = after = _poured([levels[rank] for rank in ranks], amounts[ranks])
            for rank, share in zip(ranks, after, strict=True):
                levels[rank] += share
            moved = max(moved, *(abs(new - old) for new, old in zip(after, before, strict=True)))
        if moved <= close or len(shares) == 1:
            break
    return shares


def _poured(levels: Sequence[float], amount: float) -> list[float]:
    """How `amount` of water spreads over columns that are filled up to `levels`."""
    ordered = sorted(levels)
    surface, below = 0.0, 0.0
    for count, level in enumerate(ordered, 1):
        below += level
        surface = (amount + below) / count
        if count == len(ordered) or surface <= ordered[count]:
            break
    return [max(0.0, surface - level) for level in levels]


def _cut_line(
    blocks: Sequence[HeldBox], numbers: Sequence[int], shares: Sequence[float], slack: int
) -> Iterator[list[Span]]:
    """The blocks end to end, cut into stretches of about as many bytes as `shares`. A cut moves to a block's end within `slack`
    bytes, and else to where it leaves boxes that begin at multiples of 64 bytes."""
    at, first, done = 0, 0, 0.0  # the block that is next, its next element, and the bytes before the block
    for rank, share in enumerate(shares):
        done += share
        spans: list[Span] = []
        while at < len(numbers):
            block = blocks[numbers[at]]
            num_elements = prod(block.shape)
            end = num_elements if rank == len(shares) - 1 else max(first, _cut_in(block, done, slack))
            if end > first:
                spans.append(Span(numbers[at], first, end))
            first = end
            if end < num_elements:
                break
            done -= block.num_bytes
            at, first = at + 1, 0
        yield spans


def _cut_in(block: HeldBox, at: float, slack: int) -> int:
    """The element before which a block is cut, for a cut `at` bytes from its begin on."""
    num_elements, num_bytes = prod(block.shape), block.num_bytes
    if at <= slack:
        return 0
    if at >= num_bytes - slack:
        return num_elements
    unit = _unit(block, slack)
    return min(num_elements, round(at / (unit * block.itemsize)) * unit)


def _unit(block: HeldBox, slack: int) -> int:
    """Elements between places for a cut: whole rows if these are small enough, so that few boxes result, else parts of them."""
    for num_dims in range(1, len(block.shape) + 1):
        row = prod(block.shape[num_dims:])
        unit = row * (_ALIGNMENT // gcd(row * block.itemsize, _ALIGNMENT))
        if unit * block.itemsize <= slack:
            return unit
    return max(1, _ALIGNMENT // block.itemsize)
