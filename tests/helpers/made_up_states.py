"""States that hypothesis describes, which any number of ranks make, save and load: a module of its own, as other processes
import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import rank_programs
import torch
import torch.distributed as dist
from checkpoint_states import DTYPES, SHAPES, random_tensor, same
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import loaderkit
from loaderkit.checkpoint import StreamReader, StreamWriter


class Described(NamedTuple):
    """A tensor. `kind`: how it lies in memory; `placed`: None for a plain one, else a number from which placements follow."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    kind: str
    placed: int | None


class State(NamedTuple):
    """Tensors, the number of those that have a second name, plain values, and what an object with `state_dict` has."""

    tensors: list[Described]
    num_tied: int
    values: list[Any]
    held: Described


def described() -> st.SearchStrategy[Described]:
    # Large ones, too, so that a tensor has more than one part and ranks divide it.
    shapes = SHAPES | st.tuples(st.integers(1, 9), st.integers(2000, 9000))
    kinds = st.sampled_from(("plain", "plain", "transposed", "strided"))
    placed = st.none() | st.integers(0, 99)
    return st.builds(Described, st.sampled_from(DTYPES), shapes, st.integers(0, 99), kinds, placed)


def states() -> st.SearchStrategy[State]:
    scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5)
    return st.builds(
        State,
        st.lists(described(), min_size=1, max_size=8),
        st.integers(0, 3),
        st.lists(scalars, max_size=4),
        described(),
    )


class Held:
    """An object that saves and loads itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def whole(item: Described) -> torch.Tensor:
    """The tensor as one process has it."""
    tensor = random_tensor(item.dtype, item.shape, item.seed)
    if item.kind == "transposed" and tensor.dim():
        return tensor.permute(*reversed(range(tensor.dim())))
    return tensor[..., ::2] if item.kind == "strided" and tensor.dim() else tensor


def placed(item: Described, mesh: DeviceMesh, *, is_blank: bool) -> torch.Tensor:
    """This rank's part of it, or all, with its values or zeros."""
    tensor = whole(item)
    if is_blank:
        tensor = torch.zeros_like(tensor)
    if item.placed is None or not tensor.dim():
        return tensor
    # On two axes of a mesh often replicated over the one and sharded over the other, as HSDP does.
    dimensions = [(item.placed + 3 * axis) % (tensor.dim() + 1) for axis in range(mesh.ndim)]
    placements: list[Placement] = [Replicate() if number == tensor.dim() else Shard(number) for number in dimensions]
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor[tuple(slice(lo, lo + length) for lo, length in zip(start, shape, strict=True))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def made(state: State, mesh: DeviceMesh, *, is_blank: bool) -> dict[str, Any]:
    """The state of this rank."""
    tensors = {f"w{number}": placed(item, mesh, is_blank=is_blank) for number, item in enumerate(state.tensors)}
    tied = {f"tied{number}": tensors[f"w{number}"] for number in range(min(state.num_tied, len(tensors)))}
    values = {str(number): 0 if is_blank else value for number, value in enumerate(state.values)}
    return {"model": tensors | tied, "values": values, "held": Held(placed(state.held, mesh, is_blank=is_blank))}


def assert_made(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Equal to the last bit, as far as this rank has it."""
    assert found["values"] == wanted["values"]
    pairs = [(found["model"][name], tensor) for name, tensor in wanted["model"].items()]
    for one, other in [*pairs, (found["held"].tensor, wanted["held"].tensor)]:
        assert isinstance(one, DTensor) == isinstance(other, DTensor)
        assert same(*(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (one, other)))


def begin(rank: int, num_ranks: int, folder: Path, name: str) -> DeviceMesh:
    rank_programs.begin(rank, num_ranks, folder, name)
    shape = (num_ranks // 2, 2) if num_ranks > 2 and num_ranks % 2 == 0 else (num_ranks,)
    return init_device_mesh("cpu", shape)


def save_states(rank: int, num_ranks: int, folder: Path, name: str, made_up: list[State]) -> None:
    """Each by a manager, and by a writer under `dcp.save`."""
    mesh = begin(rank, num_ranks, folder, name)
    with loaderkit.CheckpointManager(folder / "run", timeout_s=60.0) as checkpoints:
        for number, state in enumerate(made_up):
            checkpoints.save(number, made(state, mesh, is_blank=False))
            path = folder / f"written-{number}"
            save(made(state, mesh, is_blank=False), storage_writer=StreamWriter(path))
    dist.destroy_process_group()


def load_states(rank: int, num_ranks: int, folder: Path, name: str, made_up: list[State]) -> None:
    """By torch's reader, by ours, and by a manager."""
    mesh = begin(rank, num_ranks, folder, name)
    with loaderkit.CheckpointManager(folder / "run", timeout_s=60.0) as checkpoints:
        for number, state in enumerate(made_up):
            wanted = made(state, mesh, is_blank=False)
            for path in (folder / f"written-{number}", folder / "run" / f"step-{number:010d}"):
                found = made(state, mesh, is_blank=True)
                load(found, checkpoint_id=path)
                assert_made(found, wanted)
                found = made(state, mesh, is_blank=True)
                load(found, storage_reader=StreamReader(path, verify=True))
                assert_made(found, wanted)
            found = made(state, mesh, is_blank=True)
            assert checkpoints.restore(found, number) == number
            assert_made(found, wanted)
    dist.destroy_process_group()
