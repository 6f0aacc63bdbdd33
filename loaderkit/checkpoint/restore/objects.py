"""Gives an object of the state its part of a checkpoint: its tensors are filled in place, then its `load_state_dict` is
called."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Set
from functools import cached_property
from typing import Any

import torch

from loaderkit.checkpoint.contents import Checkpoint, TensorEntry
from loaderkit.checkpoint.names import Leaf, Path, flatten, texts
from loaderkit.checkpoint.restore.requests import local_of, overlaps_itself
from loaderkit.checkpoint.restore.selection import Strictness, matches
from loaderkit.checkpoint.state import MAX_LEAVES, is_tensor
from loaderkit.checkpoint.structure import Structure, nest
from loaderkit.checkpoint.wrappers import own_names
from loaderkit.errors import printable

logger = logging.getLogger("loaderkit")
_NUM_LISTED = 8
_EXTRA_STATE = "_extra_state"  # torch's name in a `state_dict` for what `get_extra_state` gives


class ObjectPart:
    """The part of the checkpoint for an object such as a scheduler or a loader. `flat` maps a name to the tensor to be
    filled, or to None for a plain value; tensors that the object lacks are created. `missing` and `problems` say what
    does not fit."""

    keeps_memory = False  # whether the object's tensors are filled for good, and not handed over anew

    def __init__(self, name: str, leaf: Leaf, contents: Checkpoint, structure: Structure, strict: Strictness) -> None:
        self.name, self.object, self.contents, self.strict = name, leaf.value, contents, strict
        self.is_kept = False  # whether it stays as it is, and the checkpoint has nothing of it
        self.structure = structure.within(leaf.path)
        self.flat: dict[str, Any] = {}
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.paths = self._paths(len(leaf.path))
        self.names: Set[str] = {*self.paths}  # of the checkpoint that are the object's, also what is left out
        self.add_all()

    @cached_property
    def current(self) -> Any:
        """The object's state now. Only asked for where it is needed: a torchdata.nodes.Loader that was asked for its state
        ignores, at its next iteration, the one that it is given afterwards."""
        return self.object.state_dict()

    @cached_property
    def tensors(self) -> dict[tuple[str, ...], Any]:
        """Those of the object, by their paths."""
        return {texts(one.path): one.value for one in self._present().values() if is_tensor(one.value)}

    def _paths(self, depth: int) -> dict[str, Path]:
        """The names of the checkpoint that are the object's, each with its path in the object's state."""
        paths: dict[str, Path] = {}
        for full in (*self.contents.tensors, *self.contents.values, *self.contents.pickled):
            if full == self.name:
                paths[full] = ()
            elif full.startswith(f"{self.name}."):
                path = self.contents.paths.get(full, ())
                paths[full] = path[depth:] if len(path) > depth else (full[len(self.name) + 1 :],)
        return paths

    def _present(self) -> dict[str, Leaf]:
        return flatten(self.current, is_tensor, MAX_LEAVES)

    def add_all(self) -> None:
        """Add what the checkpoint has."""
        if self.name in self.paths and isinstance(self.current, Mapping):
            self.problems.append(f"{self.name!r} is a value in the checkpoint, and here a {type(self.object).__name__}")
        if not self.paths and not self.structure.containers and self._present():
            self.lacks(self.name)
        if (keys := getattr(self.object, "rank_keys", None)) is not None:  # of a PerRank
            saved = {str(path[0]) for path in (*self.paths.values(), *self.structure.containers) if path}
            if saved and saved != keys:
                num_saved = sum(key.startswith("rank-") for key in saved)
                how = f"by {num_saved} ranks" if num_saved else "as one"
                self.problems.append(
                    f"{self.name!r} is each rank's own, and was saved {how}; here are {len(keys)} ranks: restore "
                    "with as many, or leave it out of the state and begin it anew"
                )
        for full, path in self.paths.items():
            self.add(full, path)

    def lacks(self, name: str) -> None:
        """Note that the checkpoint has nothing of the object, which then stays as it is if `strict` lets it."""
        self.is_kept = matches(name, self.strict.missing)
        if not self.is_kept:
            self.missing.append(name)

    def add(self, full: str, path: Path) -> None:
        """Add one name."""
        entry = self.contents.tensors.get(full)
        if entry is None:
            self.flat[full] = None
            return
        tensor = self.tensors.get(texts(path))
        self.flat[full] = self.made(path, entry) if tensor is None or difference(tensor, entry) else tensor

    def made(self, path: Path, entry: TensorEntry) -> torch.Tensor:
        """A new tensor for an entry that the object does not have, or has in another form."""
        return torch.empty(entry.shape, dtype=entry.dtype)

    def load(self, flat: Mapping[str, Any]) -> None:
        """Give the object its part of what was read."""
        if not self.is_kept:
            self.object.load_state_dict(self.state_of(flat))

    def state_of(self, flat: Mapping[str, Any]) -> Any:
        """The object's state, of what was read."""
        mine = {full: flat[full] for full in self.paths}
        like = None if self.structure.is_complete else self.current
        return nest(mine, self.paths, self.structure, like=like)


class ModulePart(ObjectPart):
    """The part of the checkpoint for a module, all of whose tensors must be in the checkpoint and fit. Plain values,
    such as the result of `get_extra_state`, are taken as they were saved."""

    keeps_memory = True

    def add_all(self) -> None:
        self._keys: dict[str, str | None] = {}  # of the state here -> in the checkpoint; None: it keeps its value
        if self.name in self.paths:
            self.problems.append(f"{self.name!r} is a value in the checkpoint, and here a {type(self.object).__name__}")
            return
        own = own_names(self.object)
        there: dict[str, list[str]] = {}
        for full, path in self.paths.items():
            there.setdefault(str(path[0]) if path else "", []).append(full)
        empty = {str(path[0]) for path in self.structure.containers if path}
        for key, value in self.current.items():
            # A checkpoint of before has the names that wrappers have made.
            name = next((name for name in (own(key), key) if name in there or name in empty), None)
            if name is None and isinstance(value, Mapping) and not value and not self.structure.is_complete:
                name = key  # which has no name in a checkpoint
            here = f"{self.name}.{own(key)}"
            if name is None and not matches(here, self.strict.missing):
                self.missing.append(here)
                continue
            self._keys[key] = name
            if name is not None and self._keeps(here, value, there.get(name, [])):
                self._keys[key] = None
                del there[name]
            elif name is not None:
                self._add_key(key, value, there.get(name, []))
        rest = [full for name, some in there.items() if name not in self._keys.values() for full in some]
        if unexpected := [full for full in rest if not matches(full, self.strict.unexpected)]:
            self.problems.append(f"only in the checkpoint: {listed(unexpected)}")
        self.paths = {full: path for full, path in self.paths.items() if full in self.flat}

    def _keeps(self, here: str, value: Any, names: list[str]) -> bool:
        entry = self.contents.tensors.get(names[0]) if len(names) == 1 else None
        if not is_tensor(value) or torch.nn.parameter.is_lazy(value):
            return False
        return keeps_shape(self.contents, here, value, entry, self.strict)

    def _add_key(self, key: str, value: Any, names: list[str]) -> None:
        if key.rpartition(".")[2] == _EXTRA_STATE or not is_tensor(value):
            for full in names:
                entry = self.contents.tensors.get(full)
                self.flat[full] = None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)
            return
        full = names[0] if len(names) == 1 else ""
        entry = self.contents.tensors.get(full)
        if entry is None or len(self.paths[full]) > 1:
            self.problems.append(f"'{self.name}.{key}' is a tensor, and none in the checkpoint")
        elif torch.nn.parameter.is_lazy(value):
            self.flat[full] = torch.empty(entry.shape, dtype=entry.dtype, device=value.device)
        elif problem := difference(value, entry):
            self.problems.append(f"{full!r} {problem}")
        else:
            self.flat[full] = value

    def state_of(self, flat: Mapping[str, Any]) -> Any:
        saved = super().state_of(flat)
        state = OrderedDict(
            (key, self.current[key] if name is None else saved[name]) for key, name in self._keys.items()
        )
        here = getattr(self.current, "_metadata", None)
        if here is not None:
            own, container = own_names(self.object), self.structure.at(())
            versions = (None if container is None else container.versions) or {}
            said = OrderedDict((name, versions.get(own(name), versions.get(name, one))) for name, one in here.items())
            vars(state)["_metadata"] = said
        return state


def keeps_shape(contents: Checkpoint, name: str, tensor: Any, entry: TensorEntry | None, strict: Strictness) -> bool:
    """True, with a warning, for a tensor of another shape in the checkpoint, which `strict` lets keep its values."""
    if entry is None or tuple(tensor.shape) == entry.shape or not matches(name, strict.missing):
        return False
    logger.warning(
        "%s: %s has another shape there and keeps the values here, as strict's `missing` says",
        *map(printable, (contents.name, name)),
    )
    return True


def difference(tensor: torch.Tensor, entry: TensorEntry) -> str | None:
    """How a tensor differs from the checkpoint's, so that it cannot be filled; None if it fits."""
    if tuple(tensor.shape) != entry.shape:
        return f"has shape {list(tensor.shape)}, and {list(entry.shape)} in the checkpoint"
    if tensor.dtype != entry.dtype:
        return f"is {tensor.dtype}, and {entry.dtype} in the checkpoint"
    if tensor.is_meta:
        return "is on the meta device and has no memory: call model.to_empty(device=...) first"
    if tensor.layout == torch.strided and overlaps_itself(local_of(tensor)):
        return "is expanded, or overlaps itself: its elements share memory"
    return None


def listed(names: Any) -> str:
    """The first few names, in order, and how many more there are."""
    ordered = sorted(names)
    more = f", and {len(ordered) - _NUM_LISTED} more" if len(ordered) > _NUM_LISTED else ""
    return ", ".join(ordered[:_NUM_LISTED]) + more
