"""Measures how often a worker that wakes up finds the GIL held by another thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean

from loaderkit import native
from loaderkit.engine.metrics.worker_clock import Clock

_SLEEP_S = 1e-3  # a shorter sleep ends before another thread has taken the GIL
_TAKEN_S = 1e-4  # a longer wait for the GIL means that it was taken
_NUM_LEAST, _NUM_KEPT = 3, 32  # answers
_NUM_FIRST, _FIRST_EVERY_S, _EVERY_S = 8, 5e-3, 0.1  # the first answers come sooner


def gil_is_taken() -> bool:
    """Sleep for a millisecond; True if another thread holds the GIL then."""
    return native.gil_wait(_SLEEP_S) > _TAKEN_S


class GilProbe:
    """Keeps the latest answers of `is_taken`.

    Workers in Python hold the GIL at 68 to 100 % of the times, workers in a decoder at 0 to 61 %: on two CPUs, alone and
    beside four other programs.
    """

    def __init__(self, clock: Clock, is_taken: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_taken = is_taken
        self._answers: deque[bool] = deque(maxlen=_NUM_KEPT)
        self._next_s = 0.0

    @property
    def taken_share(self) -> float | None:
        """The share of the latest times at which the GIL was taken; None while there are too few."""
        answers = list(self._answers)  # a copy, since workers append meanwhile
        return fmean(answers) if len(answers) >= _NUM_LEAST else None

    def ask(self, *, every_time: bool) -> None:
        """Ask from a worker's thread, unless the last answer is recent; `every_time`: the next call asks again."""
        if self._clock() < self._next_s:
            return
        self._answers.append(self._is_taken())
        pause_s = _FIRST_EVERY_S if len(self._answers) < _NUM_FIRST else _EVERY_S
        self._next_s = self._clock() + (0.0 if every_time else pause_s)
