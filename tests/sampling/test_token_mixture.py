"""Mixing by tokens: whose turn it is against words put plainly, shares of any prefix, any position, epochs, states."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

import kernel_twins
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit import native
from loaderkit.errors import ConfigError
from loaderkit.sampling import token_mixture
from loaderkit.sampling.mix_rules import MixedSource, Stop, WeightChange
from loaderkit.sampling.mixture import Mixture
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.schedule import UNKNOWN, BatchSampler, GlobalOrder, SequentialOrder
from loaderkit.sampling.token_mixture import TokenMixture

WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)
SMALL_BLOCK = 16


def whole_pass(order: SampleOrder, size: int, number: int) -> list[int]:
    numbers: list[int] = order.indices(number, np.arange(size)).tolist()
    return numbers


class Mixed(NamedTuple):
    """A mixture to make."""

    sizes: list[int]
    passes: list[int | None]
    changes: list[WeightChange]
    stop: Stop
    lengths: list[int]  # of all samples, source by source
    seed: int = 0

    @property
    def sources(self) -> list[MixedSource]:
        return [MixedSource(f"s{n}", *one) for n, one in enumerate(zip(self.sizes, self.passes, strict=True))]

    @property
    def orders(self) -> list[SampleOrder]:
        return [GlobalOrder(size, self.seed + number) for number, size in enumerate(self.sizes)]

    def make(self) -> TokenMixture:
        lengths = np.array(self.lengths, np.int64)
        return TokenMixture(self.sources, self.changes, self.stop, orders=self.orders, lengths=lengths)

    def one_by_one(self, num_epochs: int, most: int) -> list[list[int]]:
        """The indices of some epochs, up to `most` in each, by the words of the module, with fractions."""
        total, num = sum(self.sizes), len(self.sizes)
        firsts = [sum(self.sizes[:number]) for number in range(num)]
        own = [cache(partial(whole_pass, *one)) for one in zip(self.orders, self.sizes, strict=True)]
        places = [0] * num
        epochs: list[list[int]] = []

        def following(source: int) -> tuple[int, int]:
            """(index, length) of the next sample of a source."""
            number, inside = divmod(places[source], self.sizes[source])
            sample = firsts[source] + own[source](number)[inside]
            return sample + number * total, self.lengths[sample]

        for _ in range(num_epochs):
            found: list[int] = []
            begin = list(places)
            used_up: set[int] = set()
            tokens: dict[int, int] = {}  # of every source in the segment; empty: one begins
            weights = self.changes[0].weights
            while len(found) < most:
                for change in self.changes:
                    if change.at == len(found):
                        tokens, weights = {}, change.weights
                here = [number for number in range(num) if weights[number] > 0 and number not in used_up]
                if not tokens:
                    tokens = dict.fromkeys(here, 0)
                    share = {
                        n: Fraction(repr(weights[n])) / sum(Fraction(repr(weights[m])) for m in here) for n in here
                    }
                now = sum(tokens.values())
                may = [number for number in here if tokens[number] <= share[number] * now]
                source = min(may, key=lambda one: ((tokens[one] + following(one)[1]) / share[one], one))
                index, length = following(source)
                found.append(index)
                tokens[source] += length
                places[source] += 1
                passes = self.passes[source]
                if (
                    self.stop != "never"
                    and passes is not None
                    and places[source] - begin[source] == passes * self.sizes[source]
                ):
                    used_up.add(source)
                    tokens = {}
                    later = [change.weights for change in self.changes if change.at >= len(found)]
                    left = [
                        number
                        for number in range(num)
                        if self.passes[number] is not None
                        and number not in used_up
                        and any(one[number] > 0 for one in [weights, *later])
                    ]
                    if self.stop == "first" or not left:
                        break
            epochs.append(found)
        return epochs


@st.composite
def mixtures(draw: st.DrawFn, *, ends: bool = False) -> Mixed:
    num = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 30), min_size=num, max_size=num))
    passes = draw(st.lists(st.sampled_from([1, 1, 2, 3, None]), min_size=num, max_size=num))
    stop: Stop = draw(st.sampled_from(["first", "all"] if ends else ["first", "all", "never"]))
    places = sorted(draw(st.sets(st.integers(1, 70), max_size=3)))
    weight = st.sampled_from([0.05, 0.1, 0.3, 0.5, 1.0, 2.5])
    if stop != "never" and all(one is None for one in passes):
        passes[0] = 2
    rows = [tuple(draw(st.lists(weight, min_size=num, max_size=num))) for _ in [0, *places]]
    length = st.one_of(st.integers(0, 3), st.integers(1, 2000))
    lengths: list[int] = []
    for size in sizes:
        lengths += [*draw(st.lists(length, min_size=size - 1, max_size=size - 1)), draw(st.integers(1, 50))]
    changes = [WeightChange(*one) for one in zip([0, *places], rows, strict=True)]
    return Mixed(sizes, passes, changes, stop, lengths, draw(st.integers(0, 3)))


@pytest.fixture(name="small_blocks")
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_mixture, "_BLOCK", SMALL_BLOCK)


@pytest.mark.usefixtures("small_blocks")
class TestCourse:
    @given(mixtures())
    def test_of_epochs_against_the_words(self, mixed: Mixed) -> None:
        most = 150 if mixed.stop == "never" else 10**5
        num_epochs = 1 if mixed.stop == "never" else 3
        expected = mixed.one_by_one(num_epochs, most)
        mixture = mixed.make()
        for epoch in reversed(range(num_epochs)):
            num = min(most, mixture.num_samples(epoch))
            assert num == len(expected[epoch])
            assert mixture.indices(epoch, np.arange(num)).tolist() == expected[epoch]

    @given(mixtures(), st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.integers(0, 2))
    @settings(max_examples=num_examples(40), deadline=None)
    def test_does_not_depend_on_what_was_asked_before(self, mixed: Mixed, asked: list[int], epoch: int) -> None:
        fresh = mixed.make()
        num = min(120, fresh.num_samples(epoch))
        whole = fresh.indices(epoch, np.arange(num))
        used = mixed.make()
        for number, place in enumerate(asked):
            position = np.array([place % num])
            assert used.indices(epoch, position) == whole[position]
            if number == 1:
                used = pickle.loads(pickle.dumps(used))
        grid = np.array(asked[:4]).reshape(1, -1) % num
        assert np.array_equal(used.indices(epoch, grid), whole[grid])

    @given(mixtures(ends=True))
    @settings(max_examples=num_examples(20), deadline=None)
    def test_passes_are_whole_permutations_over_epochs(self, mixed: Mixed) -> None:
        mixture, total = mixed.make(), sum(mixed.sizes)
        seen = np.concatenate([mixture.indices(epoch, np.arange(mixture.num_samples(epoch))) for epoch in range(4)])
        assert len(np.unique(seen)) == len(seen)
        first = 0
        for size in mixed.sizes:
            own = seen[(seen % total >= first) & (seen % total < first + size)]
            for number in range(len(own) // size):
                part = own[number * size : (number + 1) * size]
                assert np.array_equal(np.sort(part % total - first), np.arange(size))
                assert (part // total == number).all()
            first += size

    @given(
        mixtures(), st.sampled_from(WORLD_SIZES), st.sampled_from(WORLD_SIZES), st.integers(1, 7), st.integers(0, 20)
    )
    @settings(max_examples=num_examples(40), deadline=None)
    def test_another_world_size_continues_the_same_sequence(
        self, mixed: Mixed, before: int, after: int, batch_size: int, num_steps: int
    ) -> None:
        num_samples = min(mixed.make().num_samples(1), 300)
        whole = mixed.make().indices(1, np.arange(num_samples)).tolist()

        def delivered(world_size: int, start: int, most_steps: int | None) -> tuple[list[int], int]:
            samplers = [BatchSampler(num_samples, rank, world_size, batch_size, False) for rank in range(world_size)]
            steps = samplers[0].num_batches(start)
            steps = steps if most_steps is None else min(most_steps, steps)
            by_position: dict[int, int] = {}
            for sampler in samplers if steps else ():
                positions = sampler.positions(start, 0, steps)
                positions = positions[positions < num_samples]
                by_position.update(zip(positions.tolist(), mixed.make().indices(1, positions).tolist(), strict=True))
            return [by_position[position] for position in sorted(by_position)], samplers[0].position_after(start, steps)

        first, position = delivered(before, 0, num_steps)
        rest, end = delivered(after, position, None)
        assert first + rest == whole
        assert end == num_samples

    @given(mixtures())
    @settings(max_examples=num_examples(40), deadline=None)
    def test_what_explain_says_is_what_comes(self, mixed: Mixed) -> None:
        mixture, total = mixed.make(), sum(mixed.sizes)
        rows = mixture.explained()
        assert [row["begin"] for row in rows][1:] == [row["end"] for row in rows][:-1]
        firsts = np.cumsum([0, *mixed.sizes])
        spans: dict[str, list[tuple[int, int]]] = {source.name: [] for source in mixed.sources}
        for row in rows:
            begin, end = row["begin"], row["end"]
            sources = row["sources"]
            assert isinstance(begin, int)
            assert isinstance(sources, dict)
            for name in [name for name, one in sources.items() if one["share"]]:
                spans[name].append((begin, UNKNOWN if end is None else int(str(end))))
            if end is None:
                assert mixed.stop == "never"
                continue
            assert isinstance(end, int)
            numbers = mixture.indices(0, np.arange(begin, end)) % total
            for number, one in enumerate(sources.values()):
                own = numbers[(numbers >= firsts[number]) & (numbers < firsts[number + 1])]
                assert one["num_samples"] == len(own)
                assert one["num_tokens"] == sum(mixed.lengths[sample] for sample in own)
        assert (rows[-1]["end"] or UNKNOWN) == mixture.num_samples(0)
        for name, expected in spans.items():
            assert mixture.spans(name, 0) == expected


def deviations(
    mixture: TokenMixture, lengths: np.ndarray, firsts: np.ndarray, shares: np.ndarray, num: int
) -> np.ndarray:
    """The tokens by which each source is ahead of its share, at every n up to `num`: float64 [num + 1, sources]."""
    numbers = mixture.indices(0, np.arange(num)) % len(lengths)
    tokens = np.zeros((num + 1, len(shares)))
    tokens[np.arange(1, num + 1), np.searchsorted(firsts, numbers, "right") - 1] = lengths[numbers]
    tokens = tokens.cumsum(0)
    ahead: np.ndarray = tokens - tokens.sum(1, keepdims=True) * shares
    return ahead


Draw = Callable[[np.random.Generator, int], np.ndarray]
DRAWS: dict[str, Draw] = {
    "lognormal": lambda rng, num: rng.lognormal(5, 1.5, num).astype(np.int64) + 1,
    "one or many": lambda rng, num: np.where(rng.random(num) < 0.01, 100_000, 1),
    "one length": lambda rng, num: np.full(num, 7),
    "many empty": lambda rng, num: rng.integers(0, 3, num),
}


@given(
    st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=50),
    st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=4),
    st.integers(0, 99),
)
@settings(max_examples=num_examples(40), deadline=None)
@example([1.0] * 50, ["one length"], 0)
@example([0.7, 0.3], ["one or many", "one length"], 1)
@example([1.0, *[0.02] * 49], ["one or many"], 2)
def test_any_prefix_has_each_source_within_one_document_of_its_share(
    weights: list[float], kinds: list[str], seed: int
) -> None:
    rng, size = np.random.default_rng(seed), 400
    lengths = np.concatenate([DRAWS[kinds[n % len(kinds)]](rng, size) for n in range(len(weights))]).astype(np.int64)
    sources = [MixedSource(f"s{n}", size, None) for n in range(len(weights))]
    orders = [GlobalOrder(size, n) for n in range(len(weights))]
    mixture = TokenMixture(sources, [WeightChange(0, tuple(weights))], "never", orders=orders, lengths=lengths)
    firsts = np.arange(len(weights)) * size
    ahead = deviations(mixture, lengths, firsts, np.array(weights) / sum(weights), 3000)
    assert -ahead.min() <= lengths.max() + 1e-6
    for number, own in enumerate(np.split(lengths, len(weights))):
        assert ahead[:, number].max() <= own.max() + 1e-6, "ahead by less than its own longest"


def test_with_one_length_these_are_the_turns_of_samples() -> None:
    changes = [WeightChange(0, (0.7, 0.2, 0.1)), WeightChange(333, (0.2, 0.5, 0.3))]
    sources = [MixedSource(name, 500, 1) for name in "abc"]
    orders = [SequentialOrder()] * 3
    by_sample = Mixture(sources, changes, "all")
    by_tokens = TokenMixture(sources, changes, "all", orders=orders, lengths=np.full(1500, 9))
    assert by_tokens.num_samples(0) == by_sample.num_samples
    numbers = by_tokens.indices(0, np.arange(1500)) // 500
    assert np.abs(np.cumsum(numbers == 1) - np.cumsum(by_sample.locate(0, np.arange(1500))[0] == 1)).max() <= 1


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.integers(0, 50), st.integers(0, 2000))
@settings(max_examples=num_examples(60), deadline=None)
@example([1, 1, 1], 0, 5)
def test_the_kernel_and_its_twin(weights: list[int], seed: int, num_turns: int) -> None:
    rng = np.random.default_rng(seed)
    num = len(weights)
    lengths = rng.integers(0, 10 ** rng.integers(1, 9), (num, 200)).reshape(-1)
    starts = np.arange(num) * 200
    outcomes = []
    for kernel in (native.interleave_lengths, kernel_twins.interleave_lengths):
        lags, nexts, rows = np.zeros(num, np.int64), starts.copy(), np.zeros(num_turns, np.int64)
        ends = starts + 200
        found = kernel(lags, np.array(weights), lengths, nexts, ends, rows)
        again = kernel(lags, np.array(weights), lengths, nexts, ends, rows[found:]) if (nexts < ends).all() else 0
        outcomes.append((found, again, lags.tolist(), nexts.tolist(), rows.tolist()))
        assert lags.sum() == 0
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("lengths", "message"), [([3, 3, 0, 0], "sources.s1: all 2 samples are empty")])
def test_what_cannot_be_mixed_is_said(lengths: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixed([2, 2], [1, 1], [WeightChange(0, (0.5, 0.5))], "all", lengths).make()


def test_a_change_to_nothing_is_said_where_it_is_known() -> None:
    changes = [WeightChange(0, (1.0, 0.0)), WeightChange(5, (0.0, 0.0))]
    with pytest.raises(ConfigError, match="at position 5 every source"):
        Mixed([2, 2], [1, 1], changes, "never", [1] * 4).make()
    ends = [WeightChange(0, (1.0, 0.0)), WeightChange(50, (0.5, 0.5))]
    with pytest.raises(ConfigError, match=r"position 10 every source .* used up before the change at 50"):
        Mixed([10, 10], [1, 1], ends, "all", [1] * 20).make().num_samples(0)
