"""Large samples of unequal shape: their memory is used again when nobody sees it, counted, bounded, and given back."""

from __future__ import annotations

import gc
import mmap
import os
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import EXECUTORS
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from numpy.typing import NDArray
from recorded_arrays import TYPES, random_array, same_bits
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.process.shared_memory import Allocator, SharedArena
from loaderkit.pipeline.batches import sample_memory
from loaderkit.pipeline.batches.sample_memory import PrivateArena, Ranges, SampleMemory
from loaderkit.stages.slots import LEAST_LENT

PAGE = mmap.PAGESIZE
NUM_FILES = 14


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    made = SharedArena.create()
    yield made
    made.release_descriptor()


class TestRanges:
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 20)), max_size=30))
    def test_as_sets_of_integers(self, steps: list[tuple[bool, int, int]]) -> None:
        ranges, wanted = Ranges([]), set[int]()
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


def write_arrays(folder: Path, rng: random.Random, dtype: str | None = None) -> dict[str, NDArray[Any]]:
    """Files of arrays of any shape, small ones and large ones."""
    folder.mkdir()
    arrays = {}
    for number in range(NUM_FILES):
        kind = dtype or rng.choice(TYPES)
        least = rng.choice((1, LEAST_LENT)) // np.dtype(kind).itemsize
        height = rng.randrange(1, 400)
        array = random_array(kind, height, least // height + rng.randrange(1, 300), seed=rng.randrange(2**32))
        order = rng.choice((np.ascontiguousarray, np.asfortranarray))
        key = f"{number:02}.npy"
        np.save(folder / key, order(array))
        arrays[key] = np.load(folder / key)
    return arrays


def volumes(folder: Path, kind: str = "list", batch: int = 3) -> Pipeline:
    return Pipeline.files(folder).shuffle("global").read().decode().batch(batch, ragged={"npy": kind})


def padded(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    shape = np.max([array.shape for array in arrays], axis=0)
    return np.stack(
        [np.pad(array, [(0, most - n) for most, n in zip(shape, array.shape, strict=True)]) for array in arrays]
    )


@pytest.mark.parametrize("executor", EXECUTORS)
class TestBatches:
    def test_as_numpy_reads_them(self, executor: str, tmp_path: Path, rng: random.Random) -> None:
        arrays = write_arrays(tmp_path / "d", rng)
        kept: list[tuple[torch.Tensor, str]] = []
        with loaderkit.build(volumes(tmp_path / "d"), overrides=EXECUTORS[executor]) as loader:
            for _ in range(4):
                seen = []
                for batch in loader:
                    for key, found in zip(batch["__key__"], batch["npy"], strict=True):
                        assert same_bits(found, arrays[key])
                    seen += batch["__key__"]
                    if rng.random() < 0.3:
                        kept.append((batch["npy"][0], batch["__key__"][0]))
                assert sorted(seen) == sorted(arrays)
            assert all(same_bits(found, arrays[key]) for found, key in kept)
        assert all(same_bits(found, arrays[key]) for found, key in kept), "it outlives the loader"

    def test_padded(self, executor: str, tmp_path: Path, rng: random.Random) -> None:
        arrays = write_arrays(tmp_path / "d", rng, "float32")
        with loaderkit.build(volumes(tmp_path / "d", "pad"), overrides=EXECUTORS[executor]) as loader:
            for _ in range(2):
                for batch in loader:
                    assert same_bits(batch["npy"], padded([arrays[key] for key in batch["__key__"]]))

    def test_early_breaks(self, executor: str, tmp_path: Path, rng: random.Random) -> None:
        arrays = write_arrays(tmp_path / "d", rng, "float32")
        most = 3 * max(array.nbytes for array in arrays.values())
        with loaderkit.build(volumes(tmp_path / "d"), overrides=EXECUTORS[executor]) as loader:
            for _ in range(20):
                for _ in loader:
                    break
            batch = next(iter(loader))
            key, found = batch["__key__"][0], batch["npy"][0]
            assert same_bits(found, arrays[key])
            gc.collect()
            memory = loader.stats().memory
            num_open = (
                loader.stats().tuning.batches or 1
            ) + 4  # in the loop, and dropped but not yet out of the stages
            assert memory["live_bytes"] <= memory["allocated_bytes"] <= 2 * num_open * most


def grown(least: int, most: int) -> Callable[[random.Random, int], int]:
    """The first sample is the smallest, so that nothing is known yet of the others."""
    return lambda rng, number: rng.randrange(least, most) if number else least


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_small_budget(executor: str, tmp_path: Path, rng: random.Random) -> None:
    """Batches larger than the budget are made one by one."""
    least, most = 600_000, 4_000_000
    size = grown(least, most)
    for number in range(30):
        np.save(tmp_path / f"{number:02}.npy", np.full(size(rng, number), number, np.uint8))
    overrides = {**EXECUTORS[executor], "prefetch.memory": "2MiB", "prefetch.batches": 8}
    with loaderkit.build(volumes(tmp_path, batch=1).epochs(3), overrides=overrides) as loader:
        for epoch in range(3):
            seen = []
            for batch in loader:
                (found,), (key,) = batch["npy"], batch["__key__"]
                assert (found == int(key[:2])).all()
                seen.append(key)
                memory = loader.stats().memory
                if epoch:
                    assert memory["open_bytes"] <= max(memory["budget_bytes"], memory["batch_bytes"])
            assert len(set(seen)) == 30
        assert 2 * 2**20 < memory["batch_bytes"] <= most
        # One is made and one is in the loop; the first were made before it was known how large they can be.
        assert memory["allocated_bytes"] <= 1.5 * 5 * most


def test_nothing_is_left_of_the_region(tmp_path: Path, rng: random.Random) -> None:
    """A tensor that is kept for ever keeps its own pages and no others."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    for number in range(12):
        np.save(tmp_path / f"{number:02}.npy", np.full(rng.randrange(8_000_000, 12_000_000), number, np.uint8))
    loader = loaderkit.build(volumes(tmp_path, batch=2), overrides=EXECUTORS["thread"])
    with loader:
        list(loader)
    gc.collect()
    before = resident_bytes()
    with loaderkit.build(volumes(tmp_path, batch=2), overrides=EXECUTORS["thread"]) as loader:
        batches = list(loader)
    kept, key = batches[0]["npy"][0], batches[0]["__key__"][0]
    batches.clear()
    wait_for(lambda: bool(gc.collect() or resident_bytes() - before < 40_000_000))
    assert (kept == int(key[:2])).all()
