"""What the trial of several workers against one has found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

_HELD = 2 / 3


class ContentionResult(NamedTuple):
    """What came of letting all workers work, or one alone."""

    alone_share: float | None = None
    """What one alone got done, in shares of what all did together. About one over `num_inside`: each goes at its own pace.
    About 1: there is something that only one of them can use at a time. None: there was no reason to try."""
    waiting_share: float | None = None
    """Of the time in which workers that overlapped could have had a CPU, how much they waited for something else."""
    gil_taken: float | None = None
    """Of the times that a worker woke up and wanted Python's lock, the share at which another thread had it."""
    num_inside: float | None = None
    """How many there were on average while workers overlapped: fewer than all of them where the loop takes no more."""
    slowdowns: Mapping[str, float] = {}
    """By stage, how many times as long an item took while workers overlapped as with one alone, had there always been a CPU.
    About 1: each goes at its own pace. About `num_inside`: only one at a time can be in that stage. Of a lock that one worker
    has many times while another waits, only `alone_share` tells. Without those that were not tried."""

    @property
    def holds_gil(self) -> bool | None:
        """Whether a worker keeps others from Python's lock; None: not known."""
        return None if self.gil_taken is None else self.gil_taken > _HELD


def merged_trials(trials: Sequence[ContentionResult]) -> ContentionResult:
    """What came of the same trial in several processes that each let their own workers take turns: what they saw on average,
    those that saw anything."""
    stages = {stage: None for trial in trials for stage in trial.slowdowns}
    return ContentionResult(
        _mean(trial.alone_share for trial in trials),
        _mean(trial.waiting_share for trial in trials),
        _mean(trial.gil_taken for trial in trials),
        _mean(trial.num_inside for trial in trials),
        {stage: fmean(trial.slowdowns[stage] for trial in trials if stage in trial.slowdowns) for stage in stages},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None: of none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
