"""The memory of large samples of unequal shape: used again when nobody sees it, counted, bounded, and given back."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loaderkit.engine.process.shared_memory import Allocator, SharedArena
from loaderkit.pipeline.batches import sample_memory
from loaderkit.pipeline.batches.sample_memory import AddressRanges, PrivateArena, SampleMemory

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    made = SharedArena.create()
    yield made
    made.release_descriptor()


class TestRanges:
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 20)), max_size=30))
    def test_as_sets_of_integers(self, steps: list[tuple[bool, int, int]]) -> None:
        ranges, wanted = AddressRanges([]), set[int]()
        for is_in, begin, length in steps:
            if is_in:
                ranges.add(begin, begin + length)
                wanted |= set(range(begin, begin + length))
            else:
                ranges.remove(begin, begin + length)
                wanted -= set(range(begin, begin + length))
            found = list(ranges)
            assert [n for low, high in found for n in range(low, high)] == sorted(wanted)
            assert all(before[1] < after[0] for before, after in pairwise(found)), "neighbours join"
            assert ranges.length == len(wanted)
            within = {n for low, high in ranges.within(begin, begin + length) for n in range(low, high)}
            assert within == wanted & set(range(begin, begin + length))
            fit = ranges.first_fit(length)
            fits = [n for n in sorted(wanted) if set(range(n, n + length)) <= wanted]
            assert fit == (fits[0] if fits else None)


def check_lending(memory: SampleMemory, steps: list[tuple[bool, int]]) -> None:
    held: list[tuple[torch.Tensor, int]] = []
    for number, (ends, size) in enumerate(steps):
        if ends and held:
            held.pop(size % len(held))
        else:
            held.append((torch.from_numpy(memory.take(size))[:].fill_(number % 251), number % 251))  # a view
        live, allocated = memory.num_bytes()
        assert live == sum(-(-tensor.nbytes // PAGE) * PAGE for tensor, _ in held)
        assert live <= allocated
        assert all((tensor == value).all() for tensor, value in held)


STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=50)


class TestLending:
    @given(STEPS)
    def test_nothing_lent_is_lent_again(self, steps: list[tuple[bool, int]]) -> None:
        check_lending(SampleMemory(), steps)

    @settings(max_examples=20)
    @given(STEPS)
    def test_nor_where_two_processes_see_it(self, steps: list[tuple[bool, int]]) -> None:
        arena = SharedArena.create()
        memory = SampleMemory(Allocator(arena).sample_arena)
        check_lending(memory, steps)
        _, allocated = memory.num_bytes()
        assert os.fstat(arena.fileno()).st_blocks * 512 == allocated
        arena.release_descriptor()

    def test_memory_is_used_again_whatever_the_sizes(self, rng: random.Random) -> None:
        memory = SampleMemory()
        held: list[NDArray[np.uint8]] = []
        allocated = []
        for _ in range(3000):
            held.append(memory.take(rng.randrange(8 * PAGE, 64 * PAGE)))
            if len(held) > 8:
                held.pop(0)
            allocated.append(memory.num_bytes()[1])
        fresh = sum(max(0, now - before) for before, now in pairwise(allocated[1000:]))
        assert fresh < 0.01 * 2000 * 36 * PAGE
        assert max(allocated) < 1.5 * 9 * 64 * PAGE

    def test_what_is_free_beyond_need_is_given_back(self, arena: SharedArena) -> None:
        memory = SampleMemory(Allocator(arena).sample_arena)
        held = [memory.take(100 * PAGE) for _ in range(20)]
        last = held.pop()  # kept behind all others
        last[:] = 7
        held.clear()
        for _ in range(5000):
            memory.take(PAGE)
        assert memory.num_bytes()[1] < 2 * 101 * PAGE
        assert os.fstat(arena.fileno()).st_blocks * 512 == memory.num_bytes()[1]
        assert (last == 7).all()

    def test_after_the_end_only_what_is_seen_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        discarded: list[tuple[int, int]] = []

        class Watched(PrivateArena):
            def discard(self, start: int, end: int) -> None:
                discarded.append((start, end))
                super().discard(start, end)

        monkeypatch.setattr(sample_memory, "PrivateArena", Watched)
        memory = SampleMemory()
        kept, free = memory.take(3 * PAGE), memory.take(2 * PAGE)
        kept[:] = 5
        del free
        memory.close()
        assert discarded == [(3 * PAGE, 5 * PAGE)]
        assert memory.num_bytes() == (0, 0)
        assert memory.take(PAGE).nbytes == PAGE, "a worker that was left behind may go on"
        del memory
        assert (kept == 5).all()
        del kept
        assert discarded[1:] == [(0, 3 * PAGE)]

    def test_the_program_can_fork_beside_several_and_its_child_sees_them(self, rng: random.Random) -> None:
        memories = [SampleMemory() for _ in range(rng.randint(2, 5))]
        kept = [memory.take(rng.randint(1, 9 * PAGE)) for memory in memories]
        for number, one in enumerate(kept):
            one[:] = number
        pid = os.fork()
        if not pid:
            os._exit(not all((one == number).all() for number, one in enumerate(kept)))
        assert os.waitpid(pid, 0)[1] == 0

    def test_where_the_system_refuses_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **more: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(mmap, "mmap", refuse)
        memory = SampleMemory()
        assert memory.take(1000).nbytes == 1000
        memory.close()


def test_pinned_blocks_are_left_alone(arena: SharedArena) -> None:
    """They are pinned whole and once: samples of any size would lie across them."""
    assert Allocator(arena, keep_pages=True).sample_arena is None


def test_where_shared_memory_is_short(arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is to blame for that: it lies elsewhere, and sending its batch is what fails, if there is still none."""

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    allocator = Allocator(arena)
    memory = SampleMemory(allocator.sample_arena)
    kept = memory.take(PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        elsewhere = memory.take(2 * PAGE)
    assert allocator.block_of(elsewhere.ctypes.data, 1) is None
    assert allocator.block_of(kept.ctypes.data, PAGE) is not None
    assert memory.num_bytes() == (PAGE, PAGE)
