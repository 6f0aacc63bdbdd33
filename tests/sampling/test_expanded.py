"""The order of samples of which several are made of one, against lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from loaderkit.sampling.expanded import ExpandedOrder
from loaderkit.sampling.mix_rules import MixedSource, WeightChange
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.schedule import UNKNOWN, BatchSampler, BlockOrder, GlobalOrder, SequentialOrder


def drawn(rng: random.Random) -> SampleOrder:
    num = rng.randint(1, 30)
    kind = rng.randrange(4)
    if kind == 0:
        return SequentialOrder(num)
    if kind == 1:
        return GlobalOrder(num, rng.randrange(99))
    if kind == 2:
        return BlockOrder(np.array([0, num // 2, num]) if num > 1 else np.array([0, 1]), 3, window=2, lanes=2)
    sources = [MixedSource("a", num, 1), MixedSource("b", 20, 2)]
    mixture = Mixture(sources, [WeightChange(0, (0.3, 0.7))], "all")
    return MixedOrder(mixture, [GlobalOrder(num, 1), GlobalOrder(20, 2)])


def test_every_sample_comes_as_often_one_behind_another(rng: random.Random) -> None:
    for _ in range(30):
        inner, num, epoch = drawn(rng), rng.randint(1, 6), rng.randrange(3)
        order = ExpandedOrder(inner.for_thread(), num).for_thread()
        samples = inner.indices(epoch, np.arange(inner.num_positions(epoch))).tolist()
        listed = [sample * num + number for sample in samples for number in range(num)]
        assert order.num_positions(epoch) == len(listed)
        positions = np.array(rng.choices(range(len(listed)), k=17))
        indices = order.indices(epoch, positions)
        assert indices.tolist() == [listed[position] for position in positions]
        assert order.samples_of(indices).tolist() == [samples[position // num] for position in positions]
        assert order.keys(epoch, indices, lambda some: [f"s{one}" for one in some.tolist()]) == [
            f"s{samples[position // num]}" for position in positions
        ]
        begin = rng.randrange(len(listed))
        run = np.arange(begin, min(begin + 9, len(listed)))
        (reads,) = order.reads(epoch, run, begin, 1)
        wanted = [(sample, slot) for slot, sample in enumerate(samples[one // num] for one in run)]
        firsts = [pair for place, pair in enumerate(wanted) if place == 0 or pair[0] != wanted[place - 1][0]]
        assert list(zip(reads.samples.tolist(), reads.slots.tolist(), strict=True)) == firsts
        known, about = order.num_before(epoch, begin)
        assert known == begin // num
        assert about - known == (begin % num > 0)
        assert order.positions_before(epoch, begin) == about


def test_what_has_no_end_has_none() -> None:
    assert ExpandedOrder(SequentialOrder(), 4).num_positions(0) == UNKNOWN


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_the_same_positions_in_every_step(rng: random.Random, drop_last: bool) -> None:
    """A rank has neighbours; together they have those of one rank with as large a batch."""
    for _ in range(40):
        num, size, world_size = rng.randint(1, 90), rng.randint(1, 7), rng.randint(1, 4)
        start = rng.choice([0, size * world_size * rng.randint(0, max(0, num // (size * world_size)))])
        start = min(start, num - 1)
        samplers = [
            BatchSampler(num, rank, world_size, size, drop_last, keeps_neighbours=True) for rank in range(world_size)
        ]
        (num_batches,) = {one.num_batches(start) for one in samplers}
        at = start
        for step in range(num_batches):
            parts = [one.positions(start, step).tolist() for one in samplers]
            assert len({len(part) for part in parts}) == 1
            together = [position for part in parts for position in part]
            assert together == list(range(at, at + len(together)))
            at += len(together)
            assert min(at, num) == samplers[0].position_after(start, step + 1)
        assert (at > num - size * world_size) if drop_last else at >= num
        rank = rng.randrange(world_size)
        several = samplers[rank].positions(start, 0, num_batches).tolist()
        assert several == [one for step in range(num_batches) for one in samplers[rank].positions(start, step).tolist()]
