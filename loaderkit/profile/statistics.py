"""Tests whether two measurements differ by more than their noise.

The steps of a run behind its warm-up (cut as MSER-5 does: White, 1997) are divided into equal windows. Window means are nearly
independent though neighbouring steps are not: non-overlapping batch means, 20 windows as in Schmeiser (Operations Research 30,
1982). Two runs differ if the 95 % interval of the difference of their means (Welch, Biometrika 34, 1947) excludes zero. The
same is done with 5 long windows, and the wider interval counts: the load of a machine changes within seconds, and short windows
in a row share it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from loaderkit.profile.report_parts import Step

NUM_WINDOWS = (20, 5)
LEAST_STEPS = 10
_BATCH = 5  # of MSER-5
_WINS = 0.85  # of the pairs, by a side that is better

Values = Sequence[float]
T = TypeVar("T")


class Difference(NamedTuple):
    """The difference, other minus one, with its 95 % interval. `mean` may be the median instead."""

    mean: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """True if the interval contains zero."""
        return self.low <= 0 <= self.high


def steady(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps behind the warm-up; at most half of them are cut."""
    times = [step.compute_s + step.stall_s for step in steps]
    means = [statistics.fmean(times[n : n + _BATCH]) for n in range(0, len(times) - _BATCH + 1, _BATCH)]
    if len(means) < 4:
        return steps
    errors = [statistics.pvariance(means[n:]) / (len(means) - n) for n in range(len(means) // 2 + 1)]
    return steps[_BATCH * min(range(len(errors)), key=errors.__getitem__) :]


def windows(items: Sequence[T], num_windows: int) -> list[Sequence[T]]:
    """Equal windows of at least two items, at most `num_windows`. The remainder is cut at the beginning."""
    num_windows = max(1, min(num_windows, len(items) // 2))
    size = len(items) // num_windows
    return [items[n : n + size] for n in range(len(items) - size * num_windows, len(items), size)]


def compare(one: Sequence[T], other: Sequence[T], value: Callable[[Sequence[T]], float]) -> Difference:
    """The mean of `value` over windows of `other`, minus the mean over windows of `one`, with its interval."""
    differences = [
        welch([value(w) for w in windows(one, number)], [value(w) for w in windows(other, number)])
        for number in NUM_WINDOWS
    ]
    return max(differences, key=lambda difference: difference.high - difference.low)


def against(ones: Sequence[Sequence[T]], other: Sequence[T], value: Callable[[Sequence[T]], float]) -> Difference:
    """`value` of `other`, minus the value of one earlier run or the mean of several.

    With several runs the interval also covers what differs from run to run, which the windows of one run cannot show: it is at
    least the prediction interval for one more run of the same kind. Where noise comes at several levels, the highest one has to
    be repeated (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013).
    """
    differences = [compare(one, other, value) for one in ones]
    mean = statistics.fmean(difference.mean for difference in differences)
    half = max(difference.high - difference.low for difference in differences) / 2
    if len(ones) > 1:
        values = [value(one) for one in ones]
        half = max(half, _student_t(len(ones) - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / len(ones)))
    return Difference(mean, mean - half, mean + half)


def welch(one: Values, other: Values) -> Difference:
    """The difference of two means. Both have at least two values."""
    mean = statistics.fmean(other) - statistics.fmean(one)
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    square = sum(parts)
    if square <= 0:
        return Difference(mean, mean, mean)
    freedom = square**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True))
    half = _student_t(freedom) * math.sqrt(square)
    return Difference(mean, mean - half, mean + half)


def paired(differences: Values) -> Difference:
    """The mean of at least two values, each measured within one window of time."""
    mean = statistics.fmean(differences)
    half = _student_t(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def evidence_of(wins: int, losses: int) -> float:
    """How much likelier these outcomes of pairs are if one side wins 85 % of them than if neither is better: the sequential
    probability ratio test (Wald, Annals of Mathematical Statistics 16, 1945) on signs.

    If neither is better it ever reaches 1 / a in at most the share a of all experiments (Ville, 1939), whatever the noise and
    however often one looks: 40 takes 7 wins, 11 pairs with one loss, 14 with two.
    """
    return (2 * _WINS) ** wins * (2 - 2 * _WINS) ** losses


def median_of(values: Values) -> Difference:
    """The median with its 95 % interval, whatever the distribution (Thompson, Annals of Mathematical Statistics 7, 1936); of
    fewer than six values the interval is their range."""
    ordered, num = sorted(values), len(values)
    tails = accumulate(math.comb(num, k) / 2**num for k in range(num))
    cut = max(0, sum(tail <= 0.025 for tail in tails) - 1)
    return Difference(statistics.median(ordered), ordered[cut], ordered[-1 - cut])


def _student_t(freedom: float) -> float:
    """The two-sided 95 % quantile of Student's t."""
    from scipy.special import stdtrit  # a quarter of the import time of scipy.stats, whose t.ppf calls it

    return float(stdtrit(freedom, 0.975))
