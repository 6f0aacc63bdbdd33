from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.errors import ConfigError
from loaderkit.sampling.interleaving import Interleaving, whole_weights
from loaderkit.sampling.mix_rules import MixedSource, WeightChange, same_until
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.schedule import UNKNOWN, BatchSampler, GlobalOrder

Stop = Literal["first", "all", "never"]
WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)


def sources_of(sizes: Sequence[int], passes: Sequence[int | None]) -> list[MixedSource]:
    return [MixedSource(f"s{n}", size, one) for n, (size, one) in enumerate(zip(sizes, passes, strict=True))]


def course_one_by_one(
    sources: list[MixedSource], changes: list[WeightChange], stop: Stop, most: int
) -> list[tuple[int, int]]:
    """(source, place in it) of the positions of an epoch, up to `most`: turn by turn, with a new start of taking turns wherever
    the weights change or a source is used up."""
    course: list[tuple[int, int]] = []
    counts, used_up = [0] * len(sources), set[int]()
    begin = 0
    turns: np.ndarray[Any, np.dtype[np.int64]] | None = None
    while len(course) < most:
        at = [number for number, change in enumerate(changes) if change.at <= len(course)][-1]
        if turns is None or changes[at].at == len(course):
            begin, weights = len(course), changes[at].weights
            here = [number for number, weight in enumerate(weights) if weight > 0 and number not in used_up]
            turns = Interleaving(whole_weights([Fraction(repr(weights[number])) for number in here])).at(
                np.arange(9000)
            )[0]
        source = here[int(turns[len(course) - begin])]
        course.append((source, counts[source]))
        counts[source] += 1
        limit = sources[source].most
        if stop != "never" and counts[source] == limit:
            used_up.add(source)
            turns = None
            left = [
                number
                for number, one in enumerate(sources)
                if one.most is not None
                and number not in used_up
                and any(change.weights[number] > 0 for change in changes[at:])
            ]
            if stop == "first" or not left:
                break
    return course


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[MixedSource], list[WeightChange], Stop]:
    num = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 40), min_size=num, max_size=num))
    passes = draw(st.lists(st.sampled_from([1, 1, 2, 3, None]), min_size=num, max_size=num))
    stop: Stop = draw(st.sampled_from(["first", "all", "never"]))
    places = sorted(draw(st.sets(st.integers(1, 90), max_size=3)))
    weight = st.sampled_from([0.05, 0.1, 0.3, 0.5, 1.0, 2.5])
    if stop != "never" and all(one is None for one in passes):
        passes[0] = 2
    rows = [tuple(draw(st.lists(weight, min_size=num, max_size=num))) for _ in [0, *places]]
    changes = [WeightChange(at, row) for at, row in zip([0, *places], rows, strict=True)]
    return sources_of(sizes, passes), changes, stop


@given(mixtures())
@settings(max_examples=num_examples(100), deadline=None)
def test_the_course_of_an_epoch(mixed: tuple[list[MixedSource], list[WeightChange], Stop]) -> None:
    sources, changes, stop = mixed
    mixture = Mixture(sources, changes, stop)
    most = 300 if stop == "never" else 10**5
    expected = course_one_by_one(sources, changes, stop, most)
    num = min(most, mixture.num_samples)
    assert len(expected) == num
    found, places = mixture.locate(0, np.arange(num))
    assert list(zip(found.tolist(), places.tolist(), strict=True)) == expected
    for position in (0, num // 3, num):
        assert mixture.counts(position) == [
            [source for source, _ in expected[:position]].count(number) for number in range(len(sources))
        ]


@given(mixtures(), st.sampled_from(WORLD_SIZES), st.sampled_from(WORLD_SIZES), st.integers(1, 7), st.integers(0, 20))
@settings(max_examples=num_examples(60), deadline=None)
def test_another_world_size_continues_the_same_sequence(
    mixed: tuple[list[MixedSource], list[WeightChange], Stop], before: int, after: int, batch_size: int, num_steps: int
) -> None:
    sources, changes, stop = mixed
    mixture = Mixture(sources, changes, stop)
    num_samples = min(mixture.num_samples, 500)  # of an epoch that never ends, as many are looked at
    order = MixedOrder(mixture, [GlobalOrder(source.num_samples, n) for n, source in enumerate(sources)])
    whole = order.indices(0, np.arange(num_samples)).tolist()

    def delivered(world_size: int, start: int, most_steps: int | None) -> tuple[list[int], int]:
        """The indices of all ranks in order of position, without repeats at the end, and the position behind them."""
        first = BatchSampler(num_samples, 0, world_size, batch_size, False)
        steps = first.num_batches(start) if most_steps is None else min(most_steps, first.num_batches(start))
        by_position: dict[int, int] = {}
        for rank in range(world_size):
            sampler = BatchSampler(num_samples, rank, world_size, batch_size, False)
            fresh = MixedOrder(
                Mixture(sources, changes, stop), [GlobalOrder(s.num_samples, n) for n, s in enumerate(sources)]
            )
            if steps:
                positions = sampler.positions(start, 0, steps)
                positions = positions[positions < num_samples]
                by_position.update(zip(positions.tolist(), fresh.indices(0, positions).tolist(), strict=True))
        return [by_position[position] for position in sorted(by_position)], first.position_after(start, steps)

    first, position = delivered(before, 0, num_steps)
    rest, end = delivered(after, position, None)
    assert first + rest == whole
    assert end == num_samples


@given(mixtures(), st.integers(0, 4))
@settings(max_examples=num_examples(60), deadline=None)
def test_passes_over_a_source_are_whole_permutations_over_epochs(
    mixed: tuple[list[MixedSource], list[WeightChange], Stop], seed: int
) -> None:
    sources, changes, stop = mixed
    mixture = Mixture(sources, changes, stop)
    num_samples = 400 if stop == "never" else mixture.num_samples
    total = sum(source.num_samples for source in sources)
    order = MixedOrder(mixture, [GlobalOrder(source.num_samples, seed) for source in sources])
    num_epochs = 1 if stop == "never" else 3
    seen = np.concatenate([order.indices(epoch, np.arange(num_samples)) for epoch in range(num_epochs)])
    assert len(np.unique(seen)) == len(seen), "each pass over a sample has a number of its own"
    first = 0
    for source in sources:
        own = seen[(seen % total >= first) & (seen % total < first + source.num_samples)]
        for number in range(len(own) // source.num_samples):
            part = own[number * source.num_samples : (number + 1) * source.num_samples]
            assert np.array_equal(np.sort(part % total - first), np.arange(source.num_samples))
            assert (part // total == number).all()
        first += source.num_samples


def test_an_epoch_takes_up_a_source_where_the_last_one_left_it() -> None:
    mixture = Mixture(sources_of([10, 7], [1, 2]), [WeightChange(0, (0.5, 0.5))], "first")
    assert mixture.totals == (10, 9), "the tenth of the first source uses it up"
    sources, places = mixture.locate(3, np.arange(19))
    assert places[sources == 1].tolist() == list(range(27, 36))


def test_shuffles_within_a_source_are_uniform() -> None:
    """Chi-square of which sample of ten comes first in a pass, over 4,000 passes."""
    mixture = Mixture(sources_of([10, 30], [None, None]), [WeightChange(0, (0.25, 0.75))], "never")
    order = MixedOrder(mixture, [GlobalOrder(10, 5), GlobalOrder(30, 6)])
    positions = np.arange(160_000)
    indices = order.indices(0, positions) % 40
    own = indices[indices < 10].reshape(4000, 10)
    for place in (0, 4, 9):
        counts = np.bincount(own[:, place], minlength=10)
        assert ((counts - 400) ** 2 / 400).sum() < 33.7  # 9 degrees of freedom: once in 10,000


def test_each_segment_holds_its_shares_within_one() -> None:
    changes = [
        WeightChange(0, (0.7, 0.2, 0.1)),
        WeightChange(1001, (0.1, 0.2, 0.7)),
        WeightChange(2500, (0.0, 0.5, 0.5)),
    ]
    mixture = Mixture(sources_of([10**9] * 3, [None] * 3), changes, "never")
    sources, _ = mixture.locate(0, np.arange(4000))
    for begin, end, shares in (
        (0, 1001, (0.7, 0.2, 0.1)),
        (1001, 2500, (0.1, 0.2, 0.7)),
        (2500, 4000, (0.0, 0.5, 0.5)),
    ):
        for number, share in enumerate(shares):
            counts = np.cumsum(sources[begin:end] == number)
            assert np.abs(counts - share * np.arange(1, end - begin + 1)).max() < 1


def test_a_position_far_away_in_a_mixture_of_fifty() -> None:
    rng = np.random.default_rng(3)
    weights = tuple(rng.dirichlet(np.ones(50)).clip(1e-4).tolist())
    mixture = Mixture(sources_of([10**6] * 50, [None] * 50), [WeightChange(0, weights)], "never")
    order = MixedOrder(mixture, [GlobalOrder(10**6, n) for n in range(50)])
    positions = np.arange(10**12, 10**12 + 2000)
    indices = order.indices(0, positions)
    assert (indices >= 0).all()
    assert len(np.unique(indices)) == 2000
    assert mixture.num_samples == UNKNOWN


@pytest.mark.parametrize(
    ("weights", "passes", "stop", "message"),
    [
        ((0.0, 0.0), [1, 1], "all", "no source has a weight above 0"),
        ((1.0, 0.0), [None, 1], "first", "give one of them `epochs`"),
        ((1.0, 1e-9), [1, 1], "all", "s1: its share from position 0 on"),
    ],
)
def test_what_cannot_be_mixed_is_said(
    weights: tuple[float, float], passes: list[int | None], stop: Stop, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(sources_of([10, 10], passes), [WeightChange(0, weights)], stop)


def test_nothing_left_before_a_change_is_said() -> None:
    changes = [WeightChange(0, (1.0, 0.0)), WeightChange(50, (0.5, 0.5))]
    with pytest.raises(ConfigError, match=r"position 10 every source .* used up before the change at 50"):
        Mixture(sources_of([10, 10], [1, 1]), changes, "all")


def test_which_changes_leave_what_came_before() -> None:
    def text(*changes: tuple[int, tuple[float, float]], stop: Stop = "never") -> str:
        return Mixture(sources_of([9, 9], [None, None]), [WeightChange(*one) for one in changes], stop).fingerprint()

    plain, changed = text((0, (0.5, 0.5))), text((0, (0.5, 0.5)), (100, (0.9, 0.1)))
    assert same_until(plain, changed, 0)
    assert same_until(plain, changed, 100)
    assert not same_until(plain, changed, 101)
    assert not same_until(plain, text((0, (0.5, 0.6))), 0)
