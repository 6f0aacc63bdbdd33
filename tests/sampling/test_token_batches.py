"""Batches of tokens as a plan: every sample once, within the tokens, of similar lengths, and even over ranks."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.sampling.packing import Fill, PackedOrder
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder, SequentialOrder
from loaderkit.sampling.token_batches import TokenBatches, fill_by_length, fill_in_order, fill_in_order_by_sum

Int64 = NDArray[np.int64]
TOKENS = 60
lengths_of_samples = st.lists(st.integers(0, TOKENS), min_size=1, max_size=90).filter(any)


def planned(
    lengths: Int64, fill: Fill, *, tokens: int = TOKENS, window: int = 20, seed: int = 0, is_even: bool = True
) -> PackedOrder:
    order = GlobalOrder(len(lengths), seed)
    return PackedOrder(order, lengths, length=tokens, window=window, seed=seed, is_even=is_even, fill=fill)


def batches_of(order: PackedOrder, epoch: int) -> list[list[int]]:
    """The samples of all batches of an epoch."""
    pieces = order.pieces(epoch, np.arange(order.num_samples(epoch)))
    samples = pieces.samples.tolist()
    return [samples[begin:end] for begin, end in pairwise(pieces.bounds.tolist())]


def windows_of(lengths: Int64, window: int, epoch: int, seed: int = 0) -> list[list[int]]:
    """The samples with tokens in every window of an epoch's order."""
    order = GlobalOrder(len(lengths), seed).indices(epoch, np.arange(len(lengths))).tolist()
    windows = [[sample for sample in order[at : at + window] if lengths[sample]] for at in range(0, len(order), window)]
    return [window for window in windows if window]


def area(lengths: Int64, batch: list[int]) -> int:
    return len(batch) * int(lengths[batch].max())


def fewest(sizes: list[int], tokens: int) -> int:
    """The fewest groups, of which largest times number is at most `tokens`: every set that the first can be with is tried."""
    if not sizes:
        return 0
    rest, most = sizes[1:], len(sizes)
    for chosen in range(1 << len(rest)):
        group = [sizes[0], *(size for place, size in enumerate(rest) if chosen >> place & 1)]
        if max(group) * len(group) <= tokens:
            others = [size for place, size in enumerate(rest) if not chosen >> place & 1]
            most = min(most, 1 + fewest(others, tokens))
    return most


@given(lengths=lengths_of_samples, window=st.integers(1, 40), seed=st.integers(0, 3), is_even=st.booleans())
def test_batches_by_length_hold_every_sample_once(lengths: list[int], window: int, seed: int, is_even: bool) -> None:
    sizes = np.array(lengths)
    order = planned(sizes, fill_by_length, window=window, seed=seed, is_even=is_even)
    for epoch in (0, 3):
        batches = batches_of(order, epoch)
        assert sorted(sum(batches, [])) == np.flatnonzero(sizes).tolist()  # noqa: RUF017
        window_of = {s: w for w, some in enumerate(windows_of(sizes, window, epoch, seed)) for s in some}
        by_window: dict[int, list[list[int]]] = {}
        for batch in batches:
            assert area(sizes, batch) <= TOKENS
            (number,) = {window_of[sample] for sample in batch}
            by_window.setdefault(number, []).append(batch)
        for some in by_window.values():  # lengths of a window's batches do not overlap
            some.sort(key=lambda batch: (int(sizes[batch].min()), int(sizes[batch].max())))
            assert all(sizes[one].max() <= sizes[next_one].min() for one, next_one in pairwise(some))


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), tokens=st.integers(12, 30))
def test_no_batches_are_fewer_and_none_of_as_many_more_even(lengths: list[int], tokens: int) -> None:
    sizes = np.array(lengths)
    batches = batches_of(planned(sizes, fill_by_length, tokens=tokens, window=8), 0)
    assert len(batches) == fewest(lengths, tokens)
    largest = max(area(sizes, batch) for batch in batches)
    assert largest == max(lengths) or fewest(lengths, largest - 1) > len(batches)


@pytest.mark.parametrize("fill", [fill_in_order, fill_in_order_by_sum])
@given(lengths=lengths_of_samples, window=st.integers(1, 40))
def test_in_order_each_batch_takes_what_fits(fill: Fill, lengths: list[int], window: int) -> None:
    sizes = np.array(lengths)
    order = PackedOrder(
        SequentialOrder(len(sizes)), sizes, length=TOKENS, window=window, seed=0, is_even=False, keeps_order=True, fill=fill
    )  # fmt: skip
    wanted: list[list[int]] = []
    for begin in range(0, len(lengths), window):
        is_open = False
        for sample in range(begin, min(begin + window, len(lengths))):
            if not lengths[sample]:
                continue
            if is_open:
                together = [lengths[one] for one in [*wanted[-1], sample]]
                taken = sum(together) if fill is fill_in_order_by_sum else max(together) * len(together)
                is_open = taken <= TOKENS
            if is_open:
                wanted[-1].append(sample)
            else:
                wanted.append([sample])
            is_open = True
    assert batches_of(order, 0) == wanted


# ---------------------------------------------------------------------------------------------------------- over ranks


def dealt(batches: TokenBatches, epoch: int, start: int, world_size: int) -> list[list[tuple[list[int], list[bool]]]]:
    """[step][rank] -> (samples, which are repeated), by as many calls for each rank as it has batches, or one."""
    columns = []
    for rank in range(world_size):
        sampler = BatchSampler(batches.num_positions(epoch), rank, world_size, 1, False)
        num = sampler.num_batches(start)
        column = []
        step = 0
        while step < num:
            size = random.Random(rank).choice([1, 3, num])
            taken = batches.in_batches(epoch, sampler.positions(start, step, size), 1, start, world_size)
            wrapped = np.zeros(len(taken.indices), bool) if taken.wrapped is None else taken.wrapped
            for begin, end in pairwise(taken.bounds.tolist()):
                column.append((taken.indices[begin:end].tolist(), wrapped[begin:end].tolist()))
            step += size
        columns.append(column)
    assert len({len(column) for column in columns}) == 1
    return [list(row) for row in zip(*columns, strict=True)]


@given(
    lengths=lengths_of_samples,
    fill=st.sampled_from([fill_by_length, native.best_fit]),
    world_sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 16]), min_size=1, max_size=3),
    data=st.data(),
)
def test_ranks_take_all_batches_in_order_at_any_world_size(
    lengths: list[int], fill: Fill, world_sizes: list[int], data: st.DataObject
) -> None:
    sizes = np.array(lengths)
    batches = TokenBatches(planned(sizes, fill), 20)
    wanted, position, seen = batches_of(batches.order, 1), 0, []
    num = len(wanted)
    for number, world_size in enumerate(world_sizes):
        if position >= num:
            break
        rows = dealt(batches, 1, position, world_size)
        is_last = number == len(world_sizes) - 1
        num_steps = len(rows) if is_last else data.draw(st.integers(0, len(rows)))
        for row in rows[:num_steps]:
            if position + world_size <= num:  # neighbouring batches, each whole
                whole = {place % world_size: wanted[place] for place in range(position, position + world_size)}
                assert [some for some, _ in row] == [whole[rank] for rank in range(world_size)]
            left = wanted[position : position + world_size]
            for some, repeated in row:
                assert some
                assert any(set(some) <= set(batch) for batch in left)  # so it takes no more than a batch may
                seen += [sample for sample, again in zip(some, repeated, strict=True) if not again]
            num_left = sum(map(len, left))
            assert sum(sum(repeated) for _, repeated in row) == max(0, world_size - num_left)
            position = min(position + world_size, num)
    if position == num:
        assert sorted(seen) == np.flatnonzero(sizes).tolist()
    else:
        assert sorted(seen) == sorted(sum(wanted[:position], []))  # noqa: RUF017


@pytest.mark.parametrize(("fill", "mean"), [(fill_by_length, 6.5), (native.best_fit, 6.5), (fill_by_length, 4.5)])
def test_steps_cost_the_same_on_16_ranks(fill: Fill, mean: float) -> None:
    tokens = 65_536 if mean == 6.5 else 8192
    lengths = np.random.default_rng(1).lognormal(mean, 1, 400_000).astype(np.int64).clip(1, tokens // 8)
    order = planned(lengths, fill, tokens=tokens, window=20_000)
    pieces = order.pieces(1, np.arange(order.num_samples(1)))
    sums, squares, largest = (
        reduce.reduceat(values, pieces.bounds[:-1])
        for reduce, values in ((np.add, pieces.lengths), (np.add, pieces.lengths**2), (np.maximum, pieces.lengths))
    )
    areas = np.diff(pieces.bounds) * largest if fill is fill_by_length else sums
    for costs in (areas, squares):
        steps = costs[: len(costs) // 16 * 16].reshape(-1, 16)
        assert steps.max(1).sum() / steps.mean(1).sum() < 1.05
    assert lengths.sum() / areas.sum() > 0.95
