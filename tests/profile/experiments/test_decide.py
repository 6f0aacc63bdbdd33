"""Decisions between two variants from pairs of windows: right in spite of any noise, and wrong no more often than stated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.profile.experiments.decide import MOST_WRONG, PairedGains
from loaderkit.profile.experiments.interleave import RateWindow
from loaderkit.profile.statistics import evidence_of, median_of

NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda draw: draw.gauss(0, 0.1),
    "Cauchy": lambda draw: 0.1 * math.tan(math.pi * (draw.random() - 0.5)),
    "other programs": lambda draw: -draw.expovariate(0.5) if draw.random() < 0.2 else draw.gauss(0, 0.05),
}
"""Of the logarithm of a window's rate."""


def window(rate: float, stalled: float = 1.0) -> RateWindow:
    return RateWindow(num_samples=round(1e6 * rate), seconds=1.0, stall_s=stalled, num_batches=8)


def experiment(factor: float, noise: Callable[[random.Random], float], draw: random.Random) -> PairedGains:
    """Up to twenty pairs with a loop that is the limit from a rate of 2 on, and a look after each but the first two."""
    new: list[RateWindow] = []
    old: list[RateWindow] = []
    while len(new) < 20 and (len(new) < 3 or not PairedGains.of(new, old).is_clear()):
        for windows, speed in ((new, factor), (old, 1.0)):
            rate = speed * math.exp(max(-9.0, min(9.0, noise(draw))))
            windows.append(window(rate, max(0.0, 1 - rate / 2)))
    return PairedGains.of(new, old)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("noise", NOISES)
def test_what_is_no_better_is_called_sure_as_rarely_as_stated(noise: str, rng: random.Random) -> None:
    num_wrong = sum(experiment(1.0, NOISES[noise], rng).outcome() == "sure" for _ in range(1000))
    assert num_wrong <= 1000 * MOST_WRONG  # 22 were usual


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_half_as_fast_again_is_found_and_the_reverse_is_not(noise: str, rng: random.Random) -> None:
    better = [experiment(1.5, NOISES[noise], rng).outcome() for _ in range(200)]
    assert better.count("no better") <= 20  # 5 were usual, with the worst noise
    assert better.count("sure") >= 130
    assert "sure" not in [experiment(1 / 1.5, NOISES[noise], rng).outcome() for _ in range(200)]


gains = st.floats(0.05, 3.0)
odd = st.floats(1e-6, 1e6)


@given(st.lists(gains, min_size=11, max_size=20), st.data())
def test_one_disturbed_window_changes_nothing(ratios: list[float], data: st.DataObject) -> None:
    new, old = [window(math.exp(gain)) for gain in ratios], [window(1.0) for _ in ratios]
    assert PairedGains.of(new, old).outcome() == "sure"
    side, place = data.draw(st.sampled_from([new, old])), data.draw(st.integers(0, len(ratios) - 1))
    side[place] = window(data.draw(odd), data.draw(st.floats(0, 1)))
    disturbed = PairedGains.of(new, old)
    assert disturbed.outcome() == "sure"
    assert 0.99 * min(ratios) <= median(disturbed.speed) <= 1.01 * max(ratios)


@given(st.lists(st.floats(0.04, 0.4), min_size=8, max_size=30))
def test_less_waiting_makes_sure_of_a_gain_in_speed_and_is_none_by_itself(shares: list[float]) -> None:
    """Where workers take the GIL from a training step, less waiting is only a longer step."""
    old = [window(1.0, 0.5) for _ in shares]
    speeds = [0.99 if number % 3 == 2 else 1.1 for number in range(len(shares))]  # not sure by themselves

    def outcome(factor: float) -> str:
        new = [window(factor * speed, 0.5 - share) for speed, share in zip(speeds, shares, strict=True)]
        return PairedGains.of(new, old).outcome()

    assert evidence_of(sum(speed > 1 for speed in speeds), sum(speed < 1 for speed in speeds)) < 40
    assert [outcome(1.0), outcome(0.92), outcome(0.8)] == ["sure", "no better", "no better"]


def test_seen_once_and_thrown_away() -> None:
    """54 % of the time waiting became none, in four pairs of which one was disturbed: better, but not for sure."""
    new, old = [window(637, 0.0) for _ in range(4)], [window(315, 0.54) for _ in range(4)]
    old[1] = window(80, 0.9)
    assert PairedGains.of(new, old).outcome() == "likely"
    assert PairedGains.of(new * 2, old * 2).outcome() == "sure"


@pytest.mark.parametrize("lost", range(10))
def test_nine_pairs_of_ten_are_enough_whichever_was_lost(lost: int, rng: random.Random) -> None:
    """Of a loop that only waits, where the shares of waiting say nothing: 1.51 times as fast had not been enough."""
    ratios = [rng.uniform(1.2, 1.9) for _ in range(10)]
    ratios[lost] = rng.uniform(0.6, 0.95)
    new, old = [window(ratio) for ratio in ratios], [window(1.0) for _ in ratios]
    assert PairedGains.of(new, old).outcome() == "sure"
    assert PairedGains.of(old, new).outcome() == "no better"
    new[(lost + 1) % 10] = window(0.9)
    assert PairedGains.of(new, old).outcome() == "likely"


def share_that_ever(holds: Callable[[int, int, int], bool], num_pairs: int) -> float:
    """The share of all sequences of that many fair coins for which `holds` is true of (heads, tails, looks) at one look."""
    alive, ended = {0: 1.0}, 0.0
    for look in range(1, num_pairs + 1):
        tossed: dict[int, float] = {}
        for heads, share in alive.items():
            for more in (0, 1):
                tossed[heads + more] = tossed.get(heads + more, 0.0) + share / 2
        ended += sum(share for heads, share in tossed.items() if holds(heads, look - heads, look))
        alive = {heads: share for heads, share in tossed.items() if not holds(heads, look - heads, look)}
    return ended


def test_the_exact_share_of_wrong_decisions_is_as_stated() -> None:
    """Of a variant that wins each pair with the chance of a coin: by all sequences of 30, each looked at after every pair."""

    def signs(heads: int, tails: int) -> list[float]:
        return [1.0] * heads + [-1.0] * tails

    def is_sure(heads: int, tails: int, looks: int) -> bool:
        return PairedGains(signs(heads, tails), signs(heads, tails)).outcome() == "sure"

    def is_sure_of_speed(heads: int, tails: int, looks: int) -> bool:
        return PairedGains(signs(heads, tails), [0.0] * looks).outcome() == "sure"

    def falls_short(heads: int, tails: int, looks: int) -> bool:
        return PairedGains(signs(heads, tails), [0.0] * looks).falls_short_of(1.0)

    for holds in (is_sure, is_sure_of_speed, falls_short):
        assert 0.01 <= share_that_ever(holds, 30) <= MOST_WRONG


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_not_that_fast_is_found_to_fall_short_of_it(noise: str, rng: random.Random) -> None:
    def falls_short() -> bool:
        new: list[RateWindow] = []
        old: list[RateWindow] = []
        while len(new) < 20:
            for windows in (new, old):
                windows.append(window(math.exp(max(-9.0, min(9.0, NOISES[noise](rng))))))
            if PairedGains.of(new, old).falls_short_of(1.5):
                return True
        return False

    assert sum(falls_short() for _ in range(100)) >= 80


def test_the_evidence_of_pairs() -> None:
    assert [evidence_of(wins, losses) >= 40 for wins, losses in ((6, 0), (7, 0), (9, 1), (10, 1), (12, 2))] == [
        False,
        True,
        False,
        True,
        True,
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=25))
def test_the_interval_of_a_median_holds_it(values: list[float]) -> None:
    middle, low, high = median_of(values)
    assert min(values) <= low <= middle <= high <= max(values)
    # Of 20 values, numbers 6 to 15 are within: in any table of the sign test.
    assert median_of([*range(1, 21)])[1:] == (6, 15)
