"""What each rank does in tests of resharding: a module of its own, as other processes import it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from loaderkit.checkpoint import StreamReader


def whole() -> dict[str, torch.Tensor]:
    """The state as one process would have it."""
    generator = torch.Generator().manual_seed(1)
    return {
        "rows": torch.randn(30, 17, generator=generator),
        "columns": torch.randn(9, 41, generator=generator),
        "large": torch.randn(1200, 701, generator=generator),
        "same": torch.randn(5, generator=generator),
    }


def sharded(state: dict[str, torch.Tensor], world_size: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    placements: dict[str, list[Placement]] = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "large": [Shard(0)],
        "same": [Replicate()],
    }
    return {name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in state.items()}


def begin(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world_size}", rank=rank, world_size=world_size)


def save_sharded(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    save({"model": sharded(whole(), world_size), "step": 7}, checkpoint_id=Path(folder) / "step-7")
    dist.destroy_process_group()


def load_sharded(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    state = {
        "model": sharded({name: torch.zeros_like(tensor) for name, tensor in whole().items()}, world_size),
        "step": 0,
    }
    load(state, storage_reader=StreamReader(f"{folder}/step-7"))
    assert state["step"] == 7
    wanted = sharded(whole(), world_size)
    for name, tensor in state["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(tensor.to_local(), wanted[name].to_local()), name
    Path(folder, f"loaded-{world_size}-{rank}").touch()
    dist.destroy_process_group()
