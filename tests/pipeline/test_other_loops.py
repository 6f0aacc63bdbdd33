"""Where a loader stands for a DataLoader: what Lightning, Accelerate and the Trainer of transformers do with one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HELPERS
from other_loops import BATCH_SIZE, KINDS, NUM_BATCHES, NUM_EPOCHS, NUM_SAMPLES, built, numbers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from loaderkit.errors import ClosedError

# What Accelerate passes on to a DataLoader, each from an attribute or with this default.
DEFAULTS: dict[str, Any] = {
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory_device": "",
}


class Skipping(BatchSampler):
    """As Accelerate's."""

    def __init__(self, batch_sampler: Any, num: int) -> None:
        self.batch_sampler = batch_sampler
        self._num = num

    def __iter__(self) -> Iterator[Any]:
        return (batch for number, batch in enumerate(self.batch_sampler) if number >= self._num)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self._num


def skip_first_batches(loader: Any, num: int) -> DataLoader[Any]:
    """The calls of `accelerate.skip_first_batches`."""
    assert not isinstance(loader.dataset, IterableDataset)
    assert not isinstance(loader.sampler, BatchSampler)
    given = {name: getattr(loader, name, default) for name, default in DEFAULTS.items()}
    return DataLoader(loader.dataset, batch_sampler=Skipping(loader.batch_sampler, num), **given)


def whole(kind: str = "dataset") -> list[list[int]]:
    with built(kind=kind) as loader:
        return [batch for _ in range(NUM_EPOCHS) for batch in numbers(loader)]


def test_the_parts_of_a_data_loader() -> None:
    for rank in range(2):
        with built(rank=rank, world_size=2) as loader:
            assert (len(loader.dataset), loader.batch_size, loader.sampler) == (NUM_SAMPLES, BATCH_SIZE, None)
            assert len(loader.batch_sampler) == len(list(loader.batch_sampler)) == len(loader)
            with pytest.raises(TypeError):
                loader.dataset[0]  # it has no samples to give, and that is no batch either


def test_what_accelerate_would_shard_again() -> None:
    with built(rank=0, world_size=2) as loader:
        with pytest.raises(AttributeError, match=r"would be sharded twice\. Iterate over the loader itself"):
            _ = loader.drop_last
        assert getattr(loader, "drop_last", False) is False, "as Lightning asks"


@pytest.mark.matrix(6)
@pytest.mark.parametrize("num_done", range(NUM_EPOCHS * NUM_BATCHES))
@pytest.mark.parametrize("kind", KINDS)
def test_skipped_batches(num_done: int, kind: str) -> None:
    """As in a loop by hand, which sets the epoch first, and in the Trainer, which sets it afterwards."""
    epoch, num_skipped = divmod(num_done, NUM_BATCHES)
    for is_trainer in (False, True):
        with built(kind=kind) as loader:
            if not is_trainer:
                loader.set_epoch(epoch)
            rest: Any = skip_first_batches(loader, num_skipped)
            if is_trainer:
                rest.batch_sampler.batch_sampler.set_epoch(epoch)
            assert len(rest) == NUM_BATCHES - num_skipped
            trained = numbers(rest)
            assert loader.state_dict()["epoch"] == epoch + 1
            later = [one for _ in range(epoch + 1, NUM_EPOCHS) for one in numbers(loader)]
            assert trained + later == whole(kind)[num_done:]


def test_skipped_batches_are_not_made() -> None:
    with built() as loader:
        rest = iter(skip_first_batches(loader, 5))
        next(rest)
        assert loader.stats().num_batches == 1
        assert loader.state_dict()["position"] == 6 * BATCH_SIZE
        list(loader)
        with pytest.raises(ClosedError, match="newer"):
            next(rest)


def test_skipped_twice_are_two_epochs() -> None:
    with built() as loader:
        rest = skip_first_batches(loader, NUM_BATCHES - 1)
        assert numbers(rest) + numbers(rest) == [whole()[number * NUM_BATCHES - 1] for number in (1, 2)]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("num_done", range(NUM_EPOCHS * NUM_BATCHES))
@pytest.mark.parametrize("has_state", [False, True])
def test_lightning_calls(num_done: int, has_state: bool) -> None:
    """It makes an iterator before it trains, tells a sampler in a batch sampler the epoch, and makes an iterator of every later
    epoch. What was saved at an epoch's end it restores without the loader's state."""
    epoch, num_of_epoch = divmod(num_done, NUM_BATCHES)
    with built() as loader:
        batches = (batch for _ in range(NUM_EPOCHS) for batch in loader)
        assert numbers(next(batches) for _ in range(num_done)) == whole()[:num_done]
        state = loader.state_dict()
    trained = []
    with built() as loader:
        if num_of_epoch or has_state:
            loader.load_state_dict(state)
        iterator = iter(loader)
        for number in range(epoch, NUM_EPOCHS):
            loader.batch_sampler.sampler.set_epoch(number)
            if number > epoch:
                iterator = iter(loader)
            trained += numbers(iterator)
    assert trained == whole()[num_done:]


@pytest.mark.integration
@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_trains_and_resumes_by(library: str, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HELPERS / "other_loops.py"), library, str(tmp_path), kind]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert runs["whole"] == whole(kind)
    assert len(runs["resumed"]) >= NUM_EPOCHS * NUM_BATCHES - 1
    for num_done, trained in runs["resumed"]:
        assert trained == whole(kind)[num_done:], num_done
