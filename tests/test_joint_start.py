"""`loaderkit.start` gives what `build` and `restore` give one after the other, and reads both at once."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaderkit
from loaderkit import CheckpointManager
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, ConfigError, ObjectNotFoundError, SourceError, StateError

NUM_SAMPLES = 40
MOST_S = 60.0


def described(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = np.arange(NUM_SAMPLES * 3, dtype=np.float32).reshape(NUM_SAMPLES, 3)
    np.save(folder / "rows.npy", rows)
    return {
        "source": {"kind": "array", "url": str(folder / "rows.npy")},
        "order": {"seed": 3},
        "stages": ["read", {"batch": {"size": 4}}],
    } | changes


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 50)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "note": seed, "more": {"a": [seed]}}


def train(checkpoints: CheckpointManager, pipeline: Any, num_steps: int, every: int) -> None:
    state = state_of(1)
    with loaderkit.build(pipeline) as loader:
        state["loader"] = loader
        step = 0
        while step < num_steps:
            for batch in loader:
                step += 1
                state["model"](batch["data"]).sum().backward()
                state["optimizer"].step()
                state["note"] = step
                if step % every == 0:
                    checkpoints.save(step, state, force=True, wait=True)
                if step == num_steps:
                    break


def values_of(state: dict[str, Any]) -> Any:
    model, optimizer = state["model"].state_dict(), state["optimizer"].state_dict()
    tensors = [*model.values(), *(value for one in optimizer["state"].values() for value in one.values())]
    return [tensor.tolist() for tensor in tensors], optimizer["param_groups"], state["note"], state["more"]


def batches_of(loader: Any, num: int) -> list[Any]:
    batches: list[Any] = []
    while len(batches) < num:
        for batch in loader:
            batches.append((batch["__key__"], batch["data"].tolist()))
            if len(batches) == num:
                break
    return batches


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("loaderkit-start")]
    assert not names


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_it_is_what_building_and_restoring_give(tmp_path: Path, executor: str, rng: random.Random) -> None:
    pipeline = described(tmp_path, prefetch={"executor": executor})
    steps = rng.randint(3, 25) if executor != "process" else 7
    with CheckpointManager(tmp_path / "run") as checkpoints:
        train(checkpoints, pipeline, steps, 3)
        one_by_one = state_of(2)
        with loaderkit.build(pipeline) as loader:
            one_by_one["loader"] = loader
            step = checkpoints.restore(one_by_one)
            batches = batches_of(loader, 25)
            last = loader.state_dict()
        together = state_of(2)
        with loaderkit.start(pipeline, checkpoints, together) as run:
            assert together["loader"] is run.loader
            assert run.step == step == steps // 3 * 3
            assert run.checkpoints is checkpoints
            assert batches_of(run.loader, 25) == batches
            assert run.loader.state_dict() == last
            assert checkpoints.save(100, together, force=True, wait=True) is not None
        assert values_of(together) == values_of(one_by_one)
        earlier = state_of(2)
        with loaderkit.start(pipeline, checkpoints, earlier, step=3) as run:
            assert (run.step, earlier["note"]) == (3, 3)
        assert {"restore", "import", "build the loader"} <= {*run.times}


def test_without_a_checkpoint_it_begins_at_the_beginning(tmp_path: Path) -> None:
    pipeline = described(tmp_path)
    state = state_of(2)
    before = copy.deepcopy(values_of(state))
    with loaderkit.build(pipeline) as loader:
        batches = batches_of(loader, 12)
    with loaderkit.start(pipeline, tmp_path / "run", state) as run:
        assert run.step is None
        assert batches_of(run.loader, 12) == batches
        assert values_of(state) == before
        run.checkpoints.save(1, state)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.all_steps() == [1]


def test_a_loader_that_is_no_part_of_the_state(tmp_path: Path) -> None:
    pipeline, state = described(tmp_path), state_of(1)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(5, state, wait=True)
        with pytest.raises(CheckpointError, match="loader"):
            loaderkit.start(pipeline, checkpoints, state)
        with loaderkit.start(pipeline, checkpoints, state, key=None) as run:
            assert run.step == 5
            assert "loader" not in state
            assert len(batches_of(run.loader, 10)) == 10


# ------------------------------------------------------------------------------------------------------- side by side


class Gated(FileConnector):
    """Gives no tensor before `opened`, and says that one is wanted."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened, self.is_asked = threading.Event(), threading.Event()

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if len(buffer) >= 100_000:
            self.is_asked.set()
            assert self.opened.wait(MOST_S)
        super().read_into(key, start, buffer, etag=etag)


class Opening(MemoryConnector):
    """Opens the gate once it is read from."""

    def __init__(self, objects: dict[str, bytes], gate: Gated) -> None:
        super().__init__(objects)
        self.gate = gate

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.gate.opened.set()
        super().read_into(key, start, buffer, etag=etag)


def test_batches_are_read_before_the_tensors_are_there(tmp_path: Path) -> None:
    """The checkpoint's tensors come only after the first sample was read: one behind the other, this would not end."""
    objects = {f"{number:02}.bin": bytes([number]) for number in range(20)}
    gate = Gated(tmp_path)
    gate.opened.set()
    pipeline = {
        "source": {"kind": "files", "url": "memory://x", "include": "*.bin"},
        "stages": ["read", {"batch": {"size": 2}}],
        "prefetch": {"concurrency": 1},
    }
    state: dict[str, Any] = {"weights": torch.arange(1e6)}
    stores = {"memory": Opening(objects, gate)}
    with (
        CheckpointManager(tmp_path / "run") as checkpoints,
        loaderkit.build(pipeline, connectors=stores) as loader,
    ):
        batches = iter(loader)
        next(batches)
        checkpoints.save(1, state | {"loader": loader}, wait=True)
        expected = next(batches)["__key__"]
    gate.opened.clear()
    gate.is_asked.clear()
    state = {"weights": torch.zeros(1_000_000)}
    with (
        CheckpointManager("gated://run", connectors={"gated": gate}) as checkpoints,
        loaderkit.start(pipeline, checkpoints, state, connectors=stores) as run,
    ):
        assert run.step == 1
        assert gate.is_asked.is_set()
        assert next(iter(run.loader))["__key__"] == expected
        assert torch.equal(state["weights"], torch.arange(1e6))


def test_batches_of_a_checkpoint_that_is_damaged_are_dropped(tmp_path: Path) -> None:
    pipeline = described(tmp_path)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        train(checkpoints, pipeline, 6, 2)
        newest = tmp_path / "run" / "step-0000000006"
        largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 255
        largest.write_bytes(data)
        state, alone = state_of(2), state_of(2)
        with loaderkit.build(pipeline) as loader:
            alone["loader"] = loader
            step = checkpoints.restore(alone)
            batches = batches_of(loader, 9)
        assert step == 4
        with loaderkit.start(pipeline, checkpoints, state) as run:
            assert run.step == 4
            assert batches_of(run.loader, 9) == batches
        assert values_of(state) == values_of(alone)


# ------------------------------------------------------------------------------------------------------------- errors


def test_an_error_of_either_ends_both(tmp_path: Path) -> None:
    pipeline = described(tmp_path)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        train(checkpoints, pipeline, 4, 2)
        names = {thread.name for thread in threading.enumerate()}
        state = state_of(2)
        with pytest.raises((SourceError, ObjectNotFoundError), match=r"gone\.npy"):
            loaderkit.start(
                pipeline | {"source": {"kind": "array", "url": str(tmp_path / "gone.npy")}}, checkpoints, state
            )
        with pytest.raises(ConfigError, match="stages"):
            loaderkit.start({"source": pipeline["source"]}, checkpoints, state)
        with pytest.raises(CheckpointError, match="nothing was written"):
            loaderkit.start(pipeline, checkpoints, state | {"model": torch.nn.Linear(3, 4)})
        with pytest.raises(StateError, match="seed"):
            loaderkit.start(pipeline | {"order": {"seed": 4}}, checkpoints, state)
        with pytest.raises(ConfigError, match="has the key 'loader' already"):
            loaderkit.start(pipeline, checkpoints, state | {"loader": None})
        with pytest.raises(ConfigError, match="into is a list"):
            loaderkit.start(pipeline, checkpoints, [state])  # type: ignore[arg-type]
        assert "loader" not in state
        assert {thread.name for thread in threading.enumerate()} <= names
        assert checkpoints.latest_step() == 4
    with pytest.raises(ConfigError, match="stages"):
        loaderkit.start({"source": pipeline["source"]}, tmp_path / "run", state)
