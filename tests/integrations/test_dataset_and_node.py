"""A loader in a DataLoader and in a graph of torchdata: the same batches, and an exact resume from any state."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from other_loops import KINDS, NUM_BATCHES, NUM_EPOCHS, built, numbers
from torch.utils.data import DataLoader

import loaderkit
from loaderkit.errors import ConfigError, MissingExtraError


def whole(kind: str) -> list[list[int]]:
    with built(kind=kind) as loader:
        return [batch for _ in range(NUM_EPOCHS) for batch in numbers(loader)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_loader_gives_the_same_batches(kind: str) -> None:
    with built(kind=kind) as loader:
        batches: Any = DataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=0)
        assert len(batches) == NUM_BATCHES
        assert [one for _ in range(NUM_EPOCHS) for one in numbers(batches)] == whole(kind)
        batches.dataset.set_epoch(1)
        assert numbers(batches) == whole(kind)[NUM_BATCHES : 2 * NUM_BATCHES]


@pytest.mark.filterwarnings("ignore")
def test_workers_of_a_data_loader_are_refused() -> None:
    with built() as loader:
        batches: Any = DataLoader(
            loader.as_iterable_dataset(), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        with pytest.raises(ConfigError, match="once for each of its workers"):
            next(iter(batches))


def made(kind: str, around: str) -> tuple[Any, Any]:
    loader = built(kind=kind)
    if around == "node":
        return loader, importlib.import_module("torchdata.nodes").Loader(loader.as_node())
    module = importlib.import_module("torchdata.stateful_dataloader")
    return loader, module.StatefulDataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.matrix(8)
@pytest.mark.parametrize("num_done", range(1, NUM_EPOCHS * NUM_BATCHES))
@pytest.mark.parametrize("around", ["node", "StatefulDataLoader"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchdata_resumes_exactly(kind: str, around: str, num_done: int) -> None:
    loader, outer = made(kind, around)
    with loader:
        batches = (batch for _ in range(NUM_EPOCHS) for batch in outer)
        assert numbers(next(batches) for _ in range(num_done)) == whole(kind)[:num_done]
        state = outer.state_dict()
    loader, outer = made(kind, around)
    with loader:
        outer.load_state_dict(state)
        trained: list[list[int]] = []
        while len(trained) < NUM_EPOCHS * NUM_BATCHES - num_done:
            trained += numbers(outer)
        assert trained == whole(kind)[num_done:]


def test_without_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(importlib.import_module("sys").modules, "loaderkit.integrations.torchdata", raising=False)
    monkeypatch.setitem(importlib.import_module("sys").modules, "torchdata.nodes", None)
    with built() as loader, pytest.raises(MissingExtraError, match="pip install torchdata"):
        loader.as_node()


@pytest.mark.parametrize("num_done", [1, NUM_BATCHES - 1, NUM_BATCHES + 2])
def test_a_checkpoint_manager_restores_a_graph(num_done: int, tmp_path: Path) -> None:
    """torchdata's Loader ignores a state that it is given after it was asked for one."""
    for is_resumed in (False, True):
        loader, graph = made("dataset", "node")
        with loader, loaderkit.CheckpointManager(tmp_path) as checkpoints:
            batches = (batch for _ in range(NUM_EPOCHS) for batch in graph)
            if is_resumed:
                assert checkpoints.restore({"graph": graph}) == num_done
                assert numbers(batches)[: NUM_EPOCHS * NUM_BATCHES - num_done] == whole("dataset")[num_done:]
            else:
                assert numbers(next(batches) for _ in range(num_done)) == whole("dataset")[:num_done]
                checkpoints.save(num_done, {"graph": graph})
