"""Gives an optimizer its part of a checkpoint: by names of parameters, as torch's `get_state_dict` gives it, or by numbers.

Groups and parameters are compared before anything is written. The state keeps the dtypes that it was saved in, where
`load_state_dict` would cast it to the dtypes of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from loaderkit.checkpoint.contents import Checkpoint, TensorEntry
from loaderkit.checkpoint.names import Index, Leaf, Path, texts
from loaderkit.checkpoint.restore.objects import ObjectPart, listed
from loaderkit.checkpoint.restore.selection import Strictness
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.structure import Structure
from loaderkit.checkpoint.wrappers import FLAT_PARAM, FLAT_REMEDY, parameter_names

_LIKE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
     "ax", "prev", "step_size")
)  # fmt: skip
"""The entries that torch's own optimizers keep for a parameter in the parameter's shape."""


class SavedGroups(NamedTuple):
    """The parameter groups of a saved optimizer: for each group its parameters, as names or numbers, and its options."""

    params: list[list[Any]]
    options: list[set[str]]

    @property
    def order(self) -> list[Any]:
        """All parameters."""
        return [param for group in self.params for param in group]


def saved_groups(source: OpenCheckpoint, paths: Iterable[Path]) -> dict[tuple[str, ...], SavedGroups]:
    """The groups of the optimizers at these paths, by path; optimizers that the checkpoint does not have are left out."""
    contents = source.contents
    wanted = {texts(path) for path in paths}
    names: dict[tuple[str, ...], dict[int, str]] = {}
    options: dict[tuple[str, ...], dict[int, set[str]]] = {}
    for full in (*contents.tensors, *contents.values, *contents.pickled) if wanted else ():
        path = contents.paths.get(full, ())
        for size in range(1, len(path) - 2):
            owner = texts(path[:size])
            if owner in wanted and path[size] == "param_groups" and isinstance(path[size + 1], Index):
                options.setdefault(owner, {}).setdefault(path[size + 1], set()).add(str(path[size + 2]))
                if path[size + 2 :] == ("params",) and full not in contents.tensors:
                    names.setdefault(owner, {})[path[size + 1]] = full
    values = source.plain_values([full for groups in names.values() for full in groups.values()])
    found = {}
    for owner, groups in names.items():
        numbers = sorted(options[owner])
        params = [values[groups[number]] if number in groups else [] for number in numbers]
        if all(isinstance(group, (list, tuple)) for group in params):
            found[owner] = SavedGroups([[*group] for group in params], [options[owner][number] for number in numbers])
    return found


class OptimizerPart(ObjectPart):
    """The part of a checkpoint for an optimizer. State that the optimizer does not have yet is created like its
    parameters."""

    def __init__(
        self,
        name: str,
        leaf: Leaf,
        contents: Checkpoint,
        structure: Structure,
        strict: Strictness,
        *,
        groups: SavedGroups | None,
        modules: Sequence[torch.nn.Module],
    ) -> None:
        """`modules`: the modules in which its parameters have their names. `groups` is None if the checkpoint has none."""
        self._groups = groups
        self._params = [param for group in leaf.value.param_groups for param in group["params"]]
        self._names = parameter_names(leaf.value, modules)
        self._numbers: dict[str, int] = {}  # of parameters, by the text of their key in the checkpoint
        super().__init__(name, leaf, contents, structure, strict)

    def add_all(self) -> None:
        groups = self._groups
        if groups is None:
            self.lacks(f"{self.name}.param_groups")
            return
        if problem := self._difference(groups):
            self.problems.append(problem)
            return
        order = self._names if self._names is not None and _are_names(groups) else groups.order
        self._numbers = {str(key): number for number, key in enumerate(order)}
        self.paths = {full: _by_number(path, self._numbers) for full, path in self.paths.items()}
        containers = {_by_number(path, self._numbers): one for path, one in self.structure.containers.items()}
        self.structure = replace(self.structure, containers=containers)
        self._check_shapes()
        super().add_all()

    def _difference(self, saved: SavedGroups) -> str | None:
        """How the groups differ from the checkpoint's groups; None if they fit."""
        here = self.object.param_groups
        if len(here) != len(saved.params):
            return f"{self.name!r} has {len(here)} parameter groups, and {len(saved.params)} in the checkpoint"
        names = None if self._names is None or not _are_names(saved) else iter(self._names)
        for number, (group, params, options) in enumerate(zip(here, saved.params, saved.options, strict=True)):
            where = f"group {number} of {self.name!r}"
            mine = None if names is None else {next(names) for _ in group["params"]}
            if mine is not None and mine != {*params}:
                said = [f"only here {listed(mine - {*params})}"] if mine - {*params} else []
                said += [f"only in the checkpoint {listed({*params} - mine)}"] if {*params} - mine else []
                flat = {name for name in mine ^ {*params} if FLAT_PARAM in name}
                hint = (
                    f". {FLAT_PARAM} is a piece of FSDP1's, in no other's state: to save it, {FLAT_REMEDY}"
                    if flat
                    else ""
                )
                return f"{where} has other parameters than in the checkpoint: {'; '.join(said)}{hint}"
            if len(group["params"]) != len(params):
                return f"{where} has {len(group['params'])} parameters, and {len(params)} in the checkpoint"
            # Options that later versions add are switches, and have a default.
            lacking = [key for key in self.object.defaults if _is_amount(group.get(key)) and key not in options]
            if lacking and (more := options - group.keys() - {"initial_lr", "param_names"}):
                return (
                    f"{where} has {listed(lacking)}, and in the checkpoint {listed(more)} instead: it is the state of an "
                    f"optimizer of another kind than {type(self.object).__name__}"
                )
        return None

    def _check_shapes(self) -> None:
        """Note the first parameter whose shape has changed."""
        container = self.structure.at(())
        shapes = (None if container is None else container.shapes) or []
        saved = zip(self._groups.order if self._groups is not None else (), shapes, strict=False)
        for key, shape in saved:
            param = self._params[self._numbers[str(key)]]
            if tuple(param.shape) != tuple(shape):
                self.problems.append(
                    f"the parameter {key!r} of {self.name!r} has shape {list(param.shape)}, and had {list(shape)} when it "
                    "was saved"
                )
                return
        if shapes or not type(self.object).__module__.startswith("torch.optim"):
            return
        for full, path in self.paths.items():
            entry, param = self.contents.tensors.get(full), self._param_of(path)
            if (
                entry is not None
                and param is not None
                and path[2] in _LIKE_PARAMETER
                and entry.shape != tuple(param.shape)
            ):
                self.problems.append(
                    f"{full!r} has shape {list(entry.shape)}, and its parameter here {list(param.shape)}"
                )
                return

    def _param_of(self, path: Path) -> torch.Tensor | None:
        """The parameter to which a tensor of the state belongs."""
        is_state = len(path) == 3 and path[0] == "state" and type(path[1]) is int and path[1] < len(self._params)
        return self._params[path[1]] if is_state else None

    def made(self, path: Path, entry: TensorEntry) -> torch.Tensor:
        """It is laid out as its parameter is."""
        param = self._param_of(path)
        if param is not None and tuple(param.shape) == entry.shape:
            return torch.empty_like(param, dtype=entry.dtype, requires_grad=False)
        return super().made(path, entry)

    def state_of(self, flat: Mapping[str, Any]) -> Any:
        table = super().state_of(flat)
        groups = table["param_groups"]
        numbers = iter(range(len(self._params)))
        for group, mine in zip(groups, self.object.param_groups, strict=True):
            group["params"] = [next(numbers) for _ in mine["params"]]
        return {**table, "state": table.get("state", {}), "param_groups": groups}

    def load(self, flat: Mapping[str, Any]) -> None:
        if self.is_kept:
            return
        table = self.state_of(flat)
        self.object.load_state_dict(table)
        for number, saved in table["state"].items():
            if type(number) is int and number < len(self._params) and isinstance(saved, Mapping):
                param = self._params[number]
                _keep_types(self.object.state.get(param, {}), saved, param.dtype)


def _by_number(path: Path, numbers: Mapping[str, int], size: int = 0) -> Path:
    """A path in the state of the optimizer that is at its first `size` keys, with the parameter's number; its key may be a
    name, or the text of a number."""
    if len(path) > size + 1 and path[size] == "state":
        return (*path[: size + 1], numbers.get(str(path[size + 1]), path[size + 1]), *path[size + 2 :])
    return path


def _are_names(groups: SavedGroups) -> bool:
    return bool(groups.order) and all(type(param) is str for param in groups.order)


def _is_amount(value: Any) -> bool:
    """True for a learning rate, betas and the like; switches are no amounts."""
    return type(value) in (int, float, tuple)


def _keep_types(state: Any, saved: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Undo the cast of a state to `dtype`, the dtype of its parameter."""
    for key, value in saved.items():
        loaded = state.get(key)
        if isinstance(value, Mapping) and isinstance(loaded, dict):
            _keep_types(loaded, value, dtype)
        elif isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.shape == value.shape:
            is_cast = key != "step" and loaded.dtype == dtype != value.dtype  # torch has a rule of its own for the step
            state[key] = value.to(loaded.device) if is_cast else loaded


# ----------------------------------------------------------------------------------------- states by numbers, of names


class NumberedNames(NamedTuple):
    """Optimizers that were saved by names of parameters, as they are by numbers: the new names by the names in the
    checkpoint, paths by the new names, the lists of numbers in their groups, and the structure."""

    names: dict[str, str]
    paths: dict[str, Path]
    params: dict[str, list[int]]
    structure: Structure


def numbered_names(source: OpenCheckpoint, structure: Structure) -> NumberedNames:
    """The numbers for optimizers that a CheckpointManager has saved by names. An optimizer that a user saved by names
    stays as it is."""
    contents = source.contents
    containers = dict(structure.containers)
    found = NumberedNames({}, {}, {}, replace(structure, containers=containers))
    owners = [path for path, container in structure.containers.items() if container.shapes is not None]
    for owner, groups in saved_groups(source, owners).items():
        size, numbers = len(owner), {str(name): number for number, name in enumerate(groups.order)}
        for path in [path for path in containers if texts(path[:size]) == owner]:
            containers[_by_number(path, numbers, size)] = containers.pop(path)._replace(shapes=None)
        firsts = [0, *accumulate(len(params) for params in groups.params)]
        for full in (*contents.tensors, *contents.values, *contents.pickled):
            path = contents.paths.get(full, ())
            if texts(path[:size]) != owner:
                continue
            if path[size:] == ("param_groups", path[size + 1], "params"):
                found.params[full] = [*range(*firsts[path[size + 1] : path[size + 1] + 2])]
            elif (numbered := _by_number(path, numbers, size)) != path:
                found.names[full] = name = ".".join(texts(numbered))
                found.paths[name] = numbered
    return found


def with_numbers(contents: Checkpoint, numbered: NumberedNames) -> Checkpoint:
    """The contents with the optimizers' states by numbers."""
    names = numbered.names
    pickled = {names.get(full, full): where for full, where in contents.pickled.items() if full not in numbered.params}
    return replace(
        contents,
        tensors={names.get(full, full): entry for full, entry in contents.tensors.items()},
        values={names.get(full, full): value for full, value in contents.values.items()} | numbered.params,
        pickled=pickled,
        paths={names.get(full, full): path for full, path in contents.paths.items()} | numbered.paths,
    )
