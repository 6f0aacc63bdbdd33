"""Decides whether a variant is better than another, from pairs of neighbouring windows.

Both speed and waiting are evidence, but there must be a gain in speed: where workers take the GIL from a training step,
less waiting only means a longer step. Evidence counts which variant wins a pair: a window that other programs disturb
counts as one pair, however far off it is.

The rule, looked at after every pair: `evidence_of` the pairs won, 0.6 of it from speed and 0.4 from waiting, has to reach
1 / `most_wrong`. If neither is better, each of the two is a martingale that begins at 1, so their mean is one, too, however
they depend on each other: it ever gets there in at most the share `most_wrong` of all experiments (Ville, 1939).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from loaderkit.profile.experiments.interleave import RateWindow
from loaderkit.profile.statistics import evidence_of

Outcome = Literal["sure", "likely", "no better"]

GAIN = 0.03  # the least that counts: 3 % in speed, or 3 points less waiting
_WEIGHTS = (0.6, 0.4)  # of speed and of waiting: nine pairs of ten are enough, from speed alone
MOST_WRONG = 0.05  # of settings that are no better, the share that is called sure
_LIKELY = 2 / 3  # of the pairs are won


class PairedGains(NamedTuple):
    """The gains of one variant over another, one a pair."""

    speed: Sequence[float]  # log ratios
    waiting: Sequence[float]  # shares of the time that it waits less

    @classmethod
    def of(cls, new: Sequence[RateWindow], old: Sequence[RateWindow]) -> PairedGains:
        pairs = [*zip(new, old, strict=True)]
        speed = [math.log(max(one.rate, 1e-9) / max(other.rate, 1e-9)) for one, other in pairs]
        return cls(speed, [other.stalled - one.stalled for one, other in pairs])

    def outcome(self, most_wrong: float = MOST_WRONG) -> Outcome:
        """The outcome. A variant that is no better is called `sure` in at most the share `most_wrong` of all experiments."""
        likely = [median(one) >= GAIN and num_won(one) >= _LIKELY * len(one) for one in self]
        if not likely[0]:
            return "no better"
        pairs = zip(_WEIGHTS, self, likely, strict=True)
        evidence = sum(weight * evidence_of(num_won(one), num_lost(one)) for weight, one, counts in pairs if counts)
        return "sure" if evidence >= 1 / most_wrong else "likely"

    def is_clear(self, most_wrong: float = MOST_WRONG) -> bool:
        """True if more pairs would hardly change the outcome."""
        return self.falls_short_of(1.0, most_wrong) or self.outcome(most_wrong) == "sure"

    def falls_short_of(self, factor: float, most_wrong: float = MOST_WRONG) -> bool:
        """True if the variant is less than `factor` times as fast: wrong in at most the share `most_wrong` of all experiments
        with one that is as fast as that."""
        short = [math.log(factor) - gain for gain in self.speed]
        return evidence_of(num_won(short), num_lost(short)) >= 1 / most_wrong


def num_won(gains: Sequence[float]) -> int:
    return sum(gain > 0 for gain in gains)


def num_lost(gains: Sequence[float]) -> int:
    return sum(gain < 0 for gain in gains)
