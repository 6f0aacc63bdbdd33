from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from no_kernels import without_kernels
from num_examples import num_examples

from loaderkit import native
from loaderkit.native import fallback
from loaderkit.sampling.interleaving import Interleaving, whole_weights

FAR = 10**12
weights_of_few = st.lists(st.integers(1, 40), min_size=1, max_size=6)
shares = st.floats(1e-4, 1.0)


def turns_one_by_one(weights: list[int], num_turns: int) -> list[int]:
    """Whose turn it is, by the words of the module: the earliest deadline of those that may have a turn; with fractions."""
    total = sum(weights)
    counts = [0] * len(weights)
    turns = []
    for turn in range(num_turns):
        due = []
        for source, weight in enumerate(weights):
            share = Fraction(weight, total)
            if counts[source] // share <= turn:  # (j - 1) / w, rounded down
                due.append((-(-(counts[source] + 1) // share), source))
        source = min(due)[1]
        counts[source] += 1
        turns.append(source)
    return turns


@given(weights_of_few)
@settings(max_examples=num_examples(60))
@example([1])
@example([1, 1, 1, 1, 1, 20])
@example([17, 3, 3, 3, 1, 1])
def test_turns_are_those_of_the_words(weights: list[int]) -> None:
    whole = whole_weights(list(map(Fraction, weights)))
    found, places = Interleaving(whole).at(np.arange(150))
    expected = turns_one_by_one(weights, 150)
    assert found.tolist() == expected
    assert places.tolist() == [expected[:turn].count(source) for turn, source in enumerate(expected)]


def deviations(interleaving: Interleaving, weights: list[int], begin: int, num_turns: int) -> list[float]:
    """The largest difference of each source's turns from its share, over all n in [begin, begin + num_turns]."""
    total = sum(weights)
    sources, places = interleaving.at(np.arange(begin, begin + num_turns))
    largest = []
    for source, weight in enumerate(weights):
        before = interleaving.counts(begin)[source]
        mine = sources == source
        assert places[mine].tolist() == list(range(before, before + int(mine.sum()))), (
            "its turns are numbered one by one"
        )
        counts = before + np.concatenate(([0], np.cumsum(mine)))
        # In whole numbers first, which doubles could not hold at position 10**12.
        exact, rest = divmod(begin * weight, total)
        expected = rest / total + np.arange(num_turns + 1) * (weight / total)
        largest.append(float(np.abs(counts - exact - expected).max()))
    return largest


@given(st.lists(shares, min_size=1, max_size=50), st.integers(0, FAR))
@settings(max_examples=num_examples(60), deadline=None)
@example([1.0] * 50, FAR)
@example([0.7, 0.3], FAR - 1)
@example([2.0**-n for n in range(12)], FAR)
def test_any_prefix_has_each_source_within_one_of_its_share(given_weights: list[float], begin: int) -> None:
    weights = whole_weights([Fraction(repr(weight)) for weight in given_weights])
    assert max(deviations(Interleaving(weights), weights, begin, 3000)) < 1 + 1e-9


@given(st.lists(shares, min_size=2, max_size=50), st.lists(st.integers(0, 200_000), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_a_position_does_not_depend_on_what_was_asked_before(given_weights: list[float], asked: list[int]) -> None:
    weights = whole_weights([Fraction(repr(weight)) for weight in given_weights])
    whole = Interleaving(weights)
    sources, places = whole.at(np.arange(200_001))
    used = Interleaving(weights)
    for position in asked:
        source, place = used.at(np.array([position]))
        assert (source[0], place[0]) == (sources[position], places[position])
        assert used.counts(position) == np.bincount(sources[:position], minlength=len(weights)).tolist()
    scattered = np.array(asked, np.int64)
    assert used.at(scattered)[0].tolist() == sources[scattered].tolist()


@pytest.mark.parametrize("weights", [[7, 3], [1, 2, 3, 4], [2**40 + 1, 2**39 + 3, 2**38 + 11]])
def test_the_position_behind_a_turn(weights: list[int]) -> None:
    interleaving = Interleaving(weights)
    sources, places = interleaving.at(np.arange(5000))
    for turn in (0, 1, 17, 999, 4999):
        number = int(places[turn]) + 1
        assert interleaving.position_after(int(sources[turn]), number) == turn + 1


def test_weights_in_whole_numbers() -> None:
    assert whole_weights([Fraction("0.7"), Fraction("0.3")]) == [7, 3]
    assert whole_weights([Fraction(2), Fraction(4), Fraction(6)]) == [1, 2, 3]
    third = [Fraction(1, 3**60), Fraction(1, 7**40), Fraction(1, 5)]
    rounded = whole_weights(third)
    assert sum(rounded) <= 1 << 60
    assert abs(Fraction(rounded[2], sum(rounded)) - third[2] / sum(third)) < Fraction(1, 1 << 58)


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=20), st.integers(0, 10**15), st.integers(1, 400))
def test_the_kernel_and_its_twin_agree(weights: list[int], start: int, num_turns: int) -> None:
    if min(weights) < 1e-4 * sum(weights):
        weights = [weight + sum(weights) // 100 for weight in weights]
    begun = Interleaving(weights)._lags_at(start % 10**6)
    found = []
    for door in (native, fallback):
        lags = begun.copy()
        sources, places = np.empty(num_turns, np.int64), np.empty(num_turns, np.int64)
        door.interleave(lags, np.array(weights), sources, places)
        found.append((lags.tolist(), sources.tolist(), places.tolist()))
    assert found[0] == found[1]


def test_without_a_compiler() -> None:
    weights = whole_weights([Fraction("0.123457"), Fraction("0.5"), Fraction("0.376543987654")])
    expected = [column.tolist() for column in Interleaving(weights).at(np.arange(70_000, 70_500))]
    with without_kernels():
        assert [column.tolist() for column in Interleaving(weights).at(np.arange(70_000, 70_500))] == expected
