"""The rank and the world size of a loader: as given, from a mesh's data dimensions, or from the process."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from loaderkit._internal.config.diagnostics import nearest
from loaderkit.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA_DIMS = ("dp_replicate", "dp_shard")
"""The dimensions of a mesh among which the samples are divided, if none are named."""


@dataclass(frozen=True)
class Place:
    """Rank `rank` of `world_size` shares of the samples.

    `peers` are the ranks of torch.distributed that get this same share, with this one, which is number `number` of them;
    empty without a mesh.
    """

    rank: int
    world_size: int
    peers: tuple[int, ...] = ()
    number: int = 0


def given_place(
    rank: int | None,
    world_size: int | None,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
) -> Place | None:
    """The place that the arguments of `build` give, or None if they give none. Raises ConfigError."""
    if mesh is not None:
        if rank is not None or world_size is not None:
            raise ConfigError("give either mesh, or rank and world_size: a mesh has the rank and the world size in it")
        return place_in_mesh(mesh, DATA_DIMS if data_dims is None else data_dims)
    if data_dims is not None:
        raise ConfigError(f"data_dims {data_dims!r} name dimensions of a mesh, and there is none: give mesh as well")
    return None if rank is None and world_size is None else Place(*checked(rank, world_size))


def place_in_mesh(mesh: DeviceMesh, data_dims: str | Sequence[str]) -> Place:
    """The place of this process in a mesh, in which the samples are divided along the dimensions `data_dims`, in
    row-major order of the mesh; ranks that differ only in other dimensions get the same samples. Raises ConfigError."""
    names = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(mesh, "get_coordinate"):
        raise ConfigError(f"mesh is a torch.distributed DeviceMesh, as init_device_mesh makes it, not {mesh!r}")
    if names is None:
        raise ConfigError(
            "the mesh has no names, so which of its dimensions share out the samples is not known: make it with "
            "mesh_dim_names, as in init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'tp'))"
        )
    chosen = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
    for name in chosen:
        if name not in names:
            raise ConfigError(
                f"data_dims names {name!r}, and the mesh has {', '.join(names)}; {nearest(str(name), names)}. Name those "
                f"whose ranks get different samples, as in data_dims=({names[0]!r},)"
            )
        if chosen.count(name) > 1:
            raise ConfigError(f"data_dims names {name!r} twice")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh, whose ranks are {_listed(mesh.mesh.flatten().tolist())}: build a "
            "loader only in those, or give a mesh of all ranks"
        )
    rank, world_size = 0, 1
    index: list[int | slice] = []
    for name, own, size in zip(names, coordinate, mesh.mesh.shape, strict=True):
        if name in chosen:
            rank, world_size = rank * size + own, world_size * size
        index.append(own if name in chosen else slice(None))
    peers = tuple(mesh.mesh[tuple(index)].flatten().tolist())
    return Place(rank, world_size, peers, peers.index(dist.get_rank()))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")


def ranks_now() -> tuple[int, int]:
    """(rank, world size) of torch.distributed, else of RANK and WORLD_SIZE, else (0, 1). Raises ConfigError."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if (rank is None) != (world_size is None) and world_size != "1":
        is_set, is_not = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ConfigError(
            f"{is_set}={os.environ[is_set]} is set and {is_not} is not, and torch.distributed is not initialised, so this "
            f"process's share of the samples is not known: call init_process_group first, set {is_not}, or pass rank= and "
            "world_size= to build()"
        )
    try:
        return checked(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError:
        raise ConfigError(
            f"the environment's RANK={rank!r}, WORLD_SIZE={world_size!r} are not a rank and its world size: correct them, or "
            "pass rank= and world_size= to build()"
        ) from None


def other_ranks(before: tuple[int, int], now: tuple[int, int]) -> ConfigError:
    """The error for a loader whose rank or world size has changed."""
    return ConfigError(
        f"this loader is rank {before[0]} of {before[1]} since it first iterated or gave its length, and this process is rank "
        f"{now[0]} of {now[1]} now: samples would be repeated or left out. Call init_process_group before, or pass rank= and "
        "world_size= to build()"
    )


def checked(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """A rank and a world size, checked. Raises ConfigError if they are invalid."""
    if rank is None or world_size is None:
        raise ConfigError("give both rank and world_size, or neither")
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise ConfigError(f"rank {rank!r} and world_size {world_size!r} must be whole numbers") from None
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in [0, world_size = {world_size})")
    return rank, world_size
