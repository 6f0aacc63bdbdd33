"""Decides whether a variant is better than another, from pairs of neighbouring windows.

Speed and waiting both are evidence, but speed has to gain: where workers take the GIL from a training step, less waiting is
only a longer step. Evidence is who wins a pair: a window that other programs disturb counts as one pair, however far off it is.
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
        """`sure` of a variant that is no better in at most the share `most_wrong` of all experiments."""
        likely = [one for one in self if median(one) >= GAIN and num_won(one) >= _LIKELY * len(one)]
        if self.speed not in likely:
            return "no better"
        is_sure = any(evidence_of(num_won(one), num_lost(one)) >= len(self) / most_wrong for one in likely)
        return "sure" if is_sure else "likely"

    def is_clear(self, most_wrong: float = MOST_WRONG) -> bool:
        """True if more pairs would hardly change the outcome."""
        is_slower = evidence_of(num_lost(self.speed), num_won(self.speed)) >= len(self) / most_wrong
        return is_slower or self.outcome(most_wrong) == "sure"


def num_won(gains: Sequence[float]) -> int:
    return sum(gain > 0 for gain in gains)


def num_lost(gains: Sequence[float]) -> int:
    return sum(gain < 0 for gain in gains)
