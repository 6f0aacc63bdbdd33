"""When the consumer makes a batch itself rather than wake a worker up for it.

Where a batch takes a tenth of a millisecond of Python, to wake a worker, to be woken by it, and to pass the GIL to and fro
takes half as long again, and little is gained: only one thread at a time holds the GIL. So a loop that does nothing between
its batches is served as by `executor: inline`, unless several workers were measured to be faster than that; as soon as it
does something, the workers read ahead again.

Only for pipelines that run no code but ours, and none that depends on the thread it runs in (torch's modes are a thread's).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from loaderkit.prefetch.intake import Intake

_QUICK_S = 1e-3  # a batch that would be late by more is not risked
_TIGHT = 0.25  # of a batch's time: a loop that takes no longer between two batches does nothing
_MOMENT_S = 20e-6  # to hand over a batch by another thread takes longer; and 10 us are the loader's own
_NUM_TIGHT = 8  # in a row, before the consumer does it itself
_MOST_TIGHT = 16  # that are remembered;
_LOSS = 4  # so many are forgotten whenever the loop is away for longer: one time is another program's, three are the loop's own
_NUM_SKIPPED = 48  # batches at the beginning of the workers' turn, until they have read ahead as far as they may
_NUM_TIMED = 64
_NUM_WINDOWS = 6  # of so many, both ways in turns: the quickest counts, as other programs come and go
_NUM_PLAIN = 4  # are enough where one way takes no longer than
_PLAIN = 0.6  # of the other's time
_GAIN = 0.95
_PATIENCE = 10_000  # batches until both ways are tried again
_MOST_PATIENCE = 64 * _PATIENCE


class Trial:
    """Which way is quicker for a loop that does nothing else: several workers, or the consumer by itself. Found out by turns
    of both, and again later, ever more rarely while the answer stays the same."""

    def __init__(self) -> None:
        self.alone = True  # the way that is tried, or was found to be quicker
        self._num_left = 0  # batches until the next trial
        self._patience = _PATIENCE
        self._was_alone: bool | None = None  # what the last trial said
        self._begin()

    def _begin(self) -> None:
        self._least_s = [math.inf, math.inf]  # for so many batches: by workers, alone
        self._num_windows = 0
        self._begin_window()

    def _begin_window(self) -> None:
        self._num_batches = 0
        self._begun_s: float | None = None

    def broken_off(self) -> None:
        """The loop does something else meanwhile, so these batches say nothing."""
        self._begin_window()

    def goes_on(self, now: float, num_ready: int) -> bool:
        """The loop asks for one more batch, of which `num_ready` are there: whether it is to make it itself."""
        if self._num_left:
            self._num_left -= 1
            return self.alone
        self._num_batches += 1
        if self._begun_s is None:
            if num_ready == 0 if self.alone else self._num_batches > _NUM_SKIPPED:
                self._num_batches, self._begun_s = 0, now
        elif self._num_batches == _NUM_TIMED or now - self._begun_s > self._least_s[not self.alone] / _PLAIN:
            self._least_s[self.alone] = min(self._least_s[self.alone], now - self._begun_s)
            self._num_windows += 1
            self._begin_window()
            self.alone = not self.alone
            is_plain = self._num_windows == _NUM_PLAIN and min(self._least_s) < _PLAIN * max(self._least_s)
            if is_plain or self._num_windows == _NUM_WINDOWS:
                self._decide()
        return self.alone

    def _decide(self) -> None:
        workers_s, alone_s = self._least_s
        self.alone = alone_s < _GAIN * workers_s
        is_same = self.alone == self._was_alone
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if is_same else _PATIENCE
        self._was_alone, self._num_left = self.alone, self._patience
        self._begin()


class SelfService:
    """One loop's habit. All methods belong to the consumer's thread. `one_works`: only one worker makes batches, because
    there is only one, or because that is better than several."""

    def __init__(self, intake: Intake, one_works: Callable[[], bool]) -> None:
        self._intake = intake
        self._one_works = one_works
        self._trial = Trial()
        self._num_tight = 0  # batches that the loop did nothing between
        self._left_s: float | None = None

    def comes(self, now: float) -> bool:
        """The loop asks for a batch: whether it is to make it itself."""
        quick_s = self._intake.batch_s
        is_tight = (
            self._left_s is not None
            and quick_s is not None
            and quick_s < _QUICK_S
            and now - self._left_s < max(_TIGHT * quick_s, _MOMENT_S)
        )
        self._num_tight = min(self._num_tight + 1, _MOST_TIGHT) if is_tight else max(0, self._num_tight - _LOSS)
        may_be = self._num_tight >= _NUM_TIGHT and not torch.is_inference_mode_enabled()
        if may_be and not self._one_works():
            wanted = self._trial.goes_on(now, self._intake.num_ready)
        else:
            wanted = may_be
            self._trial.broken_off()
        if wanted != self._intake.is_self_service:
            self._intake.set_self_service(wanted)
        return wanted

    def leaves(self, now: float) -> None:
        """The loop has got its batch."""
        self._left_s = now
