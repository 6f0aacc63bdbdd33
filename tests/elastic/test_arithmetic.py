"""The order itself, far from the begin and over all world sizes: no loaders, so many more positions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from elastic_cases import WORLD_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray
from scipy.stats import chi2

from loaderkit.sampling.mix_rules import MixedSource, WeightChange
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder

Int64 = NDArray[np.int64]
Segments = list[tuple[int, int, int]]
"""(number of ranks, batch size, steps) of each."""

# ------------------------------------------------------------------------------------------- any position, any world size


class Mixed(NamedTuple):
    """A mixture, described, so that each rank makes it for itself."""

    sources: list[MixedSource]
    changes: list[WeightChange]
    stop: Literal["first", "all", "never"]
    seed: int

    @property
    def num_documents(self) -> int:
        return sum(source.num_samples for source in self.sources)

    def made(self) -> tuple[MixedOrder, int]:
        """Its order, and the samples of an epoch."""
        mixture = Mixture(self.sources, self.changes, self.stop)
        orders = [GlobalOrder(source.num_samples, self.seed + n) for n, source in enumerate(self.sources)]
        return MixedOrder(mixture, orders), mixture.num_samples


@st.composite
def mixtures(draw: st.DrawFn, *, ends: bool) -> Mixed:
    num = draw(st.integers(1, 6))
    rows = st.lists(st.integers(1, 1000), min_size=num, max_size=num)
    places = sorted(draw(st.sets(st.integers(1, 200 if ends else 10**12), max_size=3)))
    sources = [
        MixedSource(
            f"s{n}",
            draw(st.integers(1, 60 if ends else 10**9)),
            draw(st.sampled_from([1, 2, 3])) if ends else None,
        )
        for n in range(num)
    ]
    changes = [WeightChange(at, tuple(map(float, draw(rows)))) for at in [0, *places]]
    stop: Any = draw(st.sampled_from(["first", "all"])) if ends else "never"
    return Mixed(sources, changes, stop, draw(st.integers(0, 2**62)))


SEGMENTS = st.lists(
    st.tuples(st.sampled_from(WORLD_SIZES), st.integers(1, 5), st.integers(1, 12)), min_size=2, max_size=3
)


def dealt(of_rank: Callable[[], Callable[[Int64], list[Any]]], num: int, start: int, segments: Segments) -> list[Any]:
    """What all ranks of some segments get from position `start` of `num` on, in the order of positions. `of_rank` gives what is
    at some positions, by an order of the rank's own."""
    found: dict[int, Any] = {}
    for world_size, batch_size, num_steps in segments:
        samplers = [BatchSampler(num, rank, world_size, batch_size, False) for rank in range(world_size)]
        steps = min(num_steps, samplers[0].num_batches(start))
        for sampler in samplers if steps else []:
            positions = sampler.positions(start, 0, steps)
            positions = positions[positions < num]
            assert not found.keys() & set(positions.tolist()), "each position goes to one rank, once"
            found.update(zip(positions.tolist(), of_rank()(positions), strict=True))
        start = samplers[0].position_after(start, steps)
    return [found[position] for position in sorted(found)]


def check_mixture(mixed: Mixed, epoch: int, start: int, segments: Segments) -> None:
    order, num = mixed.made()
    start = min(start, num)
    found = dealt(lambda: lambda at: mixed.made()[0].indices(epoch, at).tolist(), num, start, segments)
    assert found == order.indices(epoch, np.arange(start, start + len(found))).tolist()


@given(mixtures(ends=False), st.integers(0, 10**12), SEGMENTS)
@settings(max_examples=num_examples(30), deadline=None)
def test_a_mixture_far_from_its_begin(mixed: Mixed, start: int, segments: Segments) -> None:
    check_mixture(mixed, 0, start, segments)


@given(mixtures(ends=True), st.integers(0, 10**6), st.integers(0, 400), SEGMENTS)
@settings(max_examples=num_examples(30), deadline=None)
def test_a_mixture_in_any_epoch(mixed: Mixed, epoch: int, start: int, segments: Segments) -> None:
    check_mixture(mixed, epoch, start, segments)


def packed_rows(order: PackedOrder, epoch: int, sequences: Int64) -> list[Any]:
    """Of each sequence its pieces: the documents, their first tokens, how many, and where in the sequence they are."""
    if not len(sequences):
        return []
    *columns, places, bounds = order.pieces(epoch, sequences)
    columns.append(places % order.length)  # they count on from sequence to sequence
    return [[column[begin:end].tolist() for column in columns] for begin, end in pairwise(bounds.tolist())]


@given(
    mixed=mixtures(ends=True),
    sizes=st.sampled_from([3.0, 15.0, 60.0]),
    length=st.integers(1, 60),
    window=st.integers(1, 50),
    epoch=st.integers(0, 10**6),
    start=st.integers(0, 100),
    segments=SEGMENTS,
)
@settings(max_examples=num_examples(30), deadline=None)
def test_packed_in_any_epoch(
    mixed: Mixed, sizes: float, length: int, window: int, epoch: int, start: int, segments: Segments
) -> None:
    lengths = np.random.default_rng(mixed.seed).exponential(sizes, mixed.num_documents).astype(np.int64) + 1

    def packed() -> PackedOrder:
        order, _ = mixed.made()
        return PackedOrder(order, lengths, length=length, window=window, seed=mixed.seed, is_even=True)

    whole = packed()
    num = whole.num_samples(epoch)
    start = min(start, num)
    found = dealt(lambda: lambda at: packed_rows(packed(), epoch, at), num, start, segments)
    assert found == packed_rows(whole, epoch, np.arange(start, start + len(found)))
    assert sum(sum(lengths) for _, _, lengths, _ in packed_rows(whole, epoch, np.arange(num))) == sum(
        lengths[mixed.made()[0].indices(epoch, np.arange(mixed.made()[1])) % mixed.num_documents]
    ), "no token is lost or doubled"


# --------------------------------------------------------------------------------------------------------------- chance

LEAST_P = 1e-7  # what is drawn anew each run is to fail once in a million of them


def p_of(counts: NDArray[Any]) -> float:
    """Pearson's chi-square: the chance of such counts, or worse ones, if all are drawn with one mean."""
    mean = counts.mean()
    return float(chi2.sf(((counts - mean) ** 2 / mean).sum(), len(counts) - 1))


def passes_of(size: int, num_passes: int, seed: int) -> tuple[Int64, Int64]:
    """The passes over two sources of one size as they come in a mixture: int64 [passes, size] each."""
    mixture = Mixture(
        [MixedSource("a", size, None), MixedSource("b", size, None)], [WeightChange(0, (0.5, 0.5))], "never"
    )
    order = MixedOrder(mixture, [GlobalOrder(size, seed), GlobalOrder(size, seed + 1)])
    indices = order.indices(0, np.arange(2 * size * num_passes)) % (2 * size)
    return indices[indices < size].reshape(-1, size), indices[indices >= size].reshape(-1, size) - size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_as_frequent(size: int, rng: random.Random) -> None:
    for rows in passes_of(size, 60 * math.factorial(size), rng.randrange(2**62)):
        codes = rows @ (size ** np.arange(size))
        counts = np.zeros(math.factorial(size))
        found = np.unique(codes, return_counts=True)[1]
        counts[: len(found)] = found
        assert p_of(counts) > LEAST_P


@pytest.mark.parametrize("size", [7, 10, 31, 64, 100])
def test_samples_of_a_source_are_shuffled(size: int, rng: random.Random) -> None:
    num = 20 * size
    first, other = passes_of(size, num, rng.randrange(2**62))
    places = np.bincount((np.arange(size) * size + first).reshape(-1), minlength=size * size)
    # Permutations fix the sums of rows and columns, and so spread less than free draws, by (size - 1) / size.
    statistic = ((places - 20) ** 2 / 20).sum() * (size - 1) / size
    assert chi2.sf(statistic, (size - 1) ** 2) > LEAST_P, "each sample at each place"

    def p_of_distance(one: Int64, two: Int64, least: int = 0) -> float:
        return p_of(np.bincount((one - two) % size, minlength=size)[least:])

    assert p_of_distance(first[:, 0], first[:, 1], 1) > LEAST_P, "neighbours"
    assert p_of_distance(first[1:, 0], first[:-1, -1]) > LEAST_P, "the end of a pass and the begin of the next"
    assert p_of_distance(first[1:, 0], first[:-1, 0]) > LEAST_P, "the same place in two passes"
    assert p_of_distance(first[:, 0], other[:, 0]) > LEAST_P, "two sources"
