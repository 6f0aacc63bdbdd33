"""The state of a training process, to be saved: the state of its objects, its containers, and what could not be restored.

state ─> resolve, one walk ─> values and paths by name, with the state_dict of objects in their place: a module's under its own
                          │   names, an optimizer's by names of parameters
                          └─> the containers that flat names do not tell (structure.py)
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from loaderkit.checkpoint.names import MAX_DEPTH, Index, Leaf, Path, flatten, no_tuples, same_name, too_deep
from loaderkit.checkpoint.structure import Container, Containers, collect
from loaderkit.checkpoint.wrappers import FLAT_REMEDY, check_names, check_not_flat, parameter_names, unwrapped_state
from loaderkit.errors import ConfigError

MAX_LEAVES = 100_000_000
OptimizerKeys = Literal["auto", "names", "numbers"]
_SIMPLE = {type(None), bool, int, float, complex, str, bytes, bytearray}
_SEQUENCES = {list, tuple, set, frozenset, torch.Size}
_TABLES = {dict, OrderedDict, defaultdict, Counter}


class ExpectsState(ABC):
    """An object of a state that is told what it will get before any tensor is read."""

    @abstractmethod
    def expect_state(self, state: Any) -> None:
        """What `load_state_dict` will be called with, unless the checkpoint turns out to be damaged. What it raises ends the
        restore."""


def is_stateful(value: Any) -> bool:
    """True for an object that gives its state and takes it back: a module, optimizer, scheduler, loader."""
    return (
        not isinstance(value, (Mapping, torch.Tensor, type))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def is_tensor(value: Any) -> bool:
    """For `flatten`."""
    return isinstance(value, torch.Tensor)


def leaves_of(state: Any, enters: Callable[[str, Any], bool] = no_tuples) -> dict[str, Leaf]:
    """Name -> leaf of a nested state: tensors, plain values, objects with `state_dict`. Tuples with objects are entered, and
    with tensors those that `enters` names. Raises ConfigError, CheckpointError."""
    _check_is_dict(state)
    return flatten(
        state,
        lambda value: isinstance(value, torch.Tensor) or is_stateful(value),
        MAX_LEAVES,
        enters=lambda name, value: _has_object(value) or enters(name, value),
    )


def _has_object(value: Any) -> bool:
    """True if a list or tuple, or a container in it, has an object in it."""
    return any(map(is_stateful, _values_in(value, lambda held: isinstance(held, (Mapping, list, tuple)))))


def modules_in(state: Any) -> list[torch.nn.Module]:
    """The modules of a state, in its order."""
    values = _values_in(state, lambda held: isinstance(held, Mapping) or type(held) in (list, tuple))
    return [value for value in values if isinstance(value, torch.nn.Module)]


def _values_in(state: Any, is_entered: Callable[[Any], bool]) -> Iterator[Any]:
    """The values in containers, in order. Each container is entered once, as it may hold itself."""
    entered: dict[int, Any] = {}  # by id, which no other gets as long as it is here
    left = [state]
    while left:
        value = left.pop()
        if isinstance(value, torch.nn.Module) or not is_entered(value):
            yield value
        elif id(value) not in entered:
            entered[id(value)] = value
            left += reversed([*(value.values() if isinstance(value, Mapping) else value)])


def on_devices_of(value: Any, current: Any) -> Any:
    """A plain value with its tensors on the devices of those at the same places in the current one."""
    if isinstance(value, torch.Tensor):
        return value.to(current.device) if isinstance(current, torch.Tensor) else value
    if type(value) in (list, tuple) and isinstance(current, (list, tuple)) and len(value) == len(current):
        return type(value)(on_devices_of(item, there) for item, there in zip(value, current, strict=True))
    return value


class FlatState(NamedTuple):
    """A nested state without objects, by name: tensors and plain values, and the path of each. As in
    torch.distributed.checkpoint, keys of tables are text in a path, and positions in lists are int."""

    values: dict[str, Any]
    paths: dict[str, tuple[str | int, ...]]

    @classmethod
    def of(cls, leaves: Mapping[str, Leaf]) -> FlatState:
        """The state with these leaves."""
        paths = {
            name: tuple(int(key) if isinstance(key, Index) else str(key) for key in leaf.path)
            for name, leaf in leaves.items()
        }
        return cls({name: leaf.value for name, leaf in leaves.items()}, paths)

    def plus(self, tables: dict[str, Any]) -> FlatState:
        """The state with other tables beside its own."""
        other = FlatState.of(flatten(tables, is_tensor, MAX_LEAVES, enters=no_tuples))
        return FlatState(self.values | other.values, self.paths | other.paths)


class ResolvedState(NamedTuple):
    """All that a save needs of a state: its values, its containers that are not plain, and the names of those objects,
    neither modules nor optimizers, whose state is kept together."""

    flat: FlatState
    containers: Containers
    objects: list[str]


def without_optimizers(resolved: ResolvedState) -> tuple[ResolvedState, list[str]]:
    """The state without that of optimizers, and their names: tables of nothing but `state` and `param_groups`. What lies in an
    object of another kind, which takes its state as one thing, stays."""
    children: dict[tuple[str | int, ...], set[str | int]] = {}
    for path in resolved.flat.paths.values():
        for depth, key in enumerate(path):
            children.setdefault(path[:depth], set()).add(key)
    found = [path for path, keys in children.items() if "param_groups" in keys <= {"state", "param_groups"}]
    names = [".".join(map(str, path)) for path in found]
    left_out = [
        name for name in names if name and not any(f"{name}.".startswith(f"{one}.") for one in resolved.objects)
    ]
    prefixes = tuple(f"{name}." for name in left_out)
    values = {name: value for name, value in resolved.flat.values.items() if not name.startswith(prefixes)}
    containers = {
        path: container
        for path, container in resolved.containers.items()
        if not f"{'.'.join(map(str, path))}.".startswith(prefixes)
    }
    flat = FlatState(values, {name: resolved.flat.paths[name] for name in values})
    return resolved._replace(flat=flat, containers=containers), left_out


def num_bytes_of(flat: FlatState) -> int:
    """The bytes of the tensors that this rank holds."""
    tensors = (value for value in flat.values.values() if isinstance(value, torch.Tensor))
    return sum(_local(tensor).nbytes for tensor in tensors)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor
    return local


def resolve(state: Any, optimizer_keys: OptimizerKeys = "numbers") -> ResolvedState:
    """Walk the state once, with the `state_dict()` of every object in the object's place. Nothing is copied.

    Raises ConfigError for keys that are neither all text nor all whole numbers, for names that a wrapper has made, for an
    optimizer whose parameters have no names though these are asked for, and for the first value that could not be restored
    without running code; CheckpointError for two values of one name.
    """
    _check_is_dict(state)
    resolver, containers = _Replacer(state, optimizer_keys), Containers()
    leaves = flatten(
        state, is_tensor, MAX_LEAVES, enters=no_tuples, seen=collect(containers), replaced=resolver.replaced
    )
    for name, path in resolver.paths.items():
        if name in leaves and leaves[name].path != path:
            raise same_name(name)
    _check_values(leaves)
    return ResolvedState(FlatState.of(leaves), containers | resolver.marked, resolver.objects)


class _Replacer:
    """Replaces objects in a walk. `marked` are containers that are stored in another form, `paths` the paths of objects
    by name."""

    def __init__(self, state: Any, optimizer_keys: OptimizerKeys) -> None:
        self._state, self._optimizer_keys = state, optimizer_keys
        self._places: set[Path] = set()  # of the objects
        self.marked: Containers = {}
        self.paths: dict[str, Path] = {}
        self.objects: list[str] = []

    def replaced(self, name: str, path: Path, value: Any) -> Any:
        """For `flatten`: the value to use in place of a value. What an object's `state_dict` has given stays as it is."""
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, Mapping):
            _check_keys(name if path else "", value)
        if any(path[:size] in self._places for size in range(len(path) + 1)):
            return value
        if isinstance(value, Mapping):
            check_names(name if path else "", value)
        elif type(value) in (list, tuple) and _has_object(value):
            if type(value) is tuple:  # as a list, so that the tensors in it are stored as tensors
                self.marked[path] = Container("tuple")
            if len(path) > MAX_DEPTH:
                raise too_deep()
            # Now, since its contents decide whether it is entered.
            return [self.replaced(f"{name}.{n}", (*path, Index(n)), item) for n, item in enumerate(value)]
        elif is_stateful(value):
            if self.paths.setdefault(name, path) != path:
                raise same_name(name)
            self._places.add(path)
            return self._state_of(name, path, value)
        return value

    def _state_of(self, name: str, path: Path, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return unwrapped_state(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, path)
        self.objects.append(name)
        made = value.state_dict()
        if isinstance(made, Mapping):
            _check_keys(name, made)
        return made

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> Any:
        modules = modules_in(self._state)
        check_not_flat(".".join(map(str, path)), optimizer, modules)
        state = optimizer.state_dict()
        names = None if self._optimizer_keys == "numbers" else parameter_names(optimizer, modules)
        named = None if names is None else _by_name(state, names)
        if named is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self.marked[path] = Container(shapes=[[*param.shape] for param in params])
            return named
        if self._optimizer_keys == "names":
            raise ConfigError(
                f"state: the optimizer {'.'.join(map(str, path))!r} has parameters that are not all those of one module of the "
                "state, so they have no names: put that module into the state, or set optimizer_keys: numbers"
            )
        return state


def _by_name(state: Any, names: list[str]) -> dict[str, Any] | None:
    """An optimizer's state with names in the place of its parameters' numbers; None if the state has another form."""
    try:
        groups = [group["params"] for group in state["param_groups"]]
        if [number for group in groups for number in group] != [*range(len(names))] or state.keys() - {
            "state",
            "param_groups",
        }:
            return None
        by_name = {names[key] if type(key) is int else key: value for key, value in state["state"].items()}
    except (TypeError, KeyError, IndexError, AttributeError):
        return None
    if len(by_name) < len(state["state"]) or not all(type(key) is str for key in by_name):
        return None
    named = [group | {"params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": by_name, "param_groups": named}


# ---------------------------------------------------------------------------------------------- what can be restored


def _check_is_dict(state: Any) -> None:
    if not isinstance(state, dict):
        raise ConfigError(
            f'state: expected a dict such as {{"model": model, "optimizer": optimizer}}, not {type(state).__name__}'
        )


def _check_keys(name: str, table: Mapping[Any, Any]) -> None:
    """Raise ConfigError for a table with other keys than text or whole numbers."""
    kinds = {type(key) for key in table}
    if kinds - {str} and kinds != {int}:
        raise ConfigError(
            f"state: the keys of {name!r} are not all text, or all whole numbers, and could not be told apart when they are "
            "restored"
        )


def _check_values(leaves: Mapping[str, Leaf]) -> None:
    for name, leaf in leaves.items():
        if isinstance(leaf.value, torch.Tensor):
            if type(leaf.value).__name__ == "ShardedTensor":
                raise ConfigError(
                    f"state: {name!r} is a ShardedTensor, as FSDP1 gives them, which is not restored: for an optimizer, "
                    f"{FLAT_REMEDY}; of a module, put the module itself into the state"
                )
            if torch.nn.parameter.is_lazy(leaf.value):
                raise ConfigError(
                    f"state: {name!r} belongs to a lazy module that has not seen a batch yet, and has no elements: save it "
                    "after its first batch"
                )
            if kind := _unreadable_kind(leaf.value):
                raise ConfigError(
                    f"state: {name!r} is {kind}, which is not restored: save the dense tensors that it consists of"
                )
        elif kind := opaque_kind(leaf.value, name):
            raise ConfigError(
                f"state: {name!r} holds an object of {kind}, which could not be restored without running code: save numbers, "
                "text, tensors and containers of them, or give the object state_dict and load_state_dict"
            )


@cache
def _is_bits(dtype: torch.dtype) -> bool:
    """True for a type whose tensors torch cannot copy, such as bits8 and uint4."""
    return re.fullmatch(r"torch\.(bits\w+|u?int[1-7])", str(dtype)) is not None


def _unreadable_kind(tensor: torch.Tensor) -> str:
    """The kind of a tensor that could be saved but not restored; "" for an ordinary tensor, or one of which this rank
    has a part."""
    if type(tensor).__name__ == "DTensor":
        tensor = cast(Any, tensor).to_local()
    if tensor.is_meta:
        return "on the meta device, and has no elements"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"a {'quantized' if tensor.is_quantized else tensor.layout} tensor"
    if _is_bits(tensor.dtype):
        return f"a {tensor.dtype} tensor"
    has_parts = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return f"a {type(tensor).__name__}" if has_parts and not hasattr(tensor, "trigger_wait") else ""


def opaque_kind(value: Any, name: str, depth: int = 0) -> str:
    """The class of the first object in a plain value that is no number, text, array, tensor or container of them; "" without
    one. A tensor in a plain value is pickled whole. Raises ConfigError for the keys of a table in it, whose name is `name`, and
    CheckpointError for one that is nested endlessly."""
    if depth > MAX_DEPTH:
        raise too_deep()
    kind = type(value)
    if kind in _SIMPLE:
        return ""
    if isinstance(value, torch.Tensor):
        return f"{kind.__module__}.{kind.__qualname__} (in a tuple or set)" if _is_no_plain(value) else ""
    if kind in _SEQUENCES:
        return next(filter(None, (opaque_kind(item, f"{name}.{n}", depth + 1) for n, item in enumerate(value))), "")
    if isinstance(value, Mapping):
        _check_keys(name, value)
    if kind in _TABLES:
        inside = (*((key, name) for key in value), *((item, f"{name}.{key}") for key, item in value.items()))
        return next(filter(None, (opaque_kind(item, where, depth + 1) for item, where in inside)), "")
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return ""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_no_plain(tensor: torch.Tensor) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return is_lazy or type(tensor).__name__ == "DTensor" or bool(_unreadable_kind(tensor))
