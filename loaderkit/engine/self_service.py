"""When the consumer makes a batch itself rather than wake a worker up for it.

Where a batch takes a tenth of a millisecond of Python, to wake a worker, to be woken by it, and to pass the GIL to and fro
takes half as long again, and nothing is gained: only one thread at a time holds the GIL. So a loop that does little between
its batches tries both, being handed them and making them, and keeps the way that is faster; as soon as it does more, the
workers read ahead again.

Only for pipelines that run no code but ours, and none that depends on the thread it runs in (torch's modes are a thread's).
"""

from __future__ import annotations

from statistics import median

import torch

from loaderkit.engine.scheduler import Scheduler

# Neither a batch nor what the loop does before it wants the next one may take longer: it might be late by more than a hand-over
# can cost, and with a loop that does something else for long there is nothing to be gained.
_QUICK_S = 1e-3
# The loop's part in the mean: once in a while it may look at a batch, or write a line. One that takes several batches and then
# trains is away for long, though.
_SMOOTHING = 1 / 8
# A trial: each way three times in turns, or twice where that tells, for so long, which is how long who has the GIL may keep it,
# and for so many batches behind the first ones, which the other way may have made.
_NUM_TRIALS = 3
_TRIAL_S = 5e-3
_LEAST = 32
_NUM_PASSED = 8
_PATIENCE_S = 2.0  # for which the way that was faster is kept; doubled each time that it is so again
_MOST_PATIENCE_S = 30.0


class SelfService:
    """One loop's habit. All methods but `forget` belong to the consumer's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._away_s = _QUICK_S  # how long the loop takes between two batches
        self._left_s: float | None = None
        self._is_own = False  # the way of now: the loop makes its batches itself
        self._until_s = 0.0  # while that is settled
        self._was_faster: bool | None = None  # the own way, when that was settled last
        self._patience_s = _PATIENCE_S
        self._num_batches = 0  # on trial
        self._since_s = 0.0
        self._times: dict[bool, list[float]] = {True: [], False: []}  # of a batch, in s, by way
        self._is_forgotten = False

    def comes(self, now: float) -> bool:
        """The loop asks for a batch: whether it is to make it itself."""
        if self._left_s is not None:
            self._away_s += _SMOOTHING * (now - self._left_s - self._away_s)
        batch_s = self._scheduler.batch_s
        is_quick = batch_s is not None and max(batch_s, self._away_s) < _QUICK_S
        if not is_quick or self._is_forgotten:
            self._begin_anew(now)
        wanted = is_quick and not torch.is_inference_mode_enabled() and self._is_to_make_it(now)
        if wanted != self._scheduler.is_self_service:
            self._scheduler.set_self_service(wanted)
        return wanted

    def leaves(self, now: float) -> None:
        """The loop has got its batch."""
        self._left_s = now

    def forget(self) -> None:
        """There are more workers or fewer: try again which way is faster. For any thread."""
        self._is_forgotten = True

    def _begin_anew(self, now: float) -> None:
        """What was seen so far says nothing of the loop as it is now, unless that is settled."""
        if self._is_forgotten:
            self._is_forgotten = False
            self._until_s = now
            self._was_faster = None
        if now >= self._until_s:
            self._is_own = False  # a loop of which nothing is known is read ahead for
        self._num_batches = 0
        self._times = {True: [], False: []}

    def _is_to_make_it(self, now: float) -> bool:
        """Whether it makes this batch itself: to try how long that takes, or since it is settled that this is faster."""
        if now < self._until_s:
            return self._is_own
        if self._is_own and self._scheduler.num_ready:
            self._num_batches = 0  # made by workers
            return True
        self._num_batches += 1
        if self._num_batches == _NUM_PASSED:
            self._since_s = now
        elif self._num_batches >= _NUM_PASSED + _LEAST and now - self._since_s >= _TRIAL_S:
            times = self._times
            times[self._is_own].append((now - self._since_s) / (self._num_batches - _NUM_PASSED))
            self._num_batches = 0
            self._is_own = not self._is_own
            if self._is_decided():
                self._is_own = median(times[True]) < median(times[False])
                is_again = self._is_own == self._was_faster
                self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S) if is_again else _PATIENCE_S
                self._was_faster = self._is_own
                self._until_s = now + self._patience_s
                self._begin_anew(now)
        return self._is_own

    def _is_decided(self) -> bool:
        """Each way was tried three times; or twice, and the better way's worse time is better than the other way's better one:
        no third time would change which median is less."""
        own, handed = self._times[True], self._times[False]
        if len(own) != len(handed) or len(own) < _NUM_TRIALS - 1:
            return False
        return len(own) == _NUM_TRIALS or max(own) < min(handed) or max(handed) < min(own)
