"""How a rank's state is laid out: what it plans to write, and a digest that tells a layout from another in milliseconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem

from loaderkit.checkpoint.formats.plain_json import encode
from loaderkit.checkpoint.planning.held import DescribedPlan
from loaderkit.checkpoint.save.tensor_bytes import identity_of, plain_tensor, sample_of
from loaderkit.checkpoint.state import FlatState
from loaderkit.checkpoint.structure import OBJECTS
from loaderkit.errors import ConfigError

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor


class LayoutPlanner(DefaultSavePlanner):
    """Torch's planner, whose plans say what lies in the same memory and what cannot be cut."""

    def set_up(self, state: FlatState, *, is_coordinator: bool) -> None:
        """In the place of `set_up_planner`, which would walk the state again."""
        self.state_dict, self.mappings = state
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> DescribedPlan:
        """What this rank holds, described."""
        plan = super().create_local_plan()
        tied: list[int] = []
        uncut: set[int] = set()
        first: dict[Any, int] = {}
        for number, item in enumerate(plan.items):
            tensor = None if item.tensor_data is None else plain_tensor(self.resolve_data(item))
            if item.tensor_data is not None and tensor is None:
                uncut.add(number)
            if tensor is None or not tensor.numel():
                tied.append(number)
            else:
                tied.append(first.setdefault(identity_of(tensor), number))
        return DescribedPlan(
            plan.items,
            planner_data=plan.planner_data,
            tied=tuple(tied),
            uncut=frozenset(uncut),
            samples=tuple(map(self._sample, plan.items)),
            objects=tuple(name for key, names in self.state_dict.items() if key.startswith(OBJECTS) for name in names),
        )

    def sampled(self, items: Iterable[WriteItem]) -> bytes:
        """A digest of the samples of all the tensors and plain values that `items` are of."""
        return hashlib.sha256(b"".join(map(self._sample, items))).digest()

    def _sample(self, item: WriteItem) -> bytes:
        if item.tensor_data is None:
            return sample_of_value(item.index.fqn, self.lookup_object(item.index))
        tensor = plain_tensor(self.resolve_data(item))
        return b"" if tensor is None else sample_of(tensor)

    def digest(self) -> str:
        """Equal for states that give the same local plan on this rank: same names, shapes, types, placements, tied tensors.
        Values do not count."""
        digest = hashlib.sha256()
        with torch.no_grad():  # a shard is had without it in three times as long
            for line in _lines(self.state_dict):
                digest.update(line.encode(errors="surrogatepass"))
        digest.update(repr(self.mappings).encode(errors="surrogatepass"))
        return digest.hexdigest()


def sample_of_value(name: str, value: Any) -> bytes:
    """8 bytes: a digest of a plain value, the same in every process; b"" for what JSON has no form for."""
    if isinstance(value, np.ndarray):
        return hashlib.blake2b(value.tobytes(), digest_size=8).digest()
    try:
        return hashlib.blake2b(json.dumps(encode(name, value)).encode(), digest_size=8).digest()
    except ConfigError:
        return b""


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
