"""Whether two measurements differ by more than their noise.

The steps of a run, without its warm-up (cut where MSER-5 says: White, 1997), are divided into windows of as many steps each,
whose means are nearly independent though neighbouring steps are not: non-overlapping batch means, 20 windows as Schmeiser
(Operations Research 30, 1982) advises. Means of two runs differ by more than noise if the 95 % interval of their difference,
with Student's t for unequal variances (Welch, Biometrika 34, 1947), leaves out zero. The same is done with 5 long windows, and
the wider interval counts: what else a machine does changes within seconds, and short windows in a row share it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from loaderkit.profile.report import Step

NUM_WINDOWS = (20, 5)
LEAST_STEPS = 10
_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_BATCH = 5  # of MSER-5

Values = Sequence[float]
T = TypeVar("T")


class Difference(NamedTuple):
    """Other minus one, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval has zero in it."""
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
    """As many windows, or one for two items if there are less; as long as one another. What is left over at the beginning is
    left out."""
    num_windows = max(1, min(num_windows, len(items) // 2))
    size = len(items) // num_windows
    return [items[n : n + size] for n in range(len(items) - size * num_windows, len(items), size)]


def compare(one: Sequence[T], other: Sequence[T], value: Callable[[Sequence[T]], float]) -> Difference:
    """`value` of a window of `other`, minus that of `one`: on average, with the interval."""
    found = [
        welch([value(w) for w in windows(one, number)], [value(w) for w in windows(other, number)])
        for number in NUM_WINDOWS
    ]
    return max(found, key=lambda difference: difference.high - difference.low)


def against(ones: Sequence[Sequence[T]], other: Sequence[T], value: Callable[[Sequence[T]], float]) -> Difference:
    """`value` of `other`, minus that of one earlier run or of several on average.

    Of several the interval also holds what differs from run to run, which the windows of one run cannot know: it is at least
    the prediction interval for one more run of the same kind. Where noise comes at several levels, the highest one has to be
    repeated (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013).
    """
    found = [compare(one, other, value) for one in ones]
    mean = statistics.fmean(difference.mean for difference in found)
    half = max(difference.high - difference.low for difference in found) / 2
    if len(ones) > 1:
        values = [value(one) for one in ones]
        half = max(half, student_t(len(ones) - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / len(ones)))
    return Difference(mean, mean - half, mean + half)


def welch(one: Values, other: Values) -> Difference:
    """The difference of two means. Both have at least two values."""
    mean = statistics.fmean(other) - statistics.fmean(one)
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    square = sum(parts)
    if square <= 0:
        return Difference(mean, mean, mean)
    freedom = square**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True))
    half = student_t(freedom) * math.sqrt(square)
    return Difference(mean, mean - half, mean + half)


def paired(differences: Values) -> Difference:
    """The mean of differences, each within one window of time."""
    mean = statistics.fmean(differences)
    half = student_t(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def student_t(freedom: float) -> float:
    """Student's t for 95 %, both sides. Abramowitz and Stegun, 26.7.5: within 0.1 % from 4 degrees of freedom on; below that of
    the next whole number."""
    if freedom < 4:
        return {1: 12.7062, 2: 4.3027, 3: 3.1825}[max(1, math.floor(freedom))]
    z, v = _NORMAL, freedom
    terms = (
        z,
        (z**3 + z) / (4 * v),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4),
    )
    return sum(terms)
