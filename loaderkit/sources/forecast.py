"""Forecasts the ranges that a rank will read, in order of first need, coalesced into slices that are worth a request each.

    positions ──> samples ──> of a block that this rank owns: the block, once ──> slices by first need
                          └─> others: their ranges, coalesced

The order is computed, so the future is known and never guessed. Two ranks with different lanes never fetch the same blocks,
except for the few samples that even out the lanes at the end of an epoch; those are fetched singly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Ranges
from loaderkit.connectors.ranges import RangeRequest, RangeSlice, coalesce
from loaderkit.errors import SourceError
from loaderkit.sampling.order import Reads, SampleOrder
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sources.base import RowGroups, Source

_MOST_SAMPLES = 4096  # planned at a time
_NUM_COALESCED = 256  # consecutive samples whose ranges are coalesced
_MOST_BYTES = 8 << 20
_MOST_COUNTED = 2_000_000  # samples, in about a second


class Chosen(NamedTuple):
    """The samples of one source in a mixture: `spans` gives, by epoch, the positions [begin, end) among which they are,
    `is_own` which of the indices there are the source's own, and `own_of` their indices in the source."""

    spans: Callable[[int], Sequence[tuple[int, int]]]
    is_own: Callable[[NDArray[np.int64]], NDArray[np.bool_]]
    own_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]


class RowGroupReads:
    """Finds which row groups must be read for a sequence of samples, by the rule by which row groups are held."""

    def __init__(self, groups: RowGroups) -> None:
        self._groups = groups
        self._fits = int(groups.group_bytes.sum()) <= groups.memory_bytes
        self._is_read = np.zeros(len(groups.group_bytes), np.bool_)
        self._held: OrderedDict[int, int] = OrderedDict()
        self._held_bytes = 0
        self.num_reads = 0

    @property
    def is_complete(self) -> bool:
        """True if all row groups are held, so that none will be read again."""
        return self._fits and self.num_reads == len(self._is_read)

    def of(self, indices: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(place among these samples, row group) of every sample for which its row group is not held."""
        groups, _ = self._groups.locate(indices)
        places = np.flatnonzero(np.diff(groups, prepend=-1))
        if self._fits:
            places = places[~self._is_read[groups[places]]]
            some, firsts = np.unique(groups[places], return_index=True)
            places = np.sort(places[firsts])
            self._is_read[some] = True
            reads = list(zip(places.tolist(), groups[places].tolist(), strict=True))
        else:
            reads = [pair for pair in zip(places.tolist(), groups[places].tolist(), strict=True) if self._hold(pair[1])]
        self.num_reads += len(reads)
        return reads

    def _hold(self, group: int) -> bool:
        """False if the row group is held already."""
        if group in self._held:
            self._held.move_to_end(group)
            return False
        size = self._held[group] = int(self._groups.group_bytes[group])
        self._held_bytes += size
        while self._held_bytes > self._groups.memory_bytes and len(self._held) > 1:
            self._held_bytes -= self._held.popitem(last=False)[1]
        return True


def decoded_share(groups: RowGroups, num_samples: int, order: SampleOrder, rank: int, world_size: int) -> float:
    """How often a rank decodes the bytes of its samples in an epoch: 1 where every row group is decoded once, by one rank.

    Counted over the first epoch, of a long one over its first samples.
    """
    positions = np.arange(rank, num_samples, world_size, dtype=np.int64)[:_MOST_COUNTED]
    reads, num_bytes = RowGroupReads(groups), 0
    for first in range(0, len(positions), _MOST_SAMPLES):
        indices = order.indices(0, positions[first : first + _MOST_SAMPLES])
        num_bytes += sum(int(groups.group_bytes[group]) for _, group in reads.of(indices))
    mean_bytes = int(groups.group_bytes.sum()) / num_samples
    return num_bytes / (mean_bytes * len(positions))


class Forecast:
    """The slices that one rank needs, epoch after epoch."""

    def __init__(
        self,
        source: Source,
        order: SampleOrder,
        schedule: BatchSampler,
        *,
        num_epochs: int | None,
        shard: Shard = WHOLE,
        chosen: Chosen | None = None,
    ) -> None:
        """`shard` is the shard of this loading process."""
        self._source = source
        self._order = order.for_thread()
        self._schedule = schedule
        self._num_epochs = num_epochs
        self.shard = shard  # may be set before `slices` is called
        self._bounds = order.block_bounds
        self._chosen = chosen
        self._window = order.block_spread // schedule.world_size

    @property
    def window(self) -> int:
        """The approximate distance, in the rank's samples, from a block's first to its last sample; 0 without blocks."""
        return self._window

    def slices(self, epoch: int, position: int) -> Iterator[RangeSlice]:
        """All slices from global `position` of `epoch` on, by the first sample that needs them."""
        self._emitted = None
        groups = self._source.row_groups
        self._row_groups = None if groups is None else RowGroupReads(groups)
        num_samples = 0  # of the rank, before these
        num_batches = 0  # before these, in all processes
        while self._num_epochs is None or epoch < self._num_epochs:
            schedule = self._schedule.of_epoch(epoch)
            if schedule.num_batches() == 0:
                return
            spans = () if self._chosen is None else self._chosen.spans(epoch)
            num_reads = self._row_groups.num_reads if self._row_groups is not None else 0
            is_whole, num_slices = position == 0, 0  # of the epoch
            for group in self._positions(schedule, position):
                if self._row_groups is not None and self._row_groups.is_complete:
                    return
                positions = self._mine(group, num_batches)
                num_batches += -(-len(group) // schedule.batch_size)
                if self._has_samples_in(spans, group, schedule.num_samples):
                    for reads in self._order.reads(epoch, positions, position, schedule.world_size):
                        slices = self._of_reads(epoch, reads, num_samples)
                        yield from slices
                        num_slices += len(slices)
                        num_samples += reads.num_slots
                    continue
                if not schedule.knows_length and all(end <= group[0] for _, end in spans):
                    return  # it has no more
                num_samples += len(positions)
            if self._row_groups is not None and self._row_groups.num_reads == num_reads:
                return  # what it needs is held
            if self._row_groups is not None and is_whole and not num_slices:
                return  # nothing of it is read ahead
            self._emitted = None
            epoch, position = epoch + 1, 0

    _row_groups: RowGroupReads | None = None
    _emitted: NDArray[np.bool_] | None = None  # the blocks of the epoch that were emitted already
    _owned: NDArray[np.bool_] | None = None

    @staticmethod
    def _positions(schedule: BatchSampler, start: int) -> Iterator[NDArray[np.int64]]:
        num_batches = schedule.num_batches(start)
        step = max(1, _MOST_SAMPLES // schedule.batch_size)
        for first in range(0, num_batches, step):
            yield schedule.positions(start, first, min(step, num_batches - first))

    def _has_samples_in(self, spans: Sequence[tuple[int, int]], positions: NDArray[np.int64], num_samples: int) -> bool:
        """False if none of these positions can be of the chosen source."""
        if self._chosen is None or positions[-1] >= num_samples:  # those wrap
            return True
        return any(begin <= positions[-1] and positions[0] < end for begin, end in spans)

    def _mine(self, positions: NDArray[np.int64], num_before: int) -> NDArray[np.int64]:
        """The positions in this process's batches; `num_before` batches came before them."""
        if self.shard.of == 1:
            return positions
        batches = num_before + np.arange(len(positions), dtype=np.int64) // self._schedule.batch_size
        mine: NDArray[np.int64] = positions[batches % self.shard.of == self.shard.number]
        return mine

    def _of_reads(self, epoch: int, reads: Reads, number: int) -> list[RangeSlice]:
        """The slices that are read for the slots from `number` on, in the rank's order."""
        if reads.pieces is not None:
            return self._of_pieces(reads, *reads.pieces, number)
        indices, slices = reads.samples, list[RangeSlice]()
        rest = np.arange(len(indices), dtype=np.int64)
        if self._chosen is not None:
            rest = rest[self._chosen.is_own(indices)]
        if self._bounds is not None and self._row_groups is None:
            blocks = np.searchsorted(self._bounds, indices, "right") - 1
            is_owned = self._owned_blocks(epoch)[blocks]
            slices = self._of_blocks(blocks, rest[is_owned], number)
            rest = rest[~is_owned]
        for first in range(0, len(rest), _NUM_COALESCED):
            some = rest[first : first + _NUM_COALESCED]
            slices += self._slices(indices[some], some + number)
        return sorted(slices, key=lambda range_slice: range_slice.first)

    def _of_pieces(
        self, reads: Reads, firsts: NDArray[np.int64], lengths: NDArray[np.int64], number: int
    ) -> list[RangeSlice]:
        """The slices of pieces, for samples that can be read in pieces, and of whole samples for others."""
        owners, ranges = reads.slots + number, None
        if self._chosen is None:
            ranges = self._source.piece_ranges(reads.samples, firsts, lengths)
        if ranges is not None:
            slices = coalesce(list(map(RangeRequest, *ranges, owners.tolist())), most_bytes=_MOST_BYTES)
        else:
            is_own = slice(None) if self._chosen is None else self._chosen.is_own(reads.samples)
            slices = self._slices(reads.samples[is_own], owners[is_own])
        return sorted(slices, key=lambda range_slice: range_slice.first)

    def _slices(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[RangeSlice]:
        """The slices of samples with these indices and `numbers` in the rank's order. For row groups they are the
        groups that are not held when a sample first needs them."""
        if self._chosen is not None:
            indices = self._chosen.own_of(indices)
        groups = self._source.row_groups
        if self._row_groups is None or groups is None:
            return coalesce(self._wanted(indices, numbers.tolist()), most_bytes=_MOST_BYTES)
        slices: list[RangeSlice] = []
        for place, group in self._row_groups.of(indices):
            first = int(numbers[place])
            for key, start, length, etag in groups.group_ranges(group):
                slices.append(RangeSlice(key, start, length, etag, first, first + 2 * self._window, length))
        return slices

    def _owned_blocks(self, epoch: int) -> NDArray[np.bool_]:
        """bool [blocks]: the blocks of which this rank reads at least half of the samples, which makes them worth a request."""
        if self._emitted is None or self._owned is None:
            assert self._bounds is not None
            self._emitted = np.zeros(len(self._bounds) - 1, np.bool_)
            # Each of several processes needs some samples of every block: fetched singly, none is fetched twice.
            rank, world_size = self._schedule.rank, self._schedule.world_size
            self._owned = self._order.blocks_of_rank(epoch, rank, world_size) & (self.shard.of == 1)
        return self._owned

    def _of_blocks(self, blocks: NDArray[np.int64], positions: NDArray[np.int64], number: int) -> list[RangeSlice]:
        """The blocks of these samples that were not emitted before."""
        assert self._emitted is not None
        assert self._bounds is not None
        distinct, firsts = np.unique(blocks[positions], return_index=True)
        slices: list[RangeSlice] = []
        for block, first in zip(distinct.tolist(), firsts.tolist(), strict=True):
            if self._emitted[block]:
                continue
            self._emitted[block] = True
            lo, hi = int(self._bounds[block]), int(self._bounds[block + 1])
            first_sample = number + int(positions[first])
            inside = self._wanted(np.arange(lo, hi, dtype=np.int64), [first_sample] * (hi - lo))
            slices += [
                range_slice._replace(last=first_sample + 2 * self._window)
                for range_slice in coalesce(inside, most_bytes=1 << 62)
            ]
        return slices

    def _wanted(self, indices: NDArray[np.int64], numbers: list[int]) -> list[RangeRequest]:
        """The ranges of samples with the indices `numbers` in the rank's order."""
        source = self._source
        table = source.table(indices)
        if table is not None:
            ranges: Ranges = table.ranges
            num_fields = max(1, len(table.fields))
            owners = [number for number in numbers for _ in range(num_fields)]
            return list(map(RangeRequest, ranges.keys, ranges.starts, ranges.lengths, ranges.etags, owners))
        distinct: list[RangeRequest] = []
        for index, number in zip(indices.tolist(), numbers, strict=True):
            try:
                parts = source.ranges(index)
            except SourceError:  # a field is missing; `read` raises the error
                continue
            distinct += [RangeRequest(*part.range, number) for part in parts]
        return distinct
