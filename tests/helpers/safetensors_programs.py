"""What each rank does in tests of checkpoints as safetensors: a module of its own, as other processes import it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from manager_programs import Full, message_of, train_step, training_state
from rank_programs import assert_equal, begin, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import loaderkit
from loaderkit.checkpoint import StreamReader, StreamWriter
from loaderkit.checkpoint.save.safetensors import layout
from loaderkit.connectors.base import ConnectorLayer, Writes, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.writing import WritesLayer


def save_streamed(rank: int, num_ranks: int, folder: Path, kind: str, min_file_bytes: int) -> None:
    """By our writer as safetensors, and by torch's. With few `min_file_bytes`, every rank writes files."""
    begin(rank, num_ranks, folder, "saving")
    layout.MIN_FILE_BYTES = min_file_bytes
    state = state_of(num_ranks, 1, kind, is_blank=False)
    writer = StreamWriter(folder / "step-7", format="safetensors")
    save(state, storage_writer=writer)
    save(state, checkpoint_id=folder / "torch")
    dist.destroy_process_group()


def load_streamed(rank: int, num_ranks: int, folder: Path, kind: str) -> None:
    """What torch's writer wrote, and ours as safetensors, is the same."""
    begin(rank, num_ranks, folder, f"loading-{num_ranks}")
    states = []
    for reader in (
        StreamReader(folder / "torch"),
        StreamReader(folder / "step-7", verify=True),
        StreamReader(folder / "step-7", share=False),
    ):
        states.append(state_of(num_ranks, 1, kind, is_blank=True))
        load(states[-1], storage_reader=reader)
        assert_equal(states[-1], states[0])
    dist.destroy_process_group()


def grid(num_ranks: int, number: int) -> dict[str, Any]:
    """Tensors cut along one or two dimensions, unevenly too, on a mesh of two rows."""
    line, mesh = init_device_mesh("cpu", (num_ranks,)), init_device_mesh("cpu", (2, num_ranks // 2))
    whole = torch.arange(7 * 9 * 5, dtype=torch.float64).reshape(7, 9, 5) + number
    large = torch.arange(1000 * 700, dtype=torch.int32).reshape(1000, 700) + number
    return {
        "model": {
            "rows": distribute_tensor(whole, line, [Shard(0)]),
            "columns": distribute_tensor(whole.bfloat16(), line, [Shard(1)]),
            "last": distribute_tensor(whole, line, [Shard(2)]),
            "boxes": distribute_tensor(whole, mesh, [Shard(1), Shard(0)]),
            "twice": distribute_tensor(whole, mesh, [Shard(1), Shard(1)]),
            "half": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
            "large": distribute_tensor(large, line, [Shard(1)]),
            "few": distribute_tensor(torch.arange(3) + number, line, [Shard(0)]),
            "same": torch.full((50,), float(number)),
        },
        "step": number,
    }


def whole_grid(number: int) -> dict[str, torch.Tensor]:
    """What `grid` puts together."""
    whole = torch.arange(7 * 9 * 5, dtype=torch.float64).reshape(7, 9, 5) + number
    large = torch.arange(1000 * 700, dtype=torch.int32).reshape(1000, 700) + number
    return {
        **dict.fromkeys(("rows", "last", "boxes", "twice", "half"), whole),
        "columns": whole.bfloat16(),
        "large": large,
        "few": torch.arange(3) + number,
        "same": torch.full((50,), float(number)),
    }


def save_grid(rank: int, num_ranks: int, folder: Path) -> None:
    """Twice to the same directory, synchronously and in a thread."""
    begin(rank, num_ranks, folder, "grid")
    save(grid(num_ranks, 1), storage_writer=StreamWriter(folder / "a", format="safetensors"))
    writer = StreamWriter(folder / "b", format="safetensors")
    for number in (2, 3):
        future: Any = async_save(grid(num_ranks, number), storage_writer=writer)
        future.result()
        dist.barrier()
    dist.destroy_process_group()


def train(rank: int, num_ranks: int, folder: Path, name: str, how: str, port: int, steps: tuple[int, int]) -> None:
    """Train from the first of `steps`, or from what is restored, to the last, and save each third step; write the losses."""
    first, last = steps
    if how == "process":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    else:
        begin(rank, num_ranks, folder, f"store-{name}")
    state = training_state(rank, num_ranks, sharded=how != "whole")
    flush = "process" if how == "process" else "thread"
    settings: Any = {"every": 3, "format": "safetensors", "flush": flush, "timeout_s": 60.0}
    with loaderkit.CheckpointManager(folder / "run", **settings) as checkpoints:
        step = checkpoints.restore(state) or 0
        assert step == first, (step, first)
        losses = {}
        while step < last:
            step += 1
            losses[step] = train_step(state, step)
            checkpoints.save(step, state)
    (folder / f"{name}-{rank}.json").write_text(json.dumps({"losses": losses, "next": torch.rand(4).tolist()}))
    dist.destroy_process_group()


def replicated(seed: int) -> dict[str, Any]:
    """A model whose largest tensor is nearly what a quarter of the ranks has to write, with two names for it, and moments."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [60_000, *torch.randint(1, 9000, (60,), generator=generator).tolist()]
    model = {f"w{number}": torch.randn(size, 2, generator=generator) for number, size in enumerate(sizes)}
    moments = {name: {"exp_avg": tensor + 1, "step": torch.tensor(3.0)} for name, tensor in model.items()}
    return {"model": model | {"tied": model["w0"]}, "optimizer": moments}


def save_replicated(rank: int, num_ranks: int, folder: Path, seed: int) -> None:
    """What all ranks hold, and what a rank needs of the others to write its files."""
    begin(rank, num_ranks, folder, f"store-{seed}")
    layout.MIN_FILE_BYTES = 1
    with loaderkit.CheckpointManager(folder / "run", format="safetensors", timeout_s=60.0) as checkpoints:
        checkpoints.save(seed, replicated(seed), wait=True)
        files = checkpoints.stats()["last"]["ranks"]
    sizes = {rank: sum(file["num_bytes"] for file in files[rank].values()) for rank in files}
    (folder / f"replicated-{seed}-{rank}.json").write_text(json.dumps(sizes))
    dist.destroy_process_group()


def save_tied(rank: int, num_ranks: int, folder: Path) -> None:
    """Two names of one tensor, whole on all ranks and sharded; and a third tensor of the same shape."""
    begin(rank, num_ranks, folder, "tied")
    mesh = init_device_mesh("cpu", (num_ranks,))
    shared, other = torch.arange(30.0).reshape(5, 6), torch.arange(30.0).reshape(5, 6) + 1
    cut = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
    state = {"model": {"a": shared, "b": shared, "c": other, "d": cut, "e": cut}, "ema": {"a": shared}}
    with loaderkit.CheckpointManager(folder / "run", format="safetensors", timeout_s=60.0) as checkpoints:
        checkpoints.save(1, state)
    dist.destroy_process_group()


class Deadly(ConnectorLayer):
    """Ends the process, or fails, when a file is begun."""

    def __init__(self, inner: FileConnector, how: str) -> None:
        super().__init__(inner)
        self._how = how

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.inner.read_into(key, start, buffer, etag=etag)

    def writes(self) -> Writes:
        how = self._how

        class Failing(WritesLayer):
            def create(self, key: str, size: int) -> Any:
                if how == "killed":
                    os._exit(9)
                raise OSError("the disk is gone")

        return Failing(writes_of(self.inner))


def fail_on_one(rank: int, num_ranks: int, folder: Path, failing: int, how: str) -> None:
    """Rank `failing` cannot write step 2, or is killed then: the others hear of it while they wait for its parts."""
    begin(rank, num_ranks, folder, f"failing-{how}-{failing}")
    layout.MIN_FILE_BYTES = 1
    save(grid(num_ranks, 1), storage_writer=StreamWriter(folder / "step-1", format="safetensors"))
    store: Any = FileConnector(folder)
    if rank == failing:
        store = Deadly(store, how)
    try:
        writer = StreamWriter("given://step-2", format="safetensors", connectors={"given": store})
        save(grid(num_ranks, 2), storage_writer=writer)
    except (CheckpointException, RuntimeError) as error:
        (folder / f"failed-{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def fail_in_manager(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 cannot write the second checkpoint: every rank hears of it, and the first stands; a third is saved by all."""
    begin(rank, num_ranks, folder, "store")
    layout.MIN_FILE_BYTES = 1
    store = Full(folder / "run")
    state = training_state(rank, num_ranks, sharded=True)
    given = {"store": store}
    with loaderkit.CheckpointManager("store://", format="safetensors", connectors=given, timeout_s=60.0) as checkpoints:
        checkpoints.save(1, state, wait=True)
        store.is_full = rank == 1
        checkpoints.save(2, state)
        message = message_of(checkpoints.wait_until_finished)
        store.is_full = False
        checkpoints.save(3, state, wait=True)
        (folder / f"failed-{rank}.json").write_text(json.dumps([message, checkpoints.all_steps()]))
    dist.destroy_process_group()


def save_copies(rank: int, num_ranks: int, folder: Path) -> None:
    """Exports of sharded tensors."""
    begin(rank, num_ranks, folder, "store")
    copies: list[dict[str, Any]] = [
        {"to": str(folder / "half"), "dtype": "bfloat16"},
        {"to": str(folder / "int"), "quantize": "int8", "keys": ["model.*"]},
    ]
    mesh = init_device_mesh("cpu", (num_ranks,))
    cuts = {"rows": 0, "columns": 1, "last": 2, "boxes": 1, "twice": 0, "half": 2, "large": 1, "few": 0}
    model = {
        name: distribute_tensor(tensor, mesh, [Shard(cuts[name])]) if name in cuts else tensor
        for name, tensor in whole_grid(1).items()
    }
    with loaderkit.CheckpointManager(folder / "run", copies=copies, timeout_s=60.0) as checkpoints:
        saving = checkpoints.save(1, {"model": model, "n": 1})
        checkpoints.wait_until_finished()
        assert saving is not None
        half = {url: stats for url, stats in saving.stats["copies"].items() if "half" in url}
    (folder / f"stats-{rank}.json").write_text(json.dumps(half))
    dist.destroy_process_group()
