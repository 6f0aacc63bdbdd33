"""Chunks of a batch in which several slots are made of one sample, and samples that two batches share."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import StageError
from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.samples.sample import Sample

_LOOK_S = 0.05


class MadeSample(NamedTuple):
    """What the stages before `expand` made of a sample: the `sample`, or the error that makes it bad; neither if it was
    dropped."""

    sample: Sample | None
    error: StageError | None = None


class Handover:
    """A sample that consecutive batches share: the first of them makes it, the others take it."""

    def __init__(self, epoch: int, sample: int, maker: BatchWork) -> None:
        self.epoch, self.sample = epoch, sample
        self._maker: BatchWork | None = maker  # None once it is there
        self._made = MadeSample(None)
        self._is_there = threading.Event()

    @property
    def is_lost(self) -> bool:
        """True if it is not there, and will not be."""
        maker = self._maker
        return maker is not None and (maker.cancelled or maker.error is not None)

    def put(self, made: MadeSample) -> None:
        self._made, self._maker = made, None
        self._is_there.set()

    def take(self, work_item: BatchWork) -> MadeSample:
        """Wait for it, for a batch. The batch that makes it is at work in another thread, or was. Raises the error that
        has stopped that batch."""
        while not self._is_there.wait(_LOOK_S):
            maker = self._maker
            if maker is not None and maker.error is not None:
                raise maker.error
            if work_item.cancelled or (maker is not None and maker.cancelled):
                break
        return self._made


class ExpandedChunk(SampleChunk):
    """Slots [lo, hi) of a batch in which `num` slots are made of one sample. Up to `expand` its rows are these samples,
    except for a first one that is `borrowed` from the batch before. After it the rows are the slots.

    `lent`: the last sample, if the next batch needs it, too.
    """

    __slots__ = (
        "_num_copied",
        "_own_slots",
        "_samples_of_slots",
        "borrowed",
        "expanded",
        "is_expanded",
        "lent",
        "num",
        "taken",
    )

    def __init__(
        self,
        work_item: BatchWork,
        lo: int,
        hi: int,
        expanded: NDArray[np.int64],
        num: int,
        *,
        borrowed: Handover | None = None,
        lent: Handover | None = None,
    ) -> None:
        """`expanded`: index * num + number of every slot, int64 [hi - lo]."""
        samples = expanded // num
        is_first = np.diff(samples, prepend=-1) != 0
        self._own_slots = np.flatnonzero(is_first)[borrowed is not None :]
        super().__init__(work_item, lo, hi, samples[self._own_slots])
        self.samples = [None] * len(self._own_slots)
        self._samples_of_slots: list[int] = (np.cumsum(is_first) - 1).tolist()
        self._num_copied = 0
        self.expanded, self.num = expanded, num
        self.borrowed, self.lent = borrowed, lent
        self.taken = MadeSample(None)
        self.is_expanded = False

    @property
    def num_failed(self) -> int:
        """If a sample has failed before `expand`, all of its slots have; it counts once."""
        return len(self.failures) - self._num_copied

    def slot_of(self, row: int) -> int:
        return self.lo + (row if self.is_expanded else int(self._own_slots[row]))

    def index_of(self, row: int) -> int:
        if self.is_expanded or row >= len(self.indices):  # reports ask for the index of the last slot at any time
            return int(self.expanded[row]) // self.num
        return int(self.indices[row])

    def number_of(self, row: int) -> int:
        """Which of its sample's `num` slots this one is."""
        return int(self.expanded[row]) % self.num

    def replacement(self, row: int, index: int) -> ExpandedChunk:
        slot = self.slot_of(row)
        return ExpandedChunk(
            self.work_item, slot, slot + 1, np.array([index * self.num + self.number_of(row)]), self.num
        )

    def made(self, row: int) -> MadeSample:
        """What has become of the sample at `row`, before `expand`."""
        return MadeSample(self.samples[row], self.failures.get(row))

    def unfold(self) -> list[Sample | None]:
        """From now on the rows are the slots. Returns for each slot the sample it is made of, or None for one that is
        bad or dropped."""
        made = [self.made(row) for row in range(len(self.samples))]
        if self.borrowed is not None:
            made.insert(0, self.taken)
        of_slots = [made[number] for number in self._samples_of_slots]
        num_failed = len(self.failures)
        self.is_expanded, self.indices, self.samples, self.draws = True, self.expanded, [None] * len(self), {}
        self.parts = None
        self.failures = {row: one.error for row, one in enumerate(of_slots) if one.error is not None}
        self.dropped = [row for row, one in enumerate(of_slots) if one.sample is None and one.error is None]
        self._num_copied = len(self.failures) - num_failed
        return [one.sample for one in of_slots]

    def let_go(self) -> None:
        super().let_go()
        self.borrowed = self.lent = None
        self.taken = MadeSample(None)


class ExpandedChunks:
    """Makes the chunks of batches, in order, so that a sample shared by two batches is made once. From one thread at a
    time."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._last: Handover | None = None  # a part of which the next batch may need

    def make(self, work_item: BatchWork, lo: int, hi: int, expanded: NDArray[np.int64]) -> ExpandedChunk:
        """The work on slots [lo, hi); the chunks of a batch are made one behind another, and share no sample."""
        borrowed, lent = self._last if lo == 0 else None, None
        first, last = int(expanded[0]) // self._num, int(expanded[-1]) // self._num
        if borrowed is not None and (borrowed.is_lost or (borrowed.epoch, borrowed.sample) != (work_item.epoch, first)):
            borrowed = None
        if hi == len(work_item):
            is_whole = int(expanded[-1]) % self._num == self._num - 1
            if not is_whole and (borrowed is None or first != last):
                lent = Handover(work_item.epoch, last, work_item)
            self._last = lent or (None if is_whole else borrowed)
        return ExpandedChunk(work_item, lo, hi, expanded, self._num, borrowed=borrowed, lent=lent)

    def single(self, work_item: BatchWork, lo: int, hi: int, samples: NDArray[np.int64]) -> ExpandedChunk:
        """The work on single samples: for each the part that its position in the epoch determines."""
        numbers = work_item.positions[lo:hi] % self._num
        return ExpandedChunk(work_item, lo, hi, samples * self._num + numbers, self._num)

    def aligned(self, bounds: list[int], expanded: NDArray[np.int64]) -> list[int]:
        """The bounds of chunks of a batch, moved so that none cuts a sample."""
        firsts = np.flatnonzero(np.diff(expanded // self._num, prepend=-1))
        moved = firsts[np.searchsorted(firsts, bounds[1:-1], "right") - 1].tolist()
        return [*dict.fromkeys([0, *moved]), bounds[-1]]
