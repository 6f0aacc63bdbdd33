"""The laws of orders that wrap one another, over drawn nests, against what each position holds when it is asked for alone."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.sampling.mix_rules import MixedSource, WeightChange
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.schedule import BatchSampler, BlockOrder, GlobalOrder, SequentialOrder
from loaderkit.sampling.token_batches import TokenBatches, fill_by_length, fill_in_order
from loaderkit.sampling.token_mixture import TokenMixture

NUM_NESTS = 12
TOKENS = 40
Int64 = NDArray[np.int64]
Slot = tuple[tuple[int, int, int], ...]
"""What lies in a slot: (sample, first number, length) of each piece; of a whole sample the length is that of the sample."""


class Nest(NamedTuple):
    """A drawn order, described, so that it can be made again; and its samples' lengths, by number."""

    make: Callable[[], SampleOrder]
    make_core: Callable[[], SampleOrder]
    parts: list[Callable[[], SampleOrder]]
    unit: str
    lengths: Int64
    by_tokens: bool

    def length(self, sample: int) -> int:
        return int(self.lengths[sample % len(self.lengths)])


def drawn_part(rng: random.Random) -> tuple[int, Callable[[], SampleOrder]]:
    """The order of one source, and the number of its samples."""
    num, seed = rng.randint(1, 40), rng.randrange(2**62)
    kind = rng.choice(["sequential", "global", "block"])
    if kind == "sequential":
        return num, lambda: SequentialOrder(num)
    if kind == "global":
        return num, lambda: GlobalOrder(num, seed)
    bounds = np.array([0, *sorted(rng.sample(range(1, num), min(num - 1, rng.randint(0, 5)))), num])
    window, lanes = rng.randint(1, 3), rng.randint(1, 3)
    return num, lambda: BlockOrder(bounds, seed, window=window, lanes=lanes)


def drawn(rng: random.Random) -> Nest:
    pairs = [drawn_part(rng) for _ in range(rng.randint(1, 4))]
    lengths = np.array([rng.choice([0, 1, 3, 7, 20, TOKENS]) for num, _ in pairs for _ in range(num)])
    lengths[np.cumsum([num for num, _ in pairs]) - 1] = 5  # each source has a token
    core, by_tokens = pairs[0][1], False
    if len(pairs) > 1:
        by_tokens = rng.random() < 0.5
        core = drawn_mixture(rng, pairs, lengths, by_tokens=by_tokens)
    seed, window, is_even = rng.randrange(2**62), rng.randint(1, 50), rng.random() < 0.5
    unit = rng.choice(["samples", "sequences", "batches"])
    if unit == "samples":
        return Nest(core, core, [make for _, make in pairs], unit, lengths, by_tokens)
    length = rng.randint(1, TOKENS) if unit == "sequences" else TOKENS
    fill = native.best_fit if unit == "sequences" else rng.choice([fill_by_length, native.best_fit, fill_in_order])

    def packed() -> PackedOrder:
        return PackedOrder(core(), lengths, length=length, window=window, seed=seed, is_even=is_even, fill=fill)

    def cut() -> SampleOrder:
        return TokenBatches(packed(), window)

    return Nest(cut if unit == "batches" else packed, core, [make for _, make in pairs], unit, lengths, by_tokens)


def drawn_mixture(
    rng: random.Random, pairs: list[tuple[int, Callable[[], SampleOrder]]], lengths: Int64, *, by_tokens: bool
) -> Callable[[], SampleOrder]:
    sources = [MixedSource(f"s{number}", num, rng.randint(1, 2)) for number, (num, _) in enumerate(pairs)]
    weights = [[rng.uniform(0.1, 1) for _ in pairs] for _ in range(2)]
    changes = [WeightChange(0, tuple(weights[0])), WeightChange(rng.randint(1, 20), tuple(weights[1]))]
    stop: Any = rng.choice(["first", "all"])

    def mixed() -> SampleOrder:
        orders = [make() for _, make in pairs]
        if by_tokens:
            return TokenMixture(sources, changes, stop, orders=orders, lengths=lengths)
        return MixedOrder(Mixture(sources, changes, stop), orders)

    return mixed


def slots(nest: Nest, epoch: int) -> list[Slot]:
    """What lies at each position of an epoch, of an order that is asked for one after another, in a random order."""
    order = nest.make()
    packed = order.order if isinstance(order, TokenBatches) else order
    found: list[Slot] = [()] * order.num_positions(epoch)
    for position in random.Random(len(found)).sample(range(len(found)), len(found)):
        alone = np.array([position])
        if isinstance(packed, PackedOrder):
            pieces = packed.pieces(epoch, alone)
            columns = (pieces.samples.tolist(), pieces.firsts.tolist(), pieces.lengths.tolist())
            found[position] = tuple(zip(*columns, strict=True))
        else:
            sample = int(order.indices(epoch, alone)[0])
            found[position] = ((sample, 0, nest.length(sample)),)
    return found


@pytest.fixture
def nests(rng: random.Random) -> list[Nest]:
    return [drawn(rng) for _ in range(NUM_NESTS)]


def test_an_epoch_holds_what_its_core_has(nests: list[Nest], rng: random.Random) -> None:
    for nest in nests:
        order, core, epoch = nest.make(), nest.make_core(), rng.randint(0, 3)
        assert order.unit == nest.unit
        found = Counter(sample for one in slots(nest, epoch) for sample, _, length in one for _ in range(length))
        samples = core.indices(epoch, np.arange(core.num_positions(epoch))).tolist()
        assert found == Counter(sample for sample in samples for _ in range(nest.length(sample)))
        assert order.num_samples(epoch) == (
            core.num_positions(epoch) if nest.unit == "batches" else order.num_positions(epoch)
        )
        assert order.core.indices(epoch, np.arange(len(samples))).tolist() == samples
        if not order.epochs_differ:
            assert len({order.num_positions(epoch) for epoch in range(4)}) == 1


def test_a_source_comes_in_its_own_order_pass_after_pass(nests: list[Nest]) -> None:
    for nest in nests:
        core = nest.make_core()
        if not core.sources:
            continue
        firsts = np.cumsum([0, *(source.num_samples for source in core.sources)])
        indices = [core.indices(epoch, np.arange(core.num_positions(epoch))).tolist() for epoch in range(3)]
        for number, source in enumerate(core.sources):
            size, first, make = source.num_samples, int(firsts[number]), nest.parts[number]
            own = [index for some in indices for index in some if first <= index % firsts[-1] < first + size]
            for place, index in enumerate(own):
                number_of_pass, inside = divmod(place, size)
                wanted = int(make().indices(number_of_pass, np.array([inside]))[0])
                assert index == number_of_pass * firsts[-1] + first + wanted
        epochs = [(epoch, len(some)) for epoch, some in enumerate(indices)]
        counted = Counter(index % firsts[-1] for some in indices for index in some)
        places = core.places(*epochs[-1])
        assert sum(places) == counted.total()


def test_each_rank_has_what_lies_at_its_positions(nests: list[Nest], rng: random.Random) -> None:
    for nest in nests:
        order, epoch = nest.make(), rng.randint(0, 3)
        lying = slots(nest, epoch)
        world_size, start = rng.randint(1, 5), rng.randint(0, max(0, len(lying) - 1))
        batch_size = 1 if nest.unit == "batches" else rng.randint(1, 4)
        steps = BatchSampler(len(lying), 0, world_size, batch_size, False).num_batches(start)
        given: list[list[list[tuple[int, bool]]]] = []  # by rank and batch
        for rank in range(world_size):
            sampler = BatchSampler(len(lying), rank, world_size, batch_size, False)
            step, batches = 0, []
            while step < steps:  # some batches at a time
                positions = sampler.positions(start, step, rng.randint(1, 6))
                indices, places, bounds, wrapped = order.in_batches(epoch, positions, batch_size, start, world_size)
                marks = np.zeros(len(indices), bool) if wrapped is None else wrapped
                held = list(zip(indices.tolist(), marks.tolist(), strict=True))
                batches += [held[begin:end] for begin, end in pairwise(bounds.tolist())]
                assert len(indices) == len(places) == bounds[-1]
                indices[:] = -1  # bad samples are replaced in it, which no other batch may see
                step += len(bounds) - 1
            given.append(batches)
        check = check_cut if nest.unit == "batches" else check_dealt
        check(nest, lying, given, start, batch_size)


def check_dealt(
    nest: Nest, lying: list[Slot], given: list[list[list[tuple[int, bool]]]], start: int, size: int
) -> None:
    num, world_size = len(lying), len(given)
    for rank, batches in enumerate(given):
        first = start + (rank - start) % world_size
        wanted = list(range(first, first + world_size * -(-(num - start) // world_size), world_size))
        held = [pair for batch in batches for pair in batch]
        assert [is_wrapped for _, is_wrapped in held] == [position >= num for position in wanted]
        for (index, _), position in zip(held, wanted, strict=True):
            assert index == (position % num if nest.unit == "sequences" else lying[position % num][0][0])
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)


def check_cut(nest: Nest, lying: list[Slot], given: list[list[list[tuple[int, bool]]]], start: int, size: int) -> None:
    num, world_size = len(lying), len(given)
    for step in range(len(given[0])):
        here = range(start + step * world_size, min(start + (step + 1) * world_size, num))
        wanted = [[sample for sample, _, _ in lying[position]] for position in here]
        held = [given[rank][step] for rank in range(world_size)]
        if len(here) == world_size:
            by_rank = {position % world_size: samples for position, samples in zip(here, wanted, strict=True)}
            assert [[sample for sample, _ in batch] for batch in held] == [by_rank[rank] for rank in range(world_size)]
        left = Counter(sample for samples in wanted for sample in samples)
        assert Counter(sample for batch in held for sample, is_wrapped in batch if not is_wrapped) == left
        assert sum(is_wrapped for batch in held for _, is_wrapped in batch) == max(0, world_size - left.total())


def test_what_is_read_is_what_slots_hold(nests: list[Nest], rng: random.Random) -> None:
    for nest in nests:
        order, epoch = nest.make(), rng.randint(0, 3)
        lying, world_size = slots(nest, epoch), rng.randint(1, 3)
        sampler = BatchSampler(len(lying), rng.randrange(world_size), world_size, 1, False)
        positions = sampler.positions(0, 0, sampler.num_batches())
        if not len(positions):
            continue
        found: list[list[tuple[int, int, int]]] = []
        for reads in order.reads(epoch, positions, 0, world_size):
            some: list[list[tuple[int, int, int]]] = [[] for _ in range(reads.num_slots)]
            lengths = [nest.length(sample) for sample in reads.samples.tolist()]
            pieces = reads.pieces or (np.zeros(len(lengths), np.int64), np.array(lengths))
            for number, *piece in zip(reads.slots.tolist(), reads.samples.tolist(), *pieces, strict=True):
                some[number].append((piece[0], int(piece[1]), int(piece[2])))
            found += some
        if nest.unit == "batches":
            wanted = order.in_batches(epoch, positions, 1, 0, world_size).indices.tolist()
            assert [one[0][0] for one in found] == wanted
        else:
            assert [tuple(one) for one in found] == [lying[position % len(lying)] for position in positions.tolist()]


def test_keys_name_samples_and_the_cut_ones_with_their_part(nests: list[Nest], rng: random.Random) -> None:
    for nest in nests:
        order, epoch = nest.make(), rng.randint(0, 3)
        lying = slots(nest, epoch)
        positions = np.array([rng.randrange(len(lying)) for _ in range(5)])
        indices = order.in_batches(epoch, positions, 1, int(positions[-1]), 1).indices
        wanted = [
            " ".join(
                f"k{sample}" + ("" if length == nest.length(sample) else f"[{first}:{first + length}]")
                for sample, first, length in held
            )
            for position in positions.tolist()
            for held in ([(one,) for one in lying[position]] if nest.unit == "batches" else [lying[position]])
        ]
        assert order.keys(epoch, indices, lambda some: [f"k{sample}" for sample in some.tolist()]) == wanted


def test_what_comes_before_a_position(nests: list[Nest], rng: random.Random) -> None:
    for nest in nests:
        order, core, epoch = nest.make(), nest.make_core(), rng.randint(0, 3)
        lying = slots(nest, epoch)
        position = rng.randint(0, len(lying))
        before = [sample for one in lying[:position] for sample, _, _ in one]
        samples = core.indices(epoch, np.arange(core.num_positions(epoch))).tolist()
        assert set(before) <= set(samples[: order.positions_before(epoch, position)])
        surely, about = order.num_before(epoch, position)
        assert surely <= about <= order.positions_before(epoch, position) or position == len(lying)
        assert {sample for sample in samples[:surely] if nest.length(sample) or nest.unit == "samples"} <= set(before)
        if nest.unit == "samples":
            assert surely == about == order.positions_before(epoch, position) == position


def test_copies_do_not_disturb_one_another(nests: list[Nest], rng: random.Random) -> None:
    for nest in nests:
        order = nest.make()
        others = [order, order.for_thread(), pickle.loads(pickle.dumps(order)), order.for_thread().for_thread()]
        lying = {epoch: slots(nest, epoch) for epoch in range(3)}
        for _ in range(20):
            epoch = rng.randrange(3)
            position = np.array([rng.randrange(len(lying[epoch]))])
            reads = [reads for other in others for reads in other.reads(epoch, position, int(position[0]), 1)]
            wanted = [sample for sample, _, _ in lying[epoch][int(position[0])]]
            assert [one.samples.tolist() for one in reads] == [wanted] * len(others)


def test_digests_tell_orders_apart(nests: list[Nest]) -> None:
    for nest in nests:
        order = nest.make()
        digests = order.digests()
        knows = nest.unit != "samples" or nest.by_tokens
        names = ({"mix"} if order.core.sources else set()) | ({"lengths"} if knows else set())
        assert digests.keys() == names
        assert nest.make().digests() == digests
        if knows:
            samples = np.arange(len(nest.lengths))
            assert order.lengths_of(samples).tolist() == nest.lengths.tolist()
            nest.lengths[0] += 1
            assert nest.make().digests()["lengths"] != digests["lengths"]
