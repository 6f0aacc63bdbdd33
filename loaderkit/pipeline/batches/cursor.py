"""Walks the epochs and steps of one rank, from any position on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.samples.chunk import BatchWork
from loaderkit.sampling.order import BatchSamples, SampleOrder
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import WHOLE, Shard

_BLOCK_POSITIONS = 8192  # computed at once: one batch of 64 at a time costs ten times as much a position


class _ComputedBatches(NamedTuple):
    """The samples of the batches [step, end_step), computed at once."""

    step: int
    end_step: int
    samples: BatchSamples


class BatchCursor:
    """Gives the batches of one rank; if several worker processes share them, those of `shard`."""

    def __init__(
        self,
        order: SampleOrder,
        schedule: BatchSampler,
        *,
        num_epochs: int | None = None,
        shard: Shard = WHOLE,
        on_seek: Callable[[int, int, Shard], None] | None = None,
    ) -> None:
        """`on_seek` is called with (epoch, position, shard) whenever the next batch does not follow the last one, or
        the shard changes."""
        self._order = order.for_thread()
        self._schedule = self._of_all = schedule  # the schedule of the current epoch, and of any epoch
        self._num_epochs = num_epochs
        self._shard = shard
        self._on_seek = on_seek
        self._block: _ComputedBatches | None = None
        self._borders: deque[tuple[tuple[int, int], Shard | None]] = deque()  # ahead, with the shard from there on
        self._is_redealt = False  # since the last seek
        self._last: tuple[int, int] | None = None  # where the last batch begins, since then
        self.seek(0, 0)

    @property
    def next_position(self) -> tuple[int, int]:
        """(epoch, global position) of the next batch."""
        return (self._epoch + 1, 0) if self._step >= self._num_steps else (self._epoch, self._end)

    @property
    def first_step(self) -> int:
        """The step of the next batch, if that is in the epoch of the last `seek`."""
        return self._step

    def begins_at(self, epoch: int, position: int, shard: Shard | None = None) -> tuple[int, int] | None:
        """The `next_position` after `seek` with the same arguments; None if it cannot be known, as the shard has
        changed since the last one."""
        if self._is_redealt or shard not in (None, self._shard):
            return None
        return self._of_all.next_position_after(epoch, position, self._shard.number)

    def seek(self, epoch: int, position: int, shard: Shard | None = None) -> None:
        """Continue at global `position` of `epoch`, with the batches of `shard` (None keeps the shard), counted from
        there."""
        self._shard, self._is_redealt, self._last = shard or self._shard, False, None
        self._borders.clear()
        self._go_to(epoch, position)

    def redeal(self, border: tuple[int, int], shard: Shard | None) -> None:
        """From the batch at `border`, an (epoch, position), on make the batches of `shard`, counted from there, or no
        more if it is None. Raises ValueError if a batch behind `border` was given already."""
        if self._last is not None and self._last >= border:
            raise ValueError(f"the batch at {self._last} was begun already, and the border is {border}")
        self._borders.append((border, shard))
        self._is_redealt = True

    def _go_to(self, epoch: int, position: int) -> None:
        self._enter(epoch, position)
        self._pass_over(self._shard.number)
        if self._on_seek is not None:
            self._on_seek(epoch, position, self._shard)

    def next(self) -> BatchWork | None:
        """The next batch, without memory or chunks; None after the last epoch, and for a process that is to make no more."""
        while self._borders and self.next_position >= self._borders[0][0]:
            (epoch, position), shard = self._borders[0]
            if shard is None:
                return None
            self._borders.popleft()
            self._shard = shard
            self._go_to(epoch, position)
        while self._step >= self._num_steps:
            if self._schedule.num_batches() == 0:
                return None
            self._enter(self._epoch + 1, 0)
        if self._num_epochs is not None and self._epoch >= self._num_epochs:
            return None
        epoch, step, begin = self._epoch, self._step, self._end
        self._last = (epoch, begin)
        positions, indices, wrapped = self._samples()
        self._pass_over(1)
        work_item = BatchWork(
            epoch=epoch, step=step, positions=positions, indices=indices, wrapped=wrapped, begin=begin, end=self._end
        )
        if self._shard.of > 1:
            self._pass_over(self._shard.of - 1)
        return work_item

    def _enter(self, epoch: int, position: int) -> None:
        self._epoch, self._start, self._step, self._end = epoch, position, 0, position
        self._schedule = self._of_all.of_epoch(epoch)
        self._num_steps = self._schedule.num_batches(position)
        self._block = None

    def _pass_over(self, num_batches: int) -> None:
        while self._step + num_batches > self._num_steps and self._schedule.num_batches():
            num_batches -= self._num_steps - self._step
            self._enter(self._epoch + 1, 0)
        self._step += num_batches
        self._end = self._schedule.position_after(self._start, self._step)

    def _samples(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]:
        """(positions, indices, wrapped) of the batch at the current step."""
        block = self._block
        if block is None or self._step >= block.end_step:
            block = self._block = self._next_block()
        indices, positions, bounds, wrapped = block.samples
        slots = slice(*bounds[self._step - block.step : self._step - block.step + 2].tolist())
        # Slices that only this batch uses: bad samples are replaced in `indices`.
        return positions[slots], indices[slots], None if wrapped is None else wrapped[slots]

    def _next_block(self) -> _ComputedBatches:
        order, schedule = self._order, self._schedule
        num_steps = max(1, _BLOCK_POSITIONS // order.slots_of(schedule.batch_size)[0])
        positions = schedule.positions(self._start, self._step, num_steps)
        samples = order.in_batches(self._epoch, positions, schedule.batch_size, self._start, schedule.world_size)
        return _ComputedBatches(self._step, self._step + num_steps, samples)
