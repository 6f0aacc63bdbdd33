"""What the positions of an epoch mean. Orders wrap one another, and a loader asks the outermost one.

    TokenBatches( PackedOrder( MixedOrder( Mixture, [GlobalOrder, BlockOrder] ) ) )
      a batch       sequences    samples of several sources      samples of one

Saved states, ranks and loading processes count positions and nothing else. At a position there is a sample, a sequence
or a whole batch, which is a pure function of (seed, epoch, position).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from hashlib import blake2b
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from loaderkit.sampling.mix_rules import MixedSource, Segment

Int64 = NDArray[np.int64]


class BatchSamples(NamedTuple):
    """The samples, or sequences, of some batches; batch i has those from bounds[i] to bounds[i + 1]: int64 [slots],
    [batches + 1]. `positions`: their positions in the epoch, int64 [slots]. `wrapped`: which ones another rank has as
    well, bool [slots], or None if there are none."""

    indices: Int64
    positions: Int64
    bounds: Int64
    wrapped: NDArray[np.bool_] | None


class Reads(NamedTuple):
    """What must be read for some positions: samples, and the slot, from 0, for which each is read: int64 [reads] both.
    `pieces` are the needed part of each, (first number, length), int64 [reads] both; None if all of it is needed."""

    samples: Int64
    slots: Int64
    num_slots: int
    pieces: tuple[Int64, Int64] | None = None


class SampleOrder(ABC):
    """The order of an epoch. One thread at a time may call it: `for_thread` gives others their own.

    The methods defined here are right where each position is a sample of one source.
    """

    unit: Literal["samples", "sequences", "batches"] = "samples"
    """What lies at a position."""
    epochs_differ = False  # in length
    length: int | None = None  # of sequences, in tokens
    knows_lengths = False  # True: the order goes by the lengths of samples
    block_bounds: Int64 | None = None
    """Where blocks of neighbours come together: the first sample of every block and, last, the number of samples."""
    block_spread = 0  # the positions, about, from a block's first sample to its last one
    sources: Sequence[MixedSource] = ()
    """The sources that take turns; empty if there is only one source."""
    repeats = False  # True: a sample may come several times in an epoch, each time with random numbers of its own
    share_of: Literal["samples", "tokens"] = "samples"
    """What the weights of sources are shares of."""
    keeps_neighbours = False  # True: a rank's batches are of consecutive positions, as neighbours are read together

    @abstractmethod
    def num_positions(self, epoch: int) -> int:
        """The positions of an epoch; `UNKNOWN` if it has no end, or if they are known only at its end."""

    @abstractmethod
    def indices(self, epoch: int, positions: Int64) -> Int64:
        """What lies at each position, in [0, num_positions(epoch)): the index of a sample, or the number of a sequence or a
        batch. int64, same shape."""

    def for_thread(self) -> Self:
        """This order, for one thread more."""
        return copy(self)

    @property
    def core(self) -> SampleOrder:
        """The order of samples that this one is made of."""
        return self

    def num_samples(self, epoch: int) -> int:
        """The number of samples in an epoch; if they are packed, of sequences."""
        return self.num_positions(epoch)

    def samples_of(self, indices: Int64) -> Int64:
        """The samples of the source that the slots of batches are made of, if each slot is made of one sample: int64
        [n] both."""
        return indices

    def keys(self, epoch: int, indices: Int64, keys_of: Callable[[Int64], list[str]]) -> list[str]:
        """The names of what is in the slots of a batch; `keys_of` gives the keys of samples."""
        return keys_of(indices)

    def lengths_of(self, samples: Int64) -> Int64:
        """The tokens of some samples, where they are known: int64 [n]."""
        raise AssertionError(f"{type(self).__name__} knows no lengths")

    def others(self, index: int, draws: NDArray[np.float64]) -> Int64 | None:
        """As `Source.others`, if the order decides which samples may come; None if it does not."""
        return None

    def digests(self) -> dict[str, str]:
        """The parts of a state's fingerprint in which this order differs from others with the same sources and shuffle."""
        return {}

    def slots_of(self, batch_size: int) -> tuple[int, int]:
        """(about how many, at most) slots of a batch of that many positions."""
        return batch_size, batch_size

    def in_batches(self, epoch: int, positions: Int64, batch_size: int, start: int, world_size: int) -> BatchSamples:
        """What one rank's next batches hold. Their `positions` come from a `BatchSampler` that began at `start`;
        positions past the end wrap."""
        num_positions, wrapped = self.num_positions(epoch), None
        if positions[-1] >= num_positions:
            wrapped = positions >= num_positions
            positions = positions % num_positions
        indices = self.indices(epoch, positions)
        bounds = np.minimum(np.arange(-(-len(positions) // batch_size) + 1) * batch_size, len(positions))
        return BatchSamples(indices.copy() if indices is positions else indices, positions, bounds, wrapped)

    def reads(self, epoch: int, positions: Int64, start: int, world_size: int) -> Iterator[Reads]:
        """What must be read for positions as above, some at a time."""
        indices = self.indices(epoch, positions % self.num_positions(epoch))
        yield Reads(indices, np.arange(len(indices)), len(indices))

    def blocks_of_rank(self, epoch: int, rank: int, world_size: int) -> NDArray[np.bool_]:
        """bool [blocks]: the blocks of which a rank has at least half of the samples."""
        return np.zeros(0, np.bool_)

    def positions_before(self, epoch: int, position: int) -> int:
        """The first position of `core` on which nothing before `position` depends."""
        return position

    def num_before(self, epoch: int, position: int) -> tuple[int, int]:
        """The positions of `core` that surely come before a position, and about how many do."""
        return position, position

    def spans(self, name: str, epoch: int) -> list[tuple[int, int]]:
        """The parts [begin, end) of an epoch among which one of several sources has samples."""
        return [(0, self.num_positions(epoch))]

    # ---------------------------------------------------------------------------------------- several sources, of `core`

    def places(self, epoch: int, position: int) -> list[int]:
        """The place of every source in its own sequence, from epoch 0 on, before a position of an epoch."""
        return []

    def course(self, epoch: int, position: int) -> list[Segment]:
        """The segments of an epoch that begin before a position."""
        return []

    def explained(self) -> list[Mapping[str, object]]:
        """What an epoch takes from each source, segment by segment; see `mixture.explained`."""
        return []


class WrappedOrder(SampleOrder):
    """An order of what is made of samples, planned by their lengths. From any thread.

    The methods defined here are right where positions are positions of the inner order.
    """

    epochs_differ = True
    knows_lengths = True

    def __init__(self, inner: SampleOrder) -> None:
        self._inner = inner

    def for_thread(self) -> Self:
        return self

    @property
    def core(self) -> SampleOrder:
        return self._inner.core

    def indices(self, epoch: int, positions: Int64) -> Int64:
        return positions

    def num_positions(self, epoch: int) -> int:
        return self._inner.num_positions(epoch)

    def lengths_of(self, samples: Int64) -> Int64:
        return self._inner.lengths_of(samples)

    def digests(self) -> dict[str, str]:
        return self._inner.digests()

    def positions_before(self, epoch: int, position: int) -> int:
        return self._inner.positions_before(epoch, position)

    def num_before(self, epoch: int, position: int) -> tuple[int, int]:
        return self._inner.num_before(epoch, position)


def digest_of(lengths: Int64) -> str:
    """16 hexadecimal digits of the lengths of all samples."""
    return blake2b(np.ascontiguousarray(lengths).data, digest_size=8).hexdigest()
