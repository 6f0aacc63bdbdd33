"""Makes batches of about equally many tokens: cuts windows of samples into batches, and decides which samples a rank's
batches have.

    positions of an epoch ──windows──> samples ──by length──> batches ──by cost──> steps of as many batches as there are ranks

A batch is a bin of `PackedOrder`, so batch b of an epoch is a pure function of (seed, epoch, b), whatever the number of ranks,
and a schedule deals batches out as it deals samples. A batch that is padded takes its longest sample times the number of its
samples, and holds samples of neighbouring lengths; a batch that is not padded takes the sum, for which best fit is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from loaderkit.sampling.order import BatchSamples, Int64, Reads, WrappedOrder
from loaderkit.sampling.packing import Fill, PackedOrder

_READ_AT_ONCE = 64  # batches


def fill_by_length(sizes: Int64, capacity: int, bounds: Int64, bins: Int64, counts: Int64) -> None:
    """A `Fill`: bins of neighbouring sizes, the largest first, of which size times number is at most `capacity`. They are as
    few as can be, and as even."""
    for window, (begin, end) in enumerate(pairwise(bounds.tolist())):
        places = begin + np.flatnonzero(sizes[begin:end])
        left = capacity - sizes[places]
        # NumPy sorts 16 bits by radix.
        places = places[np.argsort(left.astype(np.uint16) if capacity <= 1 << 16 else left, kind="stable")]
        ordered = sizes[places].tolist()
        firsts = _cut(ordered, _least_area(ordered, capacity))
        bins[begin:end] = -1
        counts[window] = _number(bins, places, firsts)


def fill_in_order(sizes: Int64, capacity: int, bounds: Int64, bins: Int64, counts: Int64) -> None:
    """A `Fill`: bins of as many neighbours as fit, of which the largest size times their number is at most `capacity`."""
    for window, (begin, end) in enumerate(pairwise(bounds.tolist())):
        places = begin + np.flatnonzero(sizes[begin:end])
        firsts, first, largest = [0], 0, 0
        for place, size in enumerate(sizes[places].tolist()):
            largest = max(largest, size)
            if largest * (place - first + 1) > capacity:
                firsts.append(place)
                first, largest = place, size
        bins[begin:end] = -1
        counts[window] = _number(bins, places, firsts)


def fill_in_order_by_sum(sizes: Int64, capacity: int, bounds: Int64, bins: Int64, counts: Int64) -> None:
    """A `Fill`: bins of as many neighbours as fit, whose sum is at most `capacity`."""
    for window, (begin, end) in enumerate(pairwise(bounds.tolist())):
        places = begin + np.flatnonzero(sizes[begin:end])
        ends, firsts = np.cumsum(sizes[places]), [0]
        while (at := int(np.searchsorted(ends, capacity + (ends[firsts[-1] - 1] if firsts[-1] else 0), "right"))) < len(
            ends
        ):
            firsts.append(at)
        bins[begin:end] = -1
        counts[window] = _number(bins, places, firsts)


def fill_rounded(  # noqa: PLR0917 - a `Fill` behind the first two
    fill: Fill, multiple: int, sizes: Int64, capacity: int, bounds: Int64, bins: Int64, counts: Int64
) -> None:
    """A `Fill` of sizes that are padded to a multiple of `multiple`."""
    fill(-(-sizes // multiple) * multiple, capacity, bounds, bins, counts)


def _number(bins: Int64, places: Int64, firsts: list[int]) -> int:
    """Number the bins, which begin with the `firsts` of `places`; returns how many there are."""
    if not len(places):
        return 0
    bins[places] = np.repeat(np.arange(len(firsts)), np.diff([*firsts, len(places)]))
    return len(firsts)


def _cut(sizes: list[int], area: int) -> list[int]:
    """The first of every bin, of sizes in decreasing order."""
    firsts, at = [], 0
    while at < len(sizes):
        firsts.append(at)
        at += area // sizes[at]
    return firsts


def _least_area(sizes: list[int], capacity: int) -> int:
    """The least area that gives no more bins than `capacity`, so that bins are even: else the last one would only have
    what the others leave."""
    if not sizes:
        return capacity
    num_bins = len(_cut(sizes, capacity))
    low, high = max(sizes[0], -(-sum(sizes) // num_bins)), capacity
    while low < high:
        middle = (low + high) // 2
        if len(_cut(sizes, middle)) > num_bins:
            low = middle + 1
        else:
            high = middle
    return high


class TokenBatches(WrappedOrder):
    """The order of batches cut by tokens. The batches of an epoch are the sequences of a `PackedOrder`."""

    unit = "batches"

    def __init__(self, order: PackedOrder, most_samples: int) -> None:
        """No batch has more than `most_samples`."""
        super().__init__(order)
        self.order = order
        self._most_samples = most_samples

    def num_samples(self, epoch: int) -> int:
        return self.order.num_packed(epoch)

    def slots_of(self, batch_size: int) -> tuple[int, int]:
        return max(1, self.num_samples(0) // self.num_positions(0)), self._most_samples

    def in_batches(self, epoch: int, positions: Int64, batch_size: int, start: int, world_size: int) -> BatchSamples:
        """See `SampleOrder`, with batches of one position, n > 0 of them.

        If no batch is left for some ranks in the last step, all ranks share the batches that are left. So no sample
        comes twice, unless they have fewer samples than there are ranks.
        """
        num_batches, last, wrapped = self.num_positions(epoch), int(positions[-1]), None
        rank = (last - start) % world_size
        if last - rank + world_size <= num_batches:
            pieces = self.order.pieces(epoch, positions)
            samples, bounds = pieces.samples.copy(), pieces.bounds  # the plan keeps its own
        else:
            shared = self.order.pieces(epoch, np.arange(last - rank, num_batches))
            rows, is_repeated = _share_of(shared.bounds, rank, world_size)
            samples, bounds = shared.samples[rows], np.array([0, len(rows)])
            if len(positions) > 1:
                pieces = self.order.pieces(epoch, positions[:-1])
                samples = np.concatenate((pieces.samples, samples))
                bounds = np.append(pieces.bounds, len(samples))
            wrapped = np.zeros(len(samples), np.bool_)
            wrapped[bounds[-2] :] = is_repeated
        return BatchSamples(samples, np.repeat(positions, np.diff(bounds)), bounds, wrapped)

    def reads(self, epoch: int, positions: Int64, start: int, world_size: int) -> Iterator[Reads]:
        for first in range(0, len(positions), _READ_AT_ONCE):
            some = positions[first : first + _READ_AT_ONCE]
            samples = self.in_batches(epoch, some, 1, start, world_size).indices
            yield Reads(samples, np.arange(len(samples)), len(samples))


def _share_of(bounds: Int64, rank: int, world_size: int) -> tuple[Int64, bool]:
    """One rank's share of the rows of batches, where there are fewer batches than ranks; and whether another rank has
    them, too.

    Each batch goes to one rank or more, so that no share takes more than a batch may."""
    sizes = np.diff(bounds)
    num_ranks = np.ones(len(sizes), np.int64)  # of every batch
    for _ in range(world_size - len(sizes)):
        num_ranks[np.argmax(sizes / num_ranks)] += 1
    ends = np.cumsum(num_ranks)
    batch = int(np.searchsorted(ends, rank, side="right"))
    number = rank - int(ends[batch] - num_ranks[batch])
    rows = np.arange(bounds[batch] + number, bounds[batch + 1], num_ranks[batch])
    if len(rows):
        return rows, False
    return bounds[batch : batch + 1] + number % sizes[batch], True
