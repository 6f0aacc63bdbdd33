"""The result of comparing one worker alone with all workers of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

_HELD = 2 / 3


class ContentionResult(NamedTuple):
    """How one worker alone compares with all workers of a pool. None: not measured."""

    alone_share: float | None = None
    """The throughput of one worker alone, as a share of that of all. About 1 / `num_inside`: each works at its own pace.
    About 1: all need something that only one can use at a time. None: there was no reason to compare."""
    waiting_share: float | None = None
    """Of the time in which workers side by side could have had a CPU, the share in which they waited for something else."""
    gil_taken: float | None = None
    """Of the times that a worker woke up and asked for the GIL, the share at which another thread held it."""
    num_inside: float | None = None
    """How many workers were side by side on average: fewer than there are where the loop takes no more."""
    slowdowns: Mapping[str, float] = {}
    """By stage that was compared: how many times as long an item took with several workers as with one, time without a free
    CPU left out. About 1: each works at its own pace. About `num_inside`: only one at a time can be in that stage. An unfair
    lock, which one worker takes many times while another waits, shows only in `alone_share`."""

    @property
    def holds_gil(self) -> bool | None:
        """True if a worker keeps others from the GIL; None: not known."""
        return None if self.gil_taken is None else self.gil_taken > _HELD


def merged_trials(trials: Sequence[ContentionResult]) -> ContentionResult:
    """The mean of what several processes measured of the same pool; processes that measured nothing are left out."""
    stages = {stage: None for trial in trials for stage in trial.slowdowns}
    return ContentionResult(
        _mean(trial.alone_share for trial in trials),
        _mean(trial.waiting_share for trial in trials),
        _mean(trial.gil_taken for trial in trials),
        _mean(trial.num_inside for trial in trials),
        {stage: fmean(trial.slowdowns[stage] for trial in trials if stage in trial.slowdowns) for stage in stages},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
