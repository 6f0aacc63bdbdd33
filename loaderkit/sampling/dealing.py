"""Decides which of several loading processes makes each batch, and where a process begins that replaces another or
joins them.

deal to 2:  0 1 0 1 0 1 | 0 1 2 0 1 2   deal to 3
                        ^ border, at a full round of turns behind all that any process may have opened
"""

from __future__ import annotations

from typing import NamedTuple

from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import Shard

Place = tuple[int, int]
"""(epoch, global position) at which a batch begins."""


class Begin(NamedTuple):
    """Where a process begins: from `base` on it makes the batches of `shard`, counted from there; `first` is its first
    batch."""

    base: Place
    shard: Shard
    first: Place


class BatchDealing:
    """Deals batches to `num_processes` in turns, from the last seek on: process i makes the batches i, i + num_processes, ...

    A process needs only its number and a position to begin at, so another one can replace it at any batch. The new one
    is given the position at which a round of turns began, and skips as many batches as its number says, as after any
    seek.

    `redeal` sets a border: a position from which on batches are dealt to another number of processes. Processes that
    make batches on both sides of it keep their numbers. A seek moves the border to the place that it goes to.
    """

    def __init__(self, schedule: BatchSampler, num_processes: int) -> None:
        self._schedule = schedule
        self.num_processes = num_processes  # that make batches now
        self.next_position: Place = (0, 0)  # of the next batch to be delivered
        self.turn = 0  # the number of the process that makes it
        self._round = self.next_position  # of process 0's batch in the round of the next batch
        self.border: Place | None = None  # of the first batch that is dealt to another number of processes
        self.num_behind = num_processes  # that make batches behind the border
        self.num_left = 0  # batches until the border

    def seek(self, epoch: int, position: int) -> None:
        """Begin a round of turns at another position; if there is a border, it is passed with that."""
        self.next_position = self._round = (epoch, position)
        self.turn = 0
        self.num_processes, self.border = self.num_behind, None

    def redeal(self, num_processes: int, num_ahead: int) -> Place:
        """Deal to another number of processes from the first position on at which no process has opened a batch that
        another one would make, and return that position, the border. `num_ahead`: how many batches a process may have
        opened that are not delivered. There is one border at a time."""
        assert self.border is None, "a border is ahead already"
        num_rounds = num_ahead + (self.turn > 0)
        self.num_left = num_rounds * self.num_processes - self.turn
        self.border, self.num_behind = self._after(self.next_position, self.num_left), num_processes
        return self.border

    @property
    def is_at_border(self) -> bool:
        """True if the next batch is the first one behind the border."""
        return self.border is not None and not self.num_left

    def pass_border(self) -> None:
        """Deal to the other number of processes from now on."""
        assert self.is_at_border
        assert not self.turn, "a border is at a full round"
        self.next_position = self._round = self.border  # type: ignore[assignment]
        self.num_processes, self.border = self.num_behind, None

    def check(self, epoch: int, end: int) -> None:
        """Raise RuntimeError unless the next batch is the one that ends at position `end` of `epoch`; it may have been cut."""
        due = self._after(self.next_position, 1)
        if (epoch, end) <= self.next_position or self._schedule.next_position_after(epoch, end, 0) > due:
            raise RuntimeError(
                f"process {self.turn} of {self.num_processes} gave the batch that ends at {end} of epoch {epoch}, and the one "
                f"from {self.next_position} to {due} was due: an error of loaderkit, which ends the run rather than to give "
                "other batches"
            )

    def delivered(self, epoch: int, end: int) -> None:
        """Note that the next batch was delivered; it ends at position `end` of `epoch`."""
        assert not self.is_at_border
        self.next_position = self._schedule.next_position_after(epoch, end, 0)
        self.turn = (self.turn + 1) % self.num_processes
        self.num_left -= self.border is not None
        if self.turn == 0:
            self._round = self.next_position

    def begin_of(self, number: int, num_finished: int = 0) -> Begin | None:
        """Where a process with this number begins that makes its remaining batches: those neither delivered nor among
        the `num_finished` that wait for delivery. None if none remain, as it makes no batches behind the border."""
        num_here = self._num_left_of(number)
        if num_here is None or num_finished < num_here:
            shard = Shard(number, self.num_processes)
            # The batch of a process that had its turn in this round is in the next one.
            here = self._round
            if number < self.turn:
                here = self._after(self.next_position, self.num_processes - self.turn)
            base = self._after(here, num_finished * self.num_processes)
        elif number < self.num_behind and self.border is not None:
            shard = Shard(number, self.num_behind)
            base = self._after(self.border, (num_finished - num_here) * self.num_behind)
        else:
            return None
        return Begin(base, shard, self._after(base, number))

    def _num_left_of(self, number: int) -> int | None:
        """How many batches of a process, up to the border, are not delivered; None without a border."""
        if self.border is None:
            return None
        if number >= self.num_processes:
            return 0
        num_rounds = (self.num_left + self.turn) // self.num_processes
        return num_rounds - (number < self.turn)

    def _after(self, place: Place, num_batches: int) -> Place:
        return self._schedule.next_position_after(*place, num_batches)
