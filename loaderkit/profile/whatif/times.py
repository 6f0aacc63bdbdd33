"""How a stage's times vary: the usual times, and the slow ones, which come alone, in runs, or all at once in a pause."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from loaderkit.profile.report_parts import SlowTime, StageRow

_SLOW = 2.0  # times the median: what takes longer is slow
_MOST_CHANCE = 1.0  # of slow samples within a window: with more of them, that they lie close together says nothing
_RUN = 1.5  # slow chunks close together, where one would be there by chance: they come in runs
_AT_ONCE = 0.25  # of their time: what ends within that, ends at once


@dataclass(frozen=True)
class Times:
    """The variation of a stage's times around its means."""

    factors: tuple[float, ...] = (1.0,)  # of a usual chunk; 1 in the mean
    weights: tuple[float, ...] = (1.0,)
    slow_cpu: float = 0.0  # the share of the stage's CPU time, and of its waiting, by which slow samples are longer
    slow_wait: float = 0.0
    sizes: tuple[float, ...] = (1.0,)  # of the slow ones, relative to each other
    gaps: tuple[float, ...] = (1.0,)  # between them, or their runs, or the pauses; 1 in the mean
    every: float = math.inf  # samples from one slow one, or one run of them, to the next
    run: int = 1  # chunks in a row, and samples from one of them to the next
    chunk: int = 1
    pause: float = 0.0  # how long a pause lasts, in the stage's waits a sample; 0: no pauses
    pause_every_s: float = math.inf


def times_of(row: StageRow, wait_each_s: float, wall_s: float, stride: int) -> Times:
    """The times of a stage that waits `wait_each_s` a sample, from its accounts; it has every `stride`th position of an
    epoch."""
    counts = sum(count for _, count in row.services)
    if not counts or not row.busy_s:
        return Times()
    least_s = _least_slow_s(row)
    usual = [(seconds, count) for seconds, count in row.services if seconds <= least_s]
    num_usual = sum(count for _, count in usual)
    mean_s = sum(seconds * count for seconds, count in usual) / num_usual
    factors, weights = tuple(one / mean_s for one, _ in usual), tuple(count / num_usual for _, count in usual)
    extra_s = sum((seconds - mean_s) * count for seconds, count in row.services if seconds > least_s)
    slow = [one for one in row.slow if one.chunk_s > least_s * one.chunk]
    if extra_s <= 0 or not slow:
        return Times(factors, weights)
    wait_s = wait_each_s * row.num_items
    wanted_s = (row.cpu_s + wait_s) * min(1.0, extra_s / row.busy_s)  # without what comes of sharing CPUs
    slow_wait_s = min(wanted_s, wait_s)
    shares = (min(row.cpu_s, wanted_s - slow_wait_s) / max(row.cpu_s, 1e-12), slow_wait_s / max(wait_s, 1e-12))
    each_s = [max(0.0, one.chunk_s - one.chunk * mean_s) for one in slow]
    num_slow = max(1.0, extra_s / max(fmean(each_s), 1e-12))
    runs = _runs(slow, row, stride)
    run = 1 + (len(slow) / len(runs) - 1) * max(1.0, num_slow / len(slow))  # of which the slowest are known
    num_runs = max(1.0, num_slow / run)
    every = row.num_items / num_runs
    if wait_s > 0 and run > 1 and _end_at_once(runs):
        longest_s = [max(one.chunk_s for one in run) for run in runs]
        starts = sorted(min(one.at_s - one.chunk_s for one in run) for run in runs)
        gaps = _relative([later - earlier for earlier, later in pairwise(starts)])
        sizes = tuple(seconds / fmean(longest_s) for seconds in longest_s)
        pause = fmean(longest_s) / wait_each_s
        return Times(factors, weights, *shares, sizes, gaps, every, pause=pause, pause_every_s=wall_s / num_runs)
    begins = sorted((run[0].epoch, run[0].position) for run in runs)
    gaps = _relative([later[1] - earlier[1] for earlier, later in pairwise(begins) if later[0] == earlier[0]])
    sizes, chunk = tuple(each_s), round(median(one.chunk for one in slow))
    return Times(factors, weights, *shares, sizes, gaps, every, run=max(1, round(run)), chunk=chunk)


def _least_slow_s(row: StageRow) -> float:
    """The time above which a sample is slow: more than twice the median, and by more than a busy machine adds."""
    usual_s = row.p50_s or 0.0
    over = [(seconds - usual_s, count) for seconds, count in row.services if seconds > _SLOW * usual_s]
    if not over:
        return _SLOW * usual_s
    heavy_s = sum(seconds**2 * count for seconds, count in over) / sum(seconds * count for seconds, count in over)
    return max(_SLOW * usual_s, usual_s + heavy_s / 2)


def _relative(gaps: list[float]) -> tuple[float, ...]:
    """Gaps, in units of their mean; if few were seen, gaps drawn by chance."""
    gaps = [gap for gap in gaps if gap > 0]
    if len(gaps) < 3:
        return tuple(-math.log(1 - (n + 0.5) / 32) for n in range(32))
    return tuple(gap / fmean(gaps) for gap in gaps)


def _runs(slow: Sequence[SlowTime], row: StageRow, stride: int) -> list[list[SlowTime]]:
    """The slow chunks in their order; chunks that are closer together than the samples in work at a time make one run."""
    window = 2 * row.workers * median(one.chunk for one in slow) * stride
    ordered = sorted(slow, key=lambda one: (one.epoch, one.position))
    runs = [[ordered[0]]]
    for before, one in pairwise(ordered):
        if one.epoch == before.epoch and one.position - before.position <= window:
            runs[-1].append(one)
        else:
            runs.append([one])
    chance = window / stride * len(ordered) / row.num_items
    is_run = chance < _MOST_CHANCE and len(ordered) > _RUN * math.exp(chance) * len(runs)
    return runs if is_run else [[one] for one in ordered]


def _end_at_once(runs: Sequence[Sequence[SlowTime]]) -> bool:
    spread = [
        (max(one.at_s for one in run) - min(one.at_s for one in run)) / max(one.chunk_s for one in run)
        for run in runs
        if len(run) > 1
    ]
    return bool(spread) and median(spread) <= _AT_ONCE


USUAL = Times()


class Draws:
    """The times of a stage for each sample of a simulated run, and when it stands still. Deterministic by `rng`; a
    longer run begins with the same samples. `means_s`: the means of the first `num_counted` ones, on a CPU and
    waiting."""

    def __init__(
        self,
        times: Times,
        means_s: tuple[float, float],
        num_counted: int,
        num_samples: int,
        rng: np.random.Generator,
    ) -> None:
        cpu_s, wait_s = means_s
        of_gaps, of_sizes = rng.spawn(2)
        self._usual_cpu_s, self._usual_wait_s = cpu_s * (1 - times.slow_cpu), wait_s * (1 - times.slow_wait)
        self._factors: list[float] = rng.choice(times.factors, num_samples, p=times.weights).tolist()
        slow_cpu_s, slow_wait_s = cpu_s * times.slow_cpu, wait_s * times.slow_wait
        self._wait_share = slow_wait_s / max(slow_cpu_s + slow_wait_s, 1e-12)
        self.pauses: deque[tuple[float, float]] = deque()
        slow = np.zeros(num_samples + 1)
        places, sizes = np.cumsum(of_gaps.choice(times.gaps, num_samples)), of_sizes.choice(times.sizes, num_samples)
        if times.pause and wait_s:
            begins_s = places * times.pause_every_s
            ends_s = begins_s + sizes * times.pause * wait_s
            self.pauses = deque(zip(begins_s.tolist(), ends_s.tolist(), strict=True))
        elif not math.isinf(times.every):
            for offset in range(times.run):
                at = 1 + offset * times.chunk + (places * times.every).astype(np.int64)
                np.add.at(slow, at[at <= num_samples], sizes[at <= num_samples])
        scale = num_counted * (slow_cpu_s + slow_wait_s) / max(float(slow[: num_counted + 1].sum()), 1e-12)
        self._slow_s: list[float] = (np.cumsum(slow) * scale).tolist()

    def of(self, low: int, high: int) -> tuple[float, float]:
        """Seconds on a CPU and waiting, for the samples [low, high)."""
        usual = (high - low) * self._factors[low]
        slow_s = self._slow_s[high] - self._slow_s[low]
        wait_s = self._usual_wait_s * usual + slow_s * self._wait_share
        return self._usual_cpu_s * usual + slow_s * (1 - self._wait_share), wait_s
