"""Packing as a plan: every token once, tight, in order, and even over ranks, whatever is asked for first."""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loaderkit.sampling.packing import PackedOrder, Pieces
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder, SequentialOrder

Int64 = NDArray[np.int64]


def packed(lengths: Int64, length: int, window: int, *, seed: int = 0, is_even: bool = True) -> PackedOrder:
    order = GlobalOrder(len(lengths), seed)
    return PackedOrder(order, lengths, length=length, window=window, seed=seed, is_even=is_even)


def all_pieces(order: PackedOrder, epoch: int) -> Pieces:
    return order.pieces(epoch, np.arange(order.num_samples(epoch)))


def best_fit(lengths: list[int], length: int, *, decreasing: bool) -> int:
    """The number of bins, written plainly: each piece goes into the fullest bin that has room."""
    pieces = [piece for n in lengths for piece in [length] * (n // length) + [n % length] * (n % length > 0)]
    spaces: list[int] = []
    num_bins = 0
    for piece in sorted(pieces, reverse=True) if decreasing else pieces:
        at = bisect_left(spaces, piece)
        if at < len(spaces):
            left = spaces.pop(at) - piece
        else:
            left, num_bins = length - piece, num_bins + 1
        insort(spaces, left)
    return num_bins


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=80).filter(any),
    length=st.integers(1, 30),
    window=st.integers(1, 40),
    seed=st.integers(0, 3),
    is_even=st.booleans(),
)
def test_every_token_is_in_one_place(lengths: list[int], length: int, window: int, seed: int, is_even: bool) -> None:
    sizes = np.array(lengths)
    order = packed(sizes, length, window, seed=seed, is_even=is_even)
    for epoch in (0, 3):
        pieces = all_pieces(order, epoch)
        taken: dict[int, list[int]] = defaultdict(list)
        for sample, first, n in zip(
            pieces.samples.tolist(), pieces.firsts.tolist(), pieces.lengths.tolist(), strict=True
        ):
            taken[sample] += range(first, first + n)
        assert {sample: sorted(numbers) for sample, numbers in taken.items()} == {
            sample: list(range(n)) for sample, n in enumerate(lengths) if n
        }
        place_of = np.empty(len(sizes), np.int64)
        place_of[GlobalOrder(len(sizes), seed).indices(epoch, np.arange(len(sizes)))] = np.arange(len(sizes))
        for number, (begin, end) in enumerate(pairwise(pieces.bounds.tolist())):
            assert begin < end  # no sequence is empty
            ends = np.cumsum(pieces.lengths[begin:end])
            assert ends[-1] <= length
            assert (pieces.places[begin:end] - number * length).tolist() == [0, *ends[:-1].tolist()]
            places = place_of[pieces.samples[begin:end]]
            assert (np.diff(places) > 0).all()  # the order of the epoch, and no document twice
            assert len(set((places // window).tolist())) == 1
            assert all(
                n == length or first % length == 0 for first, n in zip(pieces.firsts, pieces.lengths, strict=True)
            )


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=120).filter(any),
    length=st.integers(1, 30),
    window=st.integers(1, 40),
)
def test_as_many_sequences_as_best_fit_makes(lengths: list[int], length: int, window: int) -> None:
    order = packed(np.array(lengths), length, window, seed=5)
    in_order = [lengths[i] for i in GlobalOrder(len(lengths), 5).indices(2, np.arange(len(lengths)))]
    wanted = [best_fit(in_order[at : at + window], length, decreasing=True) for at in range(0, len(lengths), window)]
    assert order.num_samples(2) == sum(wanted)


def lognormal(num: int, seed: int = 0) -> Int64:
    return np.maximum(1, np.random.default_rng(seed).lognormal(6.5, 1, num).astype(np.int64))


@pytest.mark.parametrize("length", [2048, 8192])
def test_padding_is_at_most_that_of_best_fit_in_order(length: int) -> None:
    lengths = lognormal(20_000)
    order = packed(lengths, length, 4000)
    in_order = lengths[GlobalOrder(len(lengths), 0).indices(0, np.arange(len(lengths)))]
    online = sum(best_fit(in_order[at : at + 4000].tolist(), length, decreasing=False) for at in range(0, 20_000, 4000))
    assert order.num_samples(0) <= online


@pytest.mark.parametrize(("mean", "batch_size", "world_size"), [(6.5, 1, 16), (6.5, 4, 16), (5.2, 1, 16), (6.5, 1, 12)])
def test_steps_cost_the_same_on_all_ranks(mean: float, batch_size: int, world_size: int) -> None:
    lengths = np.maximum(
        1, np.random.default_rng(1).lognormal(mean, 1, 150_000 if mean == 6.5 else 700_000).astype(np.int64)
    )
    order = packed(lengths, 8192, 20_000)
    pieces = all_pieces(order, 1)
    costs = np.add.reduceat(pieces.lengths.astype(np.float64) ** 2, pieces.bounds[:-1])
    step = batch_size * world_size
    steps = costs[: len(costs) // step * step].reshape(-1, batch_size, world_size).sum(1)
    assert steps.max(1).sum() / steps.mean(1).sum() < 1.05
    if mean == 6.5:  # a sweep of 2,700 sequences has some of all costs
        assert costs[:2700].std() > 0.8 * costs.std()


def test_without_costs_the_order_is_random() -> None:
    order = packed(lognormal(20_000), 8192, 20_000, is_even=False)
    pieces = all_pieces(order, 0)
    costs = np.add.reduceat(pieces.lengths.astype(np.float64) ** 2, pieces.bounds[:-1])
    assert abs(np.corrcoef(costs[1:], costs[:-1])[0, 1]) < 0.1


@given(data=st.data())
def test_any_sequences_in_any_order_are_those_of_all(data: st.DataObject) -> None:
    order = packed(np.random.default_rng(2).integers(0, 40, 300), 25, 20)
    whole = all_pieces(order, 1)
    num = order.num_samples(1)
    wanted = np.array(data.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=30)))
    fresh = pickle.loads(pickle.dumps(order))
    for made in (order, fresh):
        some, expected = made.pieces(1, wanted), whole.take(wanted, 25)
        for column, values in zip(some, expected, strict=True):
            assert column.tolist() == values.tolist()


def test_epochs_and_seeds_differ_and_runs_do_not() -> None:
    lengths = lognormal(3000)
    made = [
        all_pieces(packed(lengths, 4096, 500, seed=seed), epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    samples = [pieces.samples.tolist() for pieces in made]
    assert samples[0] != samples[1] != samples[2] != samples[0]
    assert samples[0] == samples[3]


def test_positions_follow_epochs_of_different_sizes() -> None:
    order = packed(np.random.default_rng(3).integers(1, 30, 60), 31, 10)
    sizes = [order.num_samples(epoch) for epoch in range(8)]
    assert len(set(sizes)) > 1
    sampler = BatchSampler(sizes[0], 0, 2, 3, False, sizes=order)
    places, epoch, position = [], 0, 0
    while epoch < 6:
        places.append((epoch, position))
        position += 6
        if position >= sizes[epoch]:
            epoch, position = epoch + 1, 0
    for number in range(len(places) - 1):
        for ahead in range(len(places) - number):
            assert sampler.next_position_after(*places[number], ahead) == places[number + ahead]


def test_in_canonical_order_windows_follow_it() -> None:
    lengths = np.array([3, 5, 2, 6, 1, 1, 9])
    order = PackedOrder(SequentialOrder(7), lengths, length=8, window=3, seed=0, is_even=True)
    pieces = all_pieces(order, 0)
    assert {tuple(sorted(pieces.samples[b:e].tolist())) for b, e in zip(pieces.bounds, pieces.bounds[1:], strict=False)} <= {
        (0, 1), (2,), (0,), (1,), (1, 2), (0, 2), (3, 4, 5), (3, 4), (5,), (4, 5), (3,), (6,),
    }  # fmt: skip
    assert order.num_samples(0) == 2 + 1 + 2
