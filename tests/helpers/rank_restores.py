"""What each rank does in tests of `restore` with tensors of its own, or errors of its own: beside `rank_programs`."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_programs import Counted, begin, bytes_in
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import loaderkit
from loaderkit.errors import CheckpointError, ConfigError


def fail_alike(rank: int, num_ranks: int, folder: Path) -> None:
    """Each rank finds out for itself, as soon as it is connected, that a name does not fit, and says that."""
    begin(rank, num_ranks, folder, "fail-alike")
    for _ in range(40):
        try:
            loaderkit.restore(folder / "x.pt", into={"b": torch.ones(2)}, rank=rank, world_size=num_ranks)
        except CheckpointError as error:
            assert "names that are to be filled" in str(error), error  # noqa: PT017
    dist.destroy_process_group()


def restore_shards(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Every rank gets its part of DTensors, and reads no more than that."""
    begin(rank, num_ranks, folder, "shards")
    mesh = init_device_mesh("cpu", (num_ranks,))
    expected = loaderkit.restore(folder / name, keys="model.*")
    for key, tensor in expected.items():
        placements: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
        for placement in placements:
            into = distribute_tensor(torch.zeros_like(tensor), mesh, [placement])
            loaderkit.restore(folder / name, into={key: into}, keys=key)
            wanted = distribute_tensor(tensor, mesh, [placement])
            assert torch.equal(bytes_in(into), bytes_in(wanted)), (key, placement)
    words, head = torch.nn.Embedding(700, 300), torch.nn.Linear(300, 700, bias=False)
    head.weight = words.weight
    model = torch.nn.Sequential(OrderedDict(words=words, head=head))
    fully_shard(model, mesh=mesh)
    counted = Counted(folder)
    loaderkit.restore(
        f"counted://{name}",
        into=model.state_dict(),
        rename={"model.": ""},
        strict={"unexpected": "*"},
        dtype="target",
        connectors={"counted": counted},
    )
    whole_weight = expected["model.words.weight"]
    full_weight: Any = head.weight
    assert torch.equal(full_weight.full_tensor(), whole_weight.float())
    assert counted.num_bytes < whole_weight.nbytes / num_ranks + 600_000  # heads of files, and ends of archives
    if num_ranks > 1:
        state, said = model.state_dict(), ""
        try:
            loaderkit.restore(
                folder / name, state, rename={"model.": ""}, strict=False, rank=rank, world_size=num_ranks
            )
        except ConfigError as error:
            said = str(error)
        assert "is a DTensor, of which each rank reads its own shards" in said
    dist.destroy_process_group()
