from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray

from loaderkit.errors import StateError
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.schedule import BatchSampler, BlockOrder, GlobalOrder, SequentialOrder
from loaderkit.sampling.state import State

Int64 = NDArray[np.int64]
SEEDS = st.integers(0, 2**63)


def bounds_of(sizes: list[int]) -> Int64:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=40)

# ------------------------------------------------------------------------------------------------------ permutations


@given(st.integers(1, 3000), SEEDS, st.integers(0, 10**6))
def test_global_order_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    found = GlobalOrder(num_samples, seed).indices(epoch, np.arange(num_samples))
    assert np.array_equal(np.sort(found), np.arange(num_samples))


def test_sequential_order_is_the_canonical_one() -> None:
    assert SequentialOrder().indices(5, np.array([3, 0, 7])).tolist() == [3, 0, 7]


@given(SIZES, st.integers(1, 10), st.integers(1, 12), SEEDS, st.integers(0, 100))
@example([1], 1, 8, 0, 0)
@example([1, 12], 1, 2, 0, 0)
@example([12, 1, 1, 1], 16, 4, 0, 0)
def test_block_order_is_a_permutation(sizes: list[int], window: int, lanes: int, seed: int, epoch: int) -> None:
    num_samples = sum(sizes)
    order = BlockOrder(bounds_of(sizes), seed, window=window, lanes=lanes)
    found = order.indices(epoch, np.arange(num_samples))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(num_samples))


@given(SIZES, st.integers(1, 5), st.integers(1, 6), SEEDS, st.data())
def test_a_position_does_not_depend_on_what_was_asked_before(
    sizes: list[int], window: int, lanes: int, seed: int, data: st.DataObject
) -> None:
    num_samples = sum(sizes)
    used = BlockOrder(bounds_of(sizes), seed, window=window, lanes=lanes)
    for _ in range(4):
        epoch = data.draw(st.integers(0, 5))
        places = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=10))
        fresh = BlockOrder(bounds_of(sizes), seed, window=window, lanes=lanes)
        whole = fresh.indices(epoch, np.arange(num_samples))
        assert used.indices(epoch, np.array(places, np.int64)).tolist() == whole[places].tolist()


# -------------------------------------------------------------------------------------- the structure of block order


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), SEEDS, st.integers(0, 3))
def test_equal_blocks_are_dealt_exactly(
    block: int, window: int, lanes: int, num_rounds: int, seed: int, epoch: int
) -> None:
    """Equal blocks and a number that lanes divide: every lane serves its own blocks and nothing else, window by window."""
    num_blocks = lanes * num_rounds
    sizes = [block] * num_blocks
    order = BlockOrder(bounds_of(sizes), seed, window=window, lanes=lanes)
    found = order.indices(epoch, np.arange(block * num_blocks))
    seen: set[int] = set()
    for lane in range(lanes):
        served = found[lane::lanes]
        for start in range(0, num_rounds, window):
            group = served[start * block : (start + window) * block]
            blocks = set((group // block).tolist())
            assert len(blocks) == min(window, num_rounds - start)
            assert len(group) == len(blocks) * block
            assert set(group.tolist()) == {block * b + i for b in blocks for i in range(block)}
            assert not blocks & seen
            seen |= blocks
    assert seen == set(range(num_blocks))


def reference_block_order(sizes: list[int], dealt: list[list[int]], window: int, lanes: int) -> list[list[set[int]]]:
    """Lane by lane, group by group: the samples that belong there, by the words of the design."""
    starts = bounds_of(sizes)
    return [
        [
            {int(starts[b]) + i for b in blocks[first : first + window] for i in range(sizes[b])}
            for first in range(0, len(blocks), window)
        ]
        for blocks in dealt[:lanes]
    ]


@given(SIZES, st.integers(1, 5), st.integers(1, 6), SEEDS)
@settings(max_examples=num_examples(200))
def test_unequal_blocks_follow_the_words_of_the_design(sizes: list[int], window: int, lanes: int, seed: int) -> None:
    """With the permutation of blocks known (from blocks of one sample each), everything but the mixing is determined."""
    num_blocks, num_samples = len(sizes), sum(sizes)
    singles = BlockOrder(bounds_of([1] * num_blocks), seed, window=1, lanes=1)
    permuted = singles.indices(0, np.arange(num_blocks)).tolist()
    dealt = [permuted[lane::lanes] for lane in range(lanes)]
    groups = reference_block_order(sizes, dealt, window, lanes)
    found = BlockOrder(bounds_of(sizes), seed, window=window, lanes=lanes).indices(0, np.arange(num_samples)).tolist()
    surplus: set[int] = set()
    guests: list[int] = []
    for lane in range(lanes):
        served = found[lane::lanes]
        place = 0
        for group in groups[lane]:
            part = served[place : place + len(group)]
            assert set(part) <= group, "a sample came before its group's turn, or from another lane"
            surplus |= group - set(part)
            place += len(group)
        guests += served[place:]
    # Only what longer lanes could not place comes at the end of shorter ones.
    assert set(guests) == surplus
    assert len(guests) == len(surplus)


def test_lanes_serve_their_own_blocks_while_all_of_them_have_samples() -> None:
    sizes = np.random.default_rng(0).integers(20, 60, 64).tolist()
    bounds = bounds_of(sizes)
    order = BlockOrder(bounds, 3, window=4, lanes=8)
    found = order.indices(0, np.arange(bounds[-1]))
    block_of = np.searchsorted(bounds, found, side="right") - 1
    lane_blocks = [set(block_of[lane : int(bounds[-1]) * 3 // 4 : 8].tolist()) for lane in range(8)]
    for lane in range(8):
        for other in range(lane):
            assert not lane_blocks[lane] & lane_blocks[other]
    # 8 lanes x 4 blocks are open at a time, so what is read in a stretch is much less than everything.
    assert len(set(block_of[:200].tolist())) <= 32


def test_blocks_and_groups_are_really_shuffled() -> None:
    sizes = [10] * 100
    order = BlockOrder(bounds_of(sizes), 0, window=5, lanes=2)
    first, second = (order.indices(epoch, np.arange(1000)) for epoch in (0, 1))
    assert np.count_nonzero(first == second) < 30
    other = BlockOrder(bounds_of(sizes), 1, window=5, lanes=2).indices(0, np.arange(1000))
    assert np.count_nonzero(first == other) < 30
    # Which of the 50 samples of a group comes first is uniform: over epochs, all ten places in a block occur.
    firsts = [int(order.indices(epoch, np.array([0]))[0]) for epoch in range(400)]
    counts = np.bincount(np.array(firsts) % 10, minlength=10)
    assert ((counts - 40) ** 2 / 40).sum() < 30
    assert len({value // 10 for value in firsts}) > 90


# ---------------------------------------------------------------------------------------------------------- schedule


def reference_batches(
    num_samples: int, world_size: int, batch_size: int, drop_last: bool, start: int
) -> list[list[list[int]]]:
    """rank -> batches -> global positions, dealt one by one as the design says; positions >= num_samples wrap."""
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    left = num_samples - start
    if drop_last:
        num_positions = left // (batch_size * world_size) * batch_size * world_size
    else:
        num_positions = -(-left // world_size) * world_size
    # Consecutive positions go to distinct ranks, so W of them in a row give every rank exactly one.
    for position in range(start, start + num_positions):
        dealt[position % world_size].append(position)
    return [[positions[i : i + batch_size] for i in range(0, len(positions), batch_size)] for positions in dealt]


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 20), st.booleans(), st.floats(0, 1), st.integers(0, 3))
@settings(max_examples=num_examples(300))
@example(10, 3, 2, False, 0.5, 0)
@example(1, 8, 4, False, 0.0, 0)
def test_schedule_against_dealing_one_by_one(
    num_samples: int, world_size: int, batch_size: int, drop_last: bool, share: float, jitter: int
) -> None:
    start = min(num_samples, int(share * num_samples) + jitter)
    expected = reference_batches(num_samples, world_size, batch_size, drop_last, start)
    for rank in range(world_size):
        schedule = BatchSampler(num_samples, rank, world_size, batch_size, drop_last)
        assert schedule.num_batches(start) == len(expected[rank])
        found = [schedule.positions(start, step).tolist() for step in range(schedule.num_batches(start))]
        assert found == expected[rank]
        for step in range(len(found) + 1):
            after = schedule.position_after(start, step)
            delivered = step * batch_size * world_size
            assert after == min(num_samples, start + delivered)
    assert len({len(batches) for batches in expected}) == 1, "ranks would stop at different steps"


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 20))
def test_counts_are_those_of_the_design(num_samples: int, world_size: int, batch_size: int) -> None:
    dropped = BatchSampler(num_samples, 0, world_size, batch_size, True)
    assert dropped.num_batches() == num_samples // (batch_size * world_size)
    kept = BatchSampler(num_samples, 0, world_size, batch_size, False)
    per_rank = (num_samples + world_size - 1) // world_size
    assert kept.num_batches() == (per_rank + batch_size - 1) // batch_size
    assert kept.num_batches(num_samples) == dropped.num_batches(num_samples) == 0


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 20))
def test_ranks_are_disjoint_and_cover(num_samples: int, world_size: int, batch_size: int) -> None:
    seen: list[int] = []
    num_wrapped = 0
    for rank in range(world_size):
        schedule = BatchSampler(num_samples, rank, world_size, batch_size, False)
        for step in range(schedule.num_batches()):
            positions = schedule.positions(0, step)
            assert len(positions) <= batch_size
            seen += positions[positions < num_samples].tolist()
            num_wrapped += int(np.count_nonzero(positions >= num_samples))
    assert sorted(seen) == list(range(num_samples))
    assert num_wrapped == -num_samples % world_size


@given(st.data())
@settings(max_examples=num_examples(200))
def test_resuming_with_other_ranks_and_batches_covers_exactly_the_rest(data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(1, 150))
    delivered: list[int] = []
    start = 0
    for _ in range(data.draw(st.integers(1, 4))):
        world_size, batch_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
        schedules = [BatchSampler(num_samples, rank, world_size, batch_size, False) for rank in range(world_size)]
        num_batches = schedules[0].num_batches(start)
        num_steps = data.draw(st.integers(0, num_batches))
        for schedule in schedules:
            for step in range(num_steps):
                positions = schedule.positions(start, step)
                delivered += positions[positions < num_samples].tolist()
        start = schedules[0].position_after(start, num_steps)
        assert sorted(delivered) == list(range(start))
    rest = BatchSampler(num_samples, 0, 1, 7, False)
    for step in range(rest.num_batches(start)):
        delivered += rest.positions(start, step).tolist()
    assert sorted(delivered) == list(range(num_samples))


@given(SIZES, SEEDS, st.sampled_from(["global", "block"]))
@settings(max_examples=num_examples(40))
def test_the_interleaved_sequence_is_that_of_one_rank(sizes: list[int], seed: int, mode: str) -> None:
    num_samples = sum(sizes)
    order: SampleOrder = (
        GlobalOrder(num_samples, seed) if mode == "global" else BlockOrder(bounds_of(sizes), seed, window=2, lanes=4)
    )
    alone = order.indices(0, np.arange(num_samples)).tolist()
    for world_size in (1, 2, 3, 8):
        together = np.full(num_samples, -1)
        for rank in range(world_size):
            schedule = BatchSampler(num_samples, rank, world_size, 3, False)
            for step in range(schedule.num_batches()):
                positions = schedule.positions(0, step)
                positions = positions[positions < num_samples]
                together[positions] = order.indices(0, positions)
        assert together.tolist() == alone


# ------------------------------------------------------------------------------------------------------------- state

FINGERPRINT = {"data": "files of 10 samples, digest 00", "order": "global", "stages": "read > batch"}


@given(st.integers(0, 10**9), st.integers(0, 10**12), SEEDS, st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_state_survives_json(epoch: int, position: int, seed: int, fingerprint: dict[str, str]) -> None:
    state = State(epoch, position, seed, fingerprint)
    data = state.to_dict()
    assert data.keys() == {"version", "epoch", "position", "seed", "fingerprint"}
    restored = State.from_dict(json.loads(json.dumps(data)))
    assert restored == state
    restored.check(seed=seed, fingerprint=fingerprint, num_samples=lambda epoch: position)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"version": "1"}, "version '1'"),
        ({"epoch": None}, "'epoch' is None"),
        ({"epoch": -1}, "'epoch' is -1"),
        ({"epoch": 1.5}, r"'epoch' is 1\.5"),
        ({"epoch": True}, "'epoch' is True"),
        ({"position": "3"}, "'position' is '3'"),
        ({"position": -5}, "'position' is -5"),
        ({"position": [1]}, r"'position' is \[1\]"),
        ({"seed": "x"}, "'seed' is 'x'"),
        ({"seed": 0.0}, r"'seed' is 0\.0"),
        ({"fingerprint": None}, "'fingerprint'"),
        ({"fingerprint": "abc"}, "'fingerprint'"),
        ({"fingerprint": ["a"]}, "'fingerprint'"),
        ({"fingerprint": {1: "a", "b": "c"}}, "'fingerprint'"),
        ({"fingerprint": {"a": 10**5000}}, "'fingerprint'"),
        ({"version": 10**5000}, "version a int"),
        ({"epoch": 10**5000}, "'epoch' is a int"),
        ({"epoch": 2**63}, "'epoch' is 9223372036854775808"),
        ({"position": 2**63}, "'position' is 9223372036854775808"),
    ],
)
def test_malformed_states(change: dict[str, Any], said: str) -> None:
    good = State(1, 2, 3, FINGERPRINT).to_dict()
    with pytest.raises(StateError, match=said):
        State.from_dict({**good, **change})


@pytest.mark.parametrize("name", ["version", "epoch", "position", "seed", "fingerprint"])
def test_states_with_a_missing_part(name: str) -> None:
    data = State(1, 2, 3, FINGERPRINT).to_dict()
    del data[name]
    with pytest.raises(StateError, match=name):
        State.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "state", 3, [("epoch", 1)]])
def test_states_that_are_no_dict(data: object) -> None:
    with pytest.raises(StateError, match=f"not {type(data).__name__}"):
        State.from_dict(data)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State(0, 0, 1, FINGERPRINT), ["seed: the state has 1, this loader 0"]),
        (State(0, 11, 0, FINGERPRINT), ["position: the state has 11, the data set only 10"]),
        (State(0, 0, 0, {**FINGERPRINT, "order": "none"}), ["order: the state has none, this loader global"]),
        (State(0, 0, 0, {**FINGERPRINT, "more": "x"}), ["more: the state has x, this loader nothing"]),
        (
            State(0, 0, 0, {"data": FINGERPRINT["data"]}),
            ["order: the state has nothing", "stages: the state has nothing"],
        ),
        (
            State(0, 0, 9, {**FINGERPRINT, "data": "files of 9 samples, digest 11"}),
            ["data: the state has files of 9 samples, digest 11, this loader files of 10", "seed: the state has 9"],
        ),
    ],
)
def test_states_of_something_else(state: State, said: list[str]) -> None:
    with pytest.raises(StateError, match="repeat or skip") as caught:
        state.check(seed=0, fingerprint=FINGERPRINT, num_samples=lambda epoch: 10)
    for text in said:
        assert text in str(caught.value)
    assert "data: " not in str(caught.value) or state.fingerprint.get("data") != FINGERPRINT["data"]
