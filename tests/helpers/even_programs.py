"""What each rank does in tests of how a state is divided: a module of its own, as other processes import it."""

from __future__ import annotations

import json
import os
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_programs import begin, bytes_in
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import loaderkit
from loaderkit.checkpoint import StreamWriter
from loaderkit.ranks.board import Board

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (2_001, 130), "wide": (2, 70_001), "long": (200_003,), "conv": (70, 33, 3, 3), "small": (1_000,),
    "scalar": (), "none": (0, 5),
}  # fmt: skip


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    """The same on every rank: of several dtypes, one that is not contiguous, two names of one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["conv"] = tensors["conv"].bfloat16()
    tensors["columns"] = torch.randn(300, 700, generator=generator).t()
    tensors["tied"] = tensors["embedding"]
    return tensors


def state_of(seed: int, num_ranks: int, *, is_blank: bool = False) -> dict[str, Any]:
    """Replicated tensors, and on an even number of ranks the same as shards of which there are two replicas (HSDP)."""
    tensors = whole_tensors(seed)
    if is_blank:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    shape = (2, num_ranks // 2) if num_ranks % 2 == 0 else (1, num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    hybrid = {
        name: distribute_tensor(tensor.clone(), mesh, [Replicate(), Shard(0)])
        for name, tensor in tensors.items()
        if tensor.ndim and name != "tied"
    }
    return {"whole": tensors, "hybrid": hybrid, "step": 0 if is_blank else seed}


def assert_same(state: dict[str, Any], seed: int, num_ranks: int) -> None:
    """It is what was saved, to the last bit."""
    wanted = state_of(seed, num_ranks)
    assert state["step"] == seed
    for part in ("whole", "hybrid"):
        assert state[part].keys() == wanted[part].keys()
        for name, tensor in state[part].items():
            assert torch.equal(bytes_in(tensor), bytes_in(wanted[part][name].contiguous())), (part, name)


def load_even(rank: int, num_ranks: int, folder: Path, seed: int) -> None:
    """Plain `dcp.load`, on this number of ranks."""
    begin(rank, num_ranks, folder, f"loading-{num_ranks}")
    for path in sorted(folder.glob("step-*")):
        state = state_of(seed, num_ranks, is_blank=True)
        load(state, checkpoint_id=path)
        assert_same(state, seed, num_ranks)
    dist.destroy_process_group()


def restore_even(folder: Path, seed: int) -> None:
    """`loaderkit.restore`, without torch.distributed."""
    wanted = whole_tensors(seed)
    for path in sorted(folder.glob("step-*")):
        tensors = loaderkit.restore(path, verify=True)
        for name, tensor in wanted.items():
            for part in ("whole", "hybrid"):
                if f"{part}.{name}" in tensors:
                    assert torch.equal(tensors[f"{part}.{name}"], tensor), (part, name)
        assert sum(isinstance(value, torch.Tensor) for value in tensors.values()) >= 2 * len(wanted) - 2


def bytes_by_rank(path: Path) -> tuple[Counter[int], set[str]]:
    """The tensors' bytes in each rank's file, those at the same place counted once; and the names that are cut."""
    metadata = FileSystemReader(path).read_metadata()
    found: Counter[int] = Counter()
    places = set()
    cut = set()
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        boxes = {tuple(box.offsets): box for box in entry.chunks}
        if len(boxes) > 1:
            cut.add(name)
        for index, info in metadata.storage_data.items():
            if index.fqn == name and (info.relative_path, info.offset) not in places:
                places.add((info.relative_path, info.offset))
                sizes = boxes[tuple(index.offset)].sizes
                found[int(info.relative_path.split("_")[2])] += prod(sizes) * entry.properties.dtype.itemsize
    return found, cut


def save_even(rank: int, num_ranks: int, folder: Path, seed: int) -> None:
    """Plain `dcp.save`: with torch's default planner, and with one that wants all on the lowest rank, or keeps its plans."""
    begin(rank, num_ranks, folder, "saving")
    state = state_of(seed, num_ranks)
    save(state, storage_writer=StreamWriter(folder / "step-1"))
    lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(state, storage_writer=StreamWriter(folder / "step-2"), planner=lowest)
    for number in (3, 4, 5):
        if number == 5 and rank == 1:
            state["more"] = torch.ones(3)  # its plan changes, the others' do not
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, storage_writer=StreamWriter(folder / f"step-{number}"), planner=planner)
    dist.destroy_process_group()


def save_kept(rank: int, num_ranks: int, folder: Path, seed: int) -> None:
    """By CheckpointManager, while any collective raises; the layout changes on all ranks, and then on one."""
    begin(rank, num_ranks, folder, "managing")
    state = state_of(seed, num_ranks)
    posted: dict[int, list[str]] = {}
    step = 0  # what is posted when the manager is made
    post = Board.post

    def counted(board: Board, key: str, data: bytes = b"") -> None:
        posted.setdefault(step, []).append(key.partition("/")[2])
        post(board, key, data)

    counting: Any = Board
    counting.post = counted
    with loaderkit.CheckpointManager(folder, timeout_s=60.0) as checkpoints:
        dist.barrier()
        forbid_collectives()
        for step in range(1, 8):
            posted[step] = []
            if step == 4:
                state["later"] = torch.full((40_000,), 4.0)
            if step == 6 and rank == 2:
                state["mine"] = torch.full((10,), 6.0)
            checkpoints.save(step, state)
            checkpoints.wait_until_finished()
    (folder / f"posted-{rank}.json").write_text(json.dumps(posted))
    os._exit(0)  # the group cannot be left in order without a collective


def forbid_collectives() -> None:
    """No process group of torch's does anything any more."""

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was called")

    kinds = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")
    for name in dir(dist.ProcessGroup):
        if name.lstrip("_").startswith(kinds):
            setattr(dist.ProcessGroup, name, refused)
    try:
        dist.all_reduce(torch.ones(1))
    except AssertionError:
        return
    raise RuntimeError("a collective was not refused")
