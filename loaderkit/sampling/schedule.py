"""The sample at each position of an epoch, and the positions of each rank's batches, computed instead of listed.

An epoch is a permutation of the samples. Position p of epoch e is a pure function of (seed, e, p), so it is the same for
every world size, batch size, number of workers and restart, and a saved state is a few integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.splitmix import mix
from loaderkit.errors import ConfigError
from loaderkit.sampling.order import Int64, SampleOrder
from loaderkit.sampling.random import Bijection, key_of, uniforms

UNKNOWN = 1 << 60
"""The number of samples of a source whose end is known only when it is reached."""


class SequentialOrder(SampleOrder):
    """`shuffle: none`: the canonical order in every epoch."""

    def __init__(self, num_samples: int = UNKNOWN) -> None:
        self._num_samples = num_samples

    def num_positions(self, epoch: int) -> int:
        return self._num_samples

    def indices(self, epoch: int, positions: Int64) -> Int64:
        return positions


class GlobalOrder(SampleOrder):
    """`shuffle: global`: any sample may come at any position; O(1) memory."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed

    def num_positions(self, epoch: int) -> int:
        return self._num_samples

    def indices(self, epoch: int, positions: Int64) -> Int64:
        return Bijection(self._num_samples, key_of("global", self._seed, epoch))(positions)

    def indices_of_epochs(self, epochs: Int64, positions: Int64) -> Int64:
        """`indices` where every position has an epoch of its own: int64 [n] all three."""
        distinct, places = np.unique(epochs, return_inverse=True)
        keys = np.array([key_of("global", self._seed, epoch) for epoch in distinct.tolist()], np.uint64)
        return Bijection(self._num_samples, keys if len(keys) == 1 else keys[places])(positions)


class WeightedOrder(SampleOrder):
    """At every position a class is drawn by its weight, and one of its samples, each as likely: with replacement, as torch's
    WeightedRandomSampler draws. An epoch has as many positions as there are samples.

    `classes`: int64 [samples]. `weights` are by class number, and no class without a weight is drawn.
    """

    repeats = True

    def __init__(self, classes: Int64, weights: Mapping[int, float], seed: int) -> None:
        self._seed = seed
        self._classes = classes
        self._members = np.argsort(classes, kind="stable").astype(np.int64)  # class by class
        numbers, counts = np.unique(classes, return_counts=True)
        self._counts, self._starts = counts.astype(np.int64), np.cumsum(counts) - counts
        shares: NDArray[np.float64] = np.array([weights.get(number, 0.0) for number in numbers.tolist()], np.float64)
        self._ends = np.cumsum(shares / shares.sum())
        self._ends[np.flatnonzero(shares)[-1] :] = 1.0  # a draw is below 1, a rounded sum may be, too

    def num_positions(self, epoch: int) -> int:
        return len(self._members)

    def indices(self, epoch: int, positions: Int64) -> Int64:
        draws = uniforms(key_of("weighted", self._seed, epoch), positions.ravel(), 2)
        drawn = np.searchsorted(self._ends, draws[:, 0], side="right")
        places = self._starts[drawn] + (draws[:, 1] * self._counts[drawn]).astype(np.int64)
        samples: Int64 = self._members[places].reshape(positions.shape)
        return samples

    def others(self, index: int, draws: NDArray[np.float64]) -> Int64:
        """Of the same class."""
        members = np.flatnonzero(self._classes == self._classes[index])
        return members[(draws * len(members)).astype(np.int64)]


class BlockOrder(SampleOrder):
    """`shuffle: block`: blocks of neighbouring samples in random order, mixed inside a sliding window.

    Blocks are permuted, and the n-th goes to lane n mod `lanes`; inside a lane, consecutive groups of `window` blocks are mixed
    by one bijection each; position p belongs to lane p mod `lanes`. As lanes hold unequal numbers of samples, the surplus of
    the longer lanes fills, in order, the slots left at the end of the shorter ones. Memory is proportional to the number of
    blocks.
    """

    def __init__(self, bounds: Int64, seed: int, *, window: int, lanes: int) -> None:
        self.block_bounds = self._bounds = bounds
        self.block_spread = int(np.diff(bounds).max(initial=0)) * window * lanes
        self._seed = seed
        self._window = window
        self._lanes = lanes
        self._layouts: dict[int, _Layout] = {}

    def num_positions(self, epoch: int) -> int:
        return int(self._bounds[-1])

    def blocks_of_rank(self, epoch: int, rank: int, world_size: int) -> NDArray[np.bool_]:
        # Position p is in lane p mod lanes and on rank p mod W, so the two agree modulo their gcd.
        common = gcd(world_size, self._lanes)
        mine: NDArray[np.bool_] = self.lanes_of_blocks(epoch) % common == rank % common
        return mine & (2 * common >= world_size)

    def lanes_of_blocks(self, epoch: int) -> Int64:
        """The lane of every block in an epoch: int64 [blocks]. A block's samples have positions p with p mod lanes = lane,
        except for the surplus that evens out the lanes."""
        num_blocks = len(self._bounds) - 1
        lanes = np.empty(num_blocks, np.int64)
        numbers = np.arange(num_blocks, dtype=np.int64)
        lanes[Bijection(num_blocks, key_of("blocks", self._seed, epoch))(numbers)] = numbers % self._lanes
        return lanes

    def indices(self, epoch: int, positions: Int64) -> Int64:
        layout = self._layouts.get(epoch)
        if layout is None:
            layout = _Layout.of_epoch(self._bounds, self._seed, epoch, self._window, self._lanes)
            # Prefetching reads two epochs at once around their boundary.
            self._layouts = {e: kept for e, kept in self._layouts.items() if e == epoch - 1}
            self._layouts[epoch] = layout
        return layout.indices(positions)


class _Layout(NamedTuple):
    """One epoch of a block order. A sample's *rank* is its index in the concatenation of the lanes.

    block_starts, first_samples: int64 [blocks], by rank. group_starts: int64 [groups + 1]. lane_starts: [lanes + 1].
    deficit_starts and surplus_starts: [lanes + 1], the cumulated numbers of missing and of surplus samples of the lanes.
    """

    block_starts: Int64
    first_samples: Int64
    group_starts: Int64
    group_keys: NDArray[np.uint64]
    lane_starts: Int64
    num_slots: Int64
    deficit_starts: Int64
    surplus_starts: Int64

    @classmethod
    def of_epoch(cls, bounds: Int64, seed: int, epoch: int, window: int, lanes: int) -> _Layout:
        num_blocks = len(bounds) - 1
        numbers = np.arange(num_blocks, dtype=np.int64)
        shuffled = Bijection(num_blocks, key_of("blocks", seed, epoch))(numbers)
        lane, row = numbers % lanes, numbers // lanes
        by_lane = np.lexsort((row, lane))
        blocks, lane, group = shuffled[by_lane], lane[by_lane], row[by_lane] // window
        ends = np.cumsum(bounds[blocks + 1] - bounds[blocks])
        block_starts = np.concatenate(([0], ends[:-1]))
        is_new_group = np.ones(num_blocks, dtype=bool)
        is_new_group[1:] = (lane[1:] != lane[:-1]) | (group[1:] != group[:-1])
        group_starts = np.append(block_starts[is_new_group], ends[-1])
        num_groups = len(group_starts) - 1
        group_keys = mix(np.arange(num_groups, dtype=np.uint64) + np.uint64(key_of("groups", seed, epoch)))
        lane_starts = np.append(block_starts, ends[-1])[np.searchsorted(lane, np.arange(lanes + 1))]
        lengths = np.diff(lane_starts)
        num_slots = (ends[-1] - np.arange(lanes) + lanes - 1) // lanes
        return cls(
            block_starts=block_starts,
            first_samples=bounds[blocks],
            group_starts=group_starts,
            group_keys=group_keys,
            lane_starts=lane_starts,
            num_slots=num_slots,
            deficit_starts=np.concatenate(([0], np.cumsum(np.maximum(num_slots - lengths, 0)))),
            surplus_starts=np.concatenate(([0], np.cumsum(np.maximum(lengths - num_slots, 0)))),
        )

    def indices(self, positions: Int64) -> Int64:
        ranks = self._mixed(self._ranks(positions.reshape(-1)))
        block = np.searchsorted(self.block_starts, ranks, side="right") - 1
        samples: Int64 = self.first_samples[block] + (ranks - self.block_starts[block])
        return samples.reshape(positions.shape)

    def _ranks(self, positions: Int64) -> Int64:
        lanes = len(self.num_slots)
        lane, row = positions % lanes, positions // lanes
        ranks: Int64 = self.lane_starts[lane] + row
        short = np.flatnonzero(ranks >= self.lane_starts[lane + 1])
        if short.size:
            lengths = np.diff(self.lane_starts)
            number = self.deficit_starts[lane[short]] + row[short] - lengths[lane[short]]
            surplus_lane = np.searchsorted(self.surplus_starts, number, side="right") - 1
            ranks[short] = (
                self.lane_starts[surplus_lane]
                + self.num_slots[surplus_lane]
                + number
                - self.surplus_starts[surplus_lane]
            )
        return ranks

    def _mixed(self, ranks: Int64) -> Int64:
        group = np.searchsorted(self.group_starts, ranks, side="right") - 1
        starts = self.group_starts[group]
        sizes = self.group_starts[group + 1] - starts
        return starts + Bijection(sizes, self.group_keys[group])(ranks - starts)


class EpochSizes(Protocol):
    """The number of samples of every epoch, for orders whose epochs differ."""

    def num_positions(self, epoch: int) -> int: ...


@dataclass(frozen=True)
class BatchSampler:
    """The positions of an epoch that one rank's batches hold, from any global position on.

    Position p goes to rank p mod world_size. Dropping, every rank has floor(left / (batch_size world_size)) batches; else
    every rank has ceil(left / world_size) samples, and positions past the end are marked as wrapped. Where samples cannot be
    repeated (`wraps`), the last batch has what is left, and there is none unless every rank has a sample for it. With
    `sizes` the number of samples is that of one epoch, and `of_epoch` gives the sampler of another. With
    `keeps_neighbours`, where samples wrap, a rank's batch is a run of consecutive positions; all ranks together have
    the same positions in every step as without it.
    """

    num_samples: int
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    wraps: bool = True
    sizes: EpochSizes | None = None
    keeps_neighbours: bool = False

    def of_epoch(self, epoch: int) -> BatchSampler:
        """This one, for the samples of another epoch."""
        return self if self.sizes is None else replace(self, num_samples=self.sizes.num_positions(epoch))

    def samples_in(self, epoch: int) -> int:
        """The number of samples of an epoch."""
        return self.of_epoch(epoch).num_samples

    def num_batches(self, start: int = 0) -> int:
        left = max(0, self.num_samples - start)
        if self.drop_last or not self.wraps:
            num_batches, rest = divmod(left, self.batch_size * self.world_size)
            return num_batches + (not self.drop_last and rest >= self.world_size)
        per_rank = -(-left // self.world_size)
        return -(-per_rank // self.batch_size)

    def num_to_come(self, epoch: int, position: int) -> int:
        """The number of batches of an epoch from `position` on. Raises ConfigError if epochs differ and this one has none at
        all, where a loop over epochs would make no step."""
        here = self.of_epoch(epoch)
        num = here.num_batches(position)
        if not num and not position and self.sizes is not None:
            raise ConfigError(
                f"epoch {epoch} has no batch at all, as epochs of this pipeline differ in length: its {here.num_samples} "
                f"samples, sequences or batches are not {self.batch_size} for each of {self.world_size} ranks. Make "
                "batch.size smaller, or leave out drop_last; set_epoch goes on with another epoch"
            )
        return num

    @property
    def knows_length(self) -> bool:
        """False if the number of samples is known only at their end."""
        return self.num_samples < UNKNOWN

    def check_length(self) -> None:
        """Raise TypeError, as `len` does, if the number of samples is not known."""
        if not self.knows_length:
            raise TypeError(
                "a mixture with `stop: never` has no end, and so no length: count what is delivered"
                if self.wraps
                else "how many samples an iterable has shows when it ends, so there is no length: give `length` in `source`, "
                "if it is the same in every epoch, or count what is delivered"
            )

    def step_of(self, start: int, position: int) -> int:
        """The batch that holds `position` on its rank, counted from global position `start`."""
        return (position - start) // (self.batch_size * self.world_size)

    def positions(self, start: int, step: int, num_batches: int = 1) -> Int64:
        """The positions of the batches from `step` (from 0) on, counted from global position `start`.

        int64 [num_batches * batch_size], or less at the end of the epoch.
        """
        if self.keeps_neighbours:
            return self._runs(start, step, num_batches)
        first = start + (self.rank - start) % self.world_size
        per_rank = -(-(self.num_samples - (start if self.wraps else first)) // self.world_size)
        lo = step * self.batch_size
        hi = min(lo + num_batches * self.batch_size, per_rank)
        return np.arange(first + lo * self.world_size, first + hi * self.world_size, self.world_size, dtype=np.int64)

    def _runs(self, start: int, step: int, num_batches: int) -> Int64:
        per_rank = -(-(self.num_samples - start) // self.world_size)
        before = np.arange(step, step + num_batches, dtype=np.int64) * self.batch_size  # on each rank
        sizes = np.clip(per_rank - before, 0, self.batch_size)
        firsts = start + before * self.world_size + self.rank * sizes
        places = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions: Int64 = np.repeat(firsts, sizes) + places
        return positions

    def position_after(self, start: int, num_batches: int) -> int:
        """The global position once every rank has delivered `num_batches` batches from `start` on."""
        return min(self.num_samples, start + num_batches * self.batch_size * self.world_size)

    def next_position_after(self, epoch: int, position: int, num_batches: int) -> tuple[int, int]:
        """(epoch, global position) at which the batch begins that comes `num_batches` after the one at `position`."""
        here = self.of_epoch(epoch)
        num_later = num_batches - here.num_batches(position)
        if num_later < 0:
            return epoch, here.position_after(position, num_batches)
        if self.sizes is None:
            num_epochs, step = divmod(num_later, self.num_batches() or 1)
            return epoch + 1 + num_epochs, self.position_after(0, step)
        while True:
            epoch += 1
            here = self.of_epoch(epoch)
            num_here = here.num_batches()
            if num_later < num_here or not num_here:
                return epoch, here.position_after(0, num_later)
            num_later -= num_here
