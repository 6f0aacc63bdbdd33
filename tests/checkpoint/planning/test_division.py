"""Which rank writes which bytes: all of them, once, by a rank that holds them, and evenly."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from loaderkit.checkpoint.planning.division import MIN_CUT_BYTES, HeldBox, Span, divide

SHAPES = st.lists(st.integers(0, 400), max_size=3).map(tuple).filter(lambda shape: prod(shape) < 2**24)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def blocks_of(num_ranks: int) -> st.SearchStrategy[list[HeldBox]]:
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    return st.lists(st.builds(HeldBox, SHAPES, ITEMSIZES, ranks, st.booleans()), max_size=40)


def loads(blocks: list[HeldBox], shares: list[list[Span]]) -> list[int]:
    return [sum((end - first) * blocks[number].itemsize for number, first, end in spans) for spans in shares]


@given(st.data(), st.integers(1, 6))
def test_each_element_once_by_a_rank_that_holds_it(data: st.DataObject, num_ranks: int) -> None:
    blocks = data.draw(blocks_of(num_ranks))
    shares = divide(blocks, num_ranks)
    assert len(shares) == num_ranks
    found: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for rank, spans in enumerate(shares):
        assert spans == sorted(spans)
        for number, first, end in spans:
            assert rank in blocks[number].ranks
            found[number].append((first, end))
    for block, ranges in zip(blocks, found, strict=True):
        ranges.sort()
        assert ranges[0][0] == 0
        assert ranges[-1][1] == prod(block.shape)
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        if not block.can_cut or block.num_bytes < MIN_CUT_BYTES:
            assert len(ranges) == 1
        assert all(first < end for first, end in ranges) or len(ranges) == 1


@given(st.data(), st.integers(2, 8))
def test_what_all_hold_is_even(data: st.DataObject, num_ranks: int) -> None:
    ranks = st.just(tuple(range(num_ranks)))
    blocks = data.draw(st.lists(st.builds(HeldBox, SHAPES, ITEMSIZES, ranks, st.just(True)), max_size=60))
    found = loads(blocks, divide(blocks, num_ranks))
    assert sum(found) == sum(block.num_bytes for block in blocks)
    assert max(found) <= 1.02 * min(found) or max(found) - min(found) < MIN_CUT_BYTES


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_a_state_of_training_on_four_ranks(seed: int, count: int) -> None:
    """Tensors from scalars to hundreds of megabytes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(0, 18, count)).astype(int)
    blocks = [HeldBox((int(size) // 64 + 1, 64) if size > 64 else (), 4, (0, 1, 2, 3)) for size in sizes]
    shares = divide(blocks, 4)
    found = loads(blocks, shares)
    assert max(found) <= 1.02 * min(found) or max(found) - min(found) < MIN_CUT_BYTES
    assert sum(map(len, shares)) <= count + 3  # three cuts


@given(st.data(), st.integers(2, 5))
def test_as_even_as_can_be_whoever_holds_what(data: st.DataObject, num_ranks: int) -> None:
    """Against the solution of the linear program that makes the most bytes of a rank as few as can be."""
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    sizes = st.integers(10, 100).map(lambda rows: (rows, 1000))
    blocks = data.draw(st.lists(st.builds(HeldBox, sizes, st.just(8), ranks, st.just(True)), min_size=1, max_size=12))
    found = loads(blocks, divide(blocks, num_ranks))
    places = [(number, rank) for number, block in enumerate(blocks) for rank in block.ranks]
    to_rank = [[float(rank == one) for _, rank in places] + [-1.0] for one in range(num_ranks)]
    to_block = [[float(number == one) for number, _ in places] + [0.0] for one in range(len(blocks))]
    least = linprog(
        [0.0] * len(places) + [1.0],
        A_ub=to_rank,
        b_ub=[0.0] * num_ranks,
        A_eq=to_block,
        b_eq=[block.num_bytes for block in blocks],
    )
    assert least.fun is not None
    assert max(found) <= 1.02 * least.fun


def test_who_has_much_of_its_own_gets_less() -> None:
    blocks = [HeldBox((3_000_000,), 1, (0,)), HeldBox((5_000_000,), 1, (0, 1)), HeldBox((100,), 1, (1,))]
    found = loads(blocks, divide(blocks, 2))
    assert found == pytest.approx([4_000_050, 4_000_050], rel=0.01)


def test_groups_of_replicas() -> None:
    """Two groups of two replicas each, one with more, and something that all hold."""
    blocks = [
        HeldBox((9_000, 1_000), 1, (0, 2)),
        HeldBox((3_000, 1_000), 1, (1, 3)),
        HeldBox((8_000, 1_000), 1, (0, 1, 2, 3)),
    ]
    assert loads(blocks, divide(blocks, 4)) == pytest.approx([5_000_000] * 4, rel=0.01)


def test_only_the_largest_are_cut_and_along_rows() -> None:
    blocks = [HeldBox((700, 1_000), 4, (0, 1, 2, 3))] * 9 + [HeldBox((90, 100), 4, (0, 1, 2, 3))] * 50
    cut = [
        span for spans in divide(blocks, 4) for span in spans if span.end - span.first < prod(blocks[span.block].shape)
    ]
    assert {span.block for span in cut} <= set(range(9))
    assert len(cut) <= 6
    assert all(span.first % 1_000 == 0 for span in cut)
    assert all(span.first * 4 % 64 == 0 for span in cut)


def test_the_same_plan_each_time() -> None:
    blocks = [HeldBox((number * 997, 16), 4, (0, 1, 2)) for number in range(40)]
    assert divide(blocks, 3) == divide(blocks, 3)
