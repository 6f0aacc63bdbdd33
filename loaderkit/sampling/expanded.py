"""The order of an epoch in which several samples are made of one.

    positions   0 1 2 3 | 4 5 6 7 | ...       with `num` 4
    samples     a a a a | b b b b | ...       those at the inner positions 0, 1, ...

Sample n of index i has the index i * num + n, so that each has random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from loaderkit.sampling.mix_rules import MixedSource
from loaderkit.sampling.order import Int64, Reads, SampleOrder
from loaderkit.sampling.schedule import UNKNOWN


class ExpandedOrder(SampleOrder):
    """`expand`: `num` samples of each of the inner order, as neighbours."""

    keeps_neighbours = True

    def __init__(self, inner: SampleOrder, num: int) -> None:
        self._inner = inner
        self.num = num
        self.epochs_differ = inner.epochs_differ
        self.knows_lengths = inner.knows_lengths
        self.block_bounds = inner.block_bounds
        self.block_spread = inner.block_spread * num
        self.sources: tuple[MixedSource, ...] = tuple(inner.sources)
        self.share_of: Literal["samples", "tokens"] = inner.share_of

    def for_thread(self) -> Self:
        own = copy(self)
        own._inner = self._inner.for_thread()
        return own

    @property
    def core(self) -> SampleOrder:
        return self._inner.core

    def num_positions(self, epoch: int) -> int:
        return _times(self._inner.num_positions(epoch), self.num)

    def indices(self, epoch: int, positions: Int64) -> Int64:
        places, numbers = np.divmod(positions, self.num)
        indices: Int64 = self._inner.indices(epoch, places) * self.num + numbers
        return indices

    def samples_of(self, indices: Int64) -> Int64:
        samples: Int64 = indices // self.num
        return samples

    def keys(self, epoch: int, indices: Int64, keys_of: Callable[[Int64], list[str]]) -> list[str]:
        return self._inner.keys(epoch, indices // self.num, keys_of)

    def lengths_of(self, samples: Int64) -> Int64:
        return self._inner.lengths_of(samples)

    def digests(self) -> dict[str, str]:
        return self._inner.digests()

    def reads(self, epoch: int, positions: Int64, start: int, world_size: int) -> Iterator[Reads]:
        """Each sample once, for the first of its slots."""
        samples = self.indices(epoch, positions % self.num_positions(epoch)) // self.num
        firsts = np.flatnonzero(np.diff(samples, prepend=-1))
        yield Reads(samples[firsts], firsts, len(samples))

    def blocks_of_rank(self, epoch: int, rank: int, world_size: int) -> NDArray[np.bool_]:
        of_one = self._inner.blocks_of_rank(epoch, 0, 1)
        return of_one & (world_size == 1)  # of several each has neighbours of all lanes

    def positions_before(self, epoch: int, position: int) -> int:
        return self._inner.positions_before(epoch, -(-position // self.num))

    def num_before(self, epoch: int, position: int) -> tuple[int, int]:
        begun = -(-position // self.num)
        return self._inner.num_before(epoch, position // self.num)[0], self._inner.num_before(epoch, begun)[1]

    def spans(self, name: str, epoch: int) -> list[tuple[int, int]]:
        return [(_times(begin, self.num), _times(end, self.num)) for begin, end in self._inner.spans(name, epoch)]


def _times(number: int, num: int) -> int:
    """The number of positions for `number` samples; an unknown number stays unknown."""
    return number if number >= UNKNOWN else number * num
