"""When the consumer makes a batch itself rather than wake a worker up for it.

Where a batch takes a tenth of a millisecond of Python, to wake a worker, to be woken by it, and to pass the GIL to and fro
takes half as long again, and nothing is gained: only one thread at a time holds the GIL. So a loop that does nothing between
its batches is served as by `executor: inline`; as soon as it does, the workers read ahead again.

Only for pipelines that run no code but ours, and none that depends on the thread it runs in (torch's modes are a thread's).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from loaderkit.prefetch.intake import Intake

_QUICK_S = 1e-3  # a batch that would be late by more is not risked
_TIGHT = 0.25  # of a batch's time: a loop that takes no longer between two batches does nothing
_HAND_OFF_S = 50e-6  # nor does one that takes no longer than it takes to be handed a batch
_NUM_TIGHT = 8


class SelfService:
    """One loop's habit. All methods belong to the consumer's thread. `one_works`: only one worker makes batches, because
    there is only one, or because that is better."""

    def __init__(self, intake: Intake, one_works: Callable[[], bool]) -> None:
        self._intake = intake
        self._one_works = one_works
        self._num_tight = 0  # batches in a row that the loop did nothing between
        self._left_s: float | None = None

    def comes(self, now: float) -> bool:
        """The loop asks for a batch: whether it is to make it itself."""
        quick_s = self._intake.batch_s
        is_tight = (
            self._left_s is not None
            and quick_s is not None
            and quick_s < _QUICK_S
            and now - self._left_s < max(_TIGHT * quick_s, _HAND_OFF_S)
        )
        self._num_tight = self._num_tight + 1 if is_tight else 0
        wanted = self._num_tight >= _NUM_TIGHT and self._one_works() and not torch.is_inference_mode_enabled()
        if wanted != self._intake.is_self_service:
            self._intake.set_self_service(wanted)
        return wanted

    def leaves(self, now: float) -> None:
        """The loop has got its batch."""
        self._left_s = now
