"""The loop, cut at its batches: how long it computed and waited. It takes bounded memory, and 3 us a batch."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from loaderkit.checkpoint.save_log import SAVES
from loaderkit.engine.metrics.histogram import Histogram

_MOST_STEPS = 2048


class StepLog:
    """Sums over all steps, and single steps, thinned out above 2,048. One thread writes.

    outside ──on_request──> waiting ──on_batch──> computing ──on_request──> waiting ──on_end──> outside
                                                      └────────── on_epoch, close ─────────────────┘

    A step begins with a batch: the loop computes until it requests the next one, and the step ends when that one comes. The
    time after the last batch is `outside`: it may be computing, or a validation after `break`.

    The loop drops a batch when `next()` has returned the following one, or anywhere in its step. So that this is not counted as
    computing, the log holds each batch until the second request after it, drops it there, and times that.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.end_s = self._mark_s = clock()
        self.reset()

    def reset(self) -> None:
        """Restart the sums at the last request: after an error the engine's own counters restart, too."""
        self.begin_s = self._mark_s
        self._computed_s: float | None = None  # of the current step; None between steps
        self._is_computing = False
        self.num_batches = self.num_steps = 0
        self.compute_s = self.next_s = self.outside_s = 0.0  # they sum to end_s - begin_s
        self.release_s = 0.0  # of next_s
        self.save_waiting_s = self.save_staging_s = 0.0  # of compute_s
        self._pauses_s = self._pauses()
        self._paused_s = 0.0  # of the current step's computing
        self._dropped: list[Any] = []  # the fields of a batch that the loop has dropped
        self._current: list[Any] = []  # of the one it has
        self._is_first = True  # the step is the first one of its epoch
        self._epoch_s = self._epoch_compute_s = self._wait_s = 0.0  # of the current epoch's other steps
        self._opened_s = 0.0  # it took to begin the epoch: of the wait for its first batch
        self._epoch_steps = self.num_later_steps = 0
        self.utilised_steps = 0.0  # num_later_steps, each times its epoch's share of computing
        self.first_wait_s: float | None = None
        self.computes, self.waits, self.steps = Histogram(), Histogram(), Histogram()
        self.every = 1
        self._kept = array("d")  # (at, compute, wait) of each `every`th step, flat

    def on_opened(self) -> None:
        """The loop has begun a pass over the data, and that took a while."""
        self._opened_s = self._pass()
        self.next_s += self._opened_s

    def on_request(self) -> None:
        """The loop requests a batch."""
        passed_s = self._pass()
        if self._is_computing:
            self.compute_s += passed_s
            self._computed_s = passed_s
            self._paused_s = self._saving()
            trained_s = passed_s - self._paused_s
            if not self._is_first:
                self._epoch_steps += 1
                self._epoch_compute_s += trained_s
                self._epoch_s += self._wait_s + trained_s
            self._is_first = False
        else:
            self.outside_s += passed_s
            self._computed_s = None
        self._is_computing = False
        if self._dropped:
            self._dropped = []
            self.release_s += self._clock() - self._mark_s

    def on_batch(self, batch: Iterable[Any] = ()) -> None:
        """The batch is handed over: a dict, which the loop may change, or a tuple."""
        fields = batch.values() if isinstance(batch, dict) else batch
        self._dropped, self._current = self._current, list(fields)
        self._wait_s = wait_s = self._pass()
        self.next_s += wait_s
        if self._opened_s:
            self._wait_s = wait_s = wait_s + self._opened_s
            self._opened_s = 0.0
        if self.first_wait_s is None:
            self.first_wait_s = wait_s
        self._count(wait_s)
        self.num_batches += 1
        self._is_computing = True
        self._pauses_s = self._pauses()

    def on_end(self) -> None:
        """No batch comes: the epoch is over, or an error was raised."""
        wait_s = self._pass()
        self.next_s += wait_s
        self._epoch_s += wait_s
        self._count(0.0)

    def on_epoch(self) -> None:
        """The loop begins another pass over the data."""
        self.outside_s += self._pass()
        self._is_computing = False
        self._is_first = True
        self.num_later_steps += self._epoch_steps
        self.utilised_steps += self._epoch_steps * self._epoch_compute_s / max(self._epoch_s, 1e-9)
        self._epoch_s, self._epoch_compute_s, self._epoch_steps = 0.0, 0.0, 0

    def on_left(self) -> None:
        """After `on_epoch`: the loop has dropped an iterator before its end, and that took a while."""
        self.next_s += self._pass()

    def close(self) -> None:
        """End the last step and the log."""
        self.on_epoch()
        self.end_s = self._mark_s
        self._dropped = self._current = []

    def kept(self) -> list[tuple[float, float, float]]:
        """(at, compute, wait) of single steps in s, `at` since the beginning."""
        kept = self._kept
        return [(kept[n], kept[n + 1], kept[n + 2]) for n in range(0, len(kept), 3)]

    @staticmethod
    def _pauses() -> tuple[float, float]:
        return SAVES.pauses.waiting_s, SAVES.pauses.staging_s

    def _saving(self) -> float:
        """Count the seconds for which this step's saves held the loop up, and return them."""
        (waited_s, staged_s), self._pauses_s = self._pauses_s, self._pauses()
        waited_s, staged_s = self._pauses_s[0] - waited_s, self._pauses_s[1] - staged_s
        self.save_waiting_s += waited_s
        self.save_staging_s += staged_s
        return waited_s + staged_s

    def _pass(self) -> float:
        now = self._clock()
        passed_s, self._mark_s = now - self._mark_s, now
        return passed_s

    def _count(self, wait_s: float) -> None:
        compute_s, self._computed_s = self._computed_s, None
        if compute_s is None:
            return
        if self.num_steps % self.every == 0:
            self._kept.extend((self._mark_s - wait_s - compute_s - self.begin_s, compute_s, wait_s))
            if len(self._kept) > 3 * _MOST_STEPS:
                self._kept = array("d", [value for step in self.kept()[::2] for value in step])
                self.every *= 2
        self.num_steps += 1
        self.computes.add(compute_s - self._paused_s, 1)
        self.waits.add(wait_s, 1)
        self.steps.add(compute_s + wait_s, 1)
