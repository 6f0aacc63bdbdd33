"""How a rank's state is laid out: what it plans to write, and a digest that tells a layout from another in milliseconds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem

from loaderkit.checkpoint.planning.held import DescribedPlan
from loaderkit.checkpoint.save.tensor_bytes import identity_of, plain_tensor, sample_of

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor


class LayoutPlanner(DefaultSavePlanner):
    """Torch's planner, whose plans say what lies in the same memory and what cannot be cut."""

    def create_local_plan(self) -> DescribedPlan:
        """What this rank holds, described."""
        plan = super().create_local_plan()
        tied: list[int] = []
        uncut: set[int] = set()
        samples: list[bytes] = []
        first: dict[Any, int] = {}
        for number, item in enumerate(plan.items):
            tensor = None if item.tensor_data is None else plain_tensor(self.resolve_data(item))
            if item.tensor_data is not None and tensor is None:
                uncut.add(number)
            if tensor is None or not tensor.numel():
                tied.append(number)
            else:
                tied.append(first.setdefault(identity_of(tensor), number))
            samples.append(b"" if tensor is None else sample_of(tensor))
        return DescribedPlan(
            plan.items,
            planner_data=plan.planner_data,
            tied=tuple(tied),
            uncut=frozenset(uncut),
            samples=tuple(samples),
        )

    def sampled(self, items: Iterable[WriteItem]) -> bytes:
        """A digest of the samples of all the tensors that `items` are of."""
        tensors = (plain_tensor(self.resolve_data(item)) for item in items)
        return hashlib.sha256(b"".join(sample_of(tensor) for tensor in tensors if tensor is not None)).digest()

    def digest(self) -> str:
        """Equal for states that give the same local plan on this rank: same names, shapes, types, placements, tied tensors.
        Values do not count."""
        digest = hashlib.sha256()
        with torch.no_grad():  # a shard is had without it in three times as long
            for line in _lines(self.state_dict):
                digest.update(line.encode(errors="surrogatepass"))
        digest.update(repr(self.mappings).encode(errors="surrogatepass"))
        return digest.hexdigest()


def _lines(state: Mapping[str, Any]) -> Iterator[str]:
    first: dict[Any, int] = {}
    meshes: dict[int, str] = {}
    for number, (name, value) in enumerate(state.items()):
        is_tensor = isinstance(value, torch.Tensor)
        local: Any = value
        placed: Any = None
        if is_tensor and isinstance(value, DTensor):
            mesh = value.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = repr((mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.get_coordinate()))
            local, placed = value.to_local(), (meshes[id(mesh)], value.placements, tuple(value.shape))
        elif hasattr(value, "__create_write_items__") or (is_tensor and plain_tensor(value) is None):
            placed = create_default_local_save_plan({name: value}, is_coordinator=False).items
        layout: tuple[Any, ...] = ()
        if is_tensor:
            plain = plain_tensor(local)
            memory = number if plain is None or not plain.numel() else first.setdefault(identity_of(plain), number)
            layout = tuple(local.shape), local.dtype, local.layout, value.requires_grad, plain is None, memory
        yield f"{(name, placed, layout)!r}\n"
