"""Batches of large samples of unequal shape: as NumPy reads them, whatever is kept or broken off, and nothing is left."""

from __future__ import annotations

import gc
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import EXECUTORS
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from numpy.typing import NDArray
from recorded_arrays import TYPES, random_array, same_bits
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.samples.slots import LEAST_LENT

PAGE = mmap.PAGESIZE
NUM_FILES = 14


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


def volumes(folder: Path, kind: Any = "list", batch: int = 3) -> Pipeline:
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
    for number in range(20):
        np.save(tmp_path / f"{number:02}.npy", np.full(size(rng, number), number, np.uint8))
    overrides = {**EXECUTORS[executor], "prefetch.memory": "2MiB", "prefetch.batches": 8}
    with loaderkit.build(volumes(tmp_path, batch=1).epochs(2), overrides=overrides) as loader:
        for epoch in range(2):
            seen = []
            for batch in loader:
                (found,), (key,) = batch["npy"], batch["__key__"]
                assert (found == int(key[:2])).all()
                seen.append(key)
                memory = loader.stats().memory
                if epoch:
                    assert memory["open_bytes"] <= max(memory["budget_bytes"], memory["batch_bytes"])
            assert len(set(seen)) == 20
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
