"""Whose turn it is among several loading processes, and where one that takes the place of another begins."""

from __future__ import annotations

from loaderkit.sampling.schedule import BatchSampler

Place = tuple[int, int]
"""(epoch, global position) at which a batch begins."""


class BatchDealing:
    """Deals batches to `num_processes` in turns, from the last seek on: process i makes the batches i, i + num_processes, ...

    A process needs only a position to begin at and its number, so another one can take its place at any batch: it is given
    the position at which a round of turns began, and passes over as many batches as its number says, as after any seek.
    """

    def __init__(self, schedule: BatchSampler, num_processes: int) -> None:
        self._schedule = schedule
        self._num_processes = num_processes
        self.next_position: Place = (0, 0)  # of the next batch to be delivered
        self.turn = 0  # the number of the process that makes it
        self._round = self.next_position  # of the batch of process 0 in the round that the next batch is of

    def seek(self, epoch: int, position: int) -> None:
        """Begin a round at another position."""
        self.next_position = self._round = (epoch, position)
        self.turn = 0

    def delivered(self, epoch: int, end: int) -> None:
        """Note that the next batch was delivered; it ends at position `end` of `epoch`."""
        self.next_position = self._schedule.next_position_after(epoch, end, 0)
        self.turn = (self.turn + 1) % self._num_processes
        if self.turn == 0:
            self._round = self.next_position

    def unfinished(self, number: int, num_finished: int = 0) -> Place:
        """The first batch of a process that is not delivered yet, nor among `num_finished` that wait for that."""
        num_rounds = num_finished * self._num_processes
        return self._after(self.next_position, (number - self.turn) % self._num_processes + num_rounds)

    def base(self, number: int, num_finished: int = 0) -> Place:
        """The position at which a process with this number has to be put so that it begins with its `unfinished` batch."""
        # The batch of a process that had its turn in this round is in the next one.
        here = self._round if number >= self.turn else self._after(self.next_position, self._num_processes - self.turn)
        return self._after(here, num_finished * self._num_processes)

    def _after(self, place: Place, num_batches: int) -> Place:
        return self._schedule.next_position_after(*place, num_batches)
