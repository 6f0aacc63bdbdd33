"""The result of comparing one worker alone with all workers of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Protocol

_HELD = 2 / 3


class ContentionResult(NamedTuple):
    """How one worker alone compares with all workers of a pool. A value is None if it was not measured."""

    alone_share: float | None = None
    """The throughput of one worker alone, as a share of the throughput of all. About 1 / `num_inside`: each works at
    its own pace. About 1: all need something that only one can use at a time. None if there was no reason to
    compare."""
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
        """True if a worker keeps others from the GIL; None if that is not known."""
        return None if self.gil_taken is None else self.gil_taken > _HELD


class StageLoad(Protocol):
    """The load of one stage's workers, in s. Of `busy_s` they were ready to run for `delayed_s` while no CPU was free.
    `waits`: they may wait for something other than the GIL while another worker holds it."""

    name: str
    waits: bool
    busy_s: float
    cpu_s: float
    delayed_s: float


def charged_to_holders(
    waits_s: Mapping[str, float], stages: Sequence[StageLoad], trials: Iterable[ContentionResult]
) -> dict[str, float]:
    """The loop's waits by stage, with what a chunk waited for a CPU or for the GIL charged to the stages that used them, in
    proportion to their CPU time. The sum stays.

    Such a chunk may be in any stage. If it is in a cheap stage, the loop really waits for the expensive one.
    """
    charged = dict(waits_s)
    used_s = {row.name: row.cpu_s for row in stages if row.cpu_s > 0}
    if not used_s:
        return charged
    is_gil_held = any(trial.holds_gil for trial in trials)
    moved_s = 0.0
    for row in stages:
        if not charged.get(row.name) or row.busy_s <= 0:
            continue
        held_up_s = row.delayed_s
        if is_gil_held and not row.waits:
            held_up_s = row.busy_s - row.cpu_s
        part_s = charged[row.name] * min(1.0, max(0.0, held_up_s / row.busy_s))
        charged[row.name] -= part_s
        moved_s += part_s
    if moved_s:
        for stage, cpu_s in used_s.items():
            charged[stage] = charged.get(stage, 0.0) + moved_s * cpu_s / sum(used_s.values())
    return charged


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
