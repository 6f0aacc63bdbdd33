"""Train with FSDP2 on some ranks, stop, and continue with another number of them: each byte of the checkpoint is read once.

    torchrun --nproc-per-node 2 examples/restore_fsdp.py --steps 4 --folder runs
    torchrun --nproc-per-node 3 examples/restore_fsdp.py --steps 8 --folder runs

Runs on CPUs (gloo). The data's order depends on the position alone, so the second run continues with the next samples; the
global batch must be the same in both, 12 samples here.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import loaderkit
from loaderkit.checkpoint import StreamReader, latest
from loaderkit.errors import CheckpointError

GLOBAL_BATCH = 12


def make(rank: int, world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, loaderkit.Loader]:
    torch.manual_seed(0)  # the same weights on all ranks
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(9600.0).reshape(1200, 8) / 9600, torch.arange(1200.0) / 1200)
    pipeline = (
        loaderkit.Pipeline.dataset(data, fields=["x", "y"])
        .shuffle(seed=1)
        .read()
        .batch(GLOBAL_BATCH // world_size, drop_last=True)
    )
    return model, optimizer, loaderkit.build(pipeline, rank=rank, world_size=world_size)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: loaderkit.Loader) -> dict[str, Any]:
    """The state of a run. The loader's state is the same on all ranks: the position of the training as a whole."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "loader": loader.state_dict(), "step": 0}


def save(folder: Path, state: dict[str, Any], rank: int) -> None:
    """Every rank writes its part under a temporary name, so that a directory with the name of a checkpoint is whole."""
    path = folder / f"step-{state['step']}"
    temporary = path.with_name(f"{path.name}.tmp")
    save_parts(state, checkpoint_id=temporary)
    if rank == 0:
        os.replace(temporary, path)
    dist.barrier()


def newest(folder: Path, rank: int) -> str | None:
    """The newest whole checkpoint, found by one rank, so that all take the same."""
    urls: list[str | None] = [None]
    if rank == 0:
        try:
            urls[0] = latest(folder)
        except CheckpointError as error:
            print(f"begins anew: {error}".splitlines()[0])
    dist.broadcast_object_list(urls)
    return urls[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    model, optimizer, loader = make(rank, world_size)
    state = state_of(model, optimizer, loader)
    url = newest(args.folder, rank)
    if url is not None:
        load(state, storage_reader=StreamReader(url))  # dcp.load
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state["loader"])
        if rank == 0:
            print(f"continues after step {state['step']} of {url} with {world_size} ranks")
    step = state["step"]
    with loader:
        for batch in loader:
            loss = (model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            seen = [loss.detach()]
            dist.all_reduce(seen[0])
            if rank == 0:
                print(f"step {step}: {seen[0].item() / world_size:.4f}")
            if step == args.steps:
                break
        state = {**state_of(model, optimizer, loader), "step": step}
    save(args.folder, state, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
