"""The state of a training process, to be saved: its objects' state, what its containers are, and what could not be restored.

state ─> resolve ─> objects replaced by their state_dict: a module's under its own names, an optimizer's by names of parameters
                └─> the containers that flat names do not tell (structure.py)
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from loaderkit.checkpoint.names import Index, Leaf, Path, flatten, no_tuples
from loaderkit.checkpoint.structure import Container, Containers, collect
from loaderkit.checkpoint.wrappers import check_names, parameter_names, unwrapped_state
from loaderkit.errors import ConfigError

MAX_LEAVES = 100_000_000
OptimizerKeys = Literal["auto", "names", "numbers"]
_SIMPLE = {type(None), bool, int, float, complex, str, bytes, bytearray}
_SEQUENCES = {list, tuple, set, frozenset, torch.Size}
_TABLES = {dict, OrderedDict, defaultdict, Counter}


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
    if not isinstance(state, dict):
        raise ConfigError(
            f'state: expected a dict such as {{"model": model, "optimizer": optimizer}}, not {type(state).__name__}'
        )
    return flatten(
        state,
        lambda value: isinstance(value, torch.Tensor) or is_stateful(value),
        MAX_LEAVES,
        enters=lambda name, value: _has_object(value) or enters(name, value),
    )


def _has_object(value: Any) -> bool:
    """True if an object stands in a list or tuple, or in a container in it."""
    if isinstance(value, Mapping):
        return any(map(_has_object, value.values()))
    return any(map(_has_object, value)) if isinstance(value, (list, tuple)) else is_stateful(value)


def modules_in(state: Any) -> list[torch.nn.Module]:
    """The modules of a state, in its order."""
    if isinstance(state, torch.nn.Module):
        return [state]
    items = state.values() if isinstance(state, Mapping) else state if type(state) in (list, tuple) else ()
    return [module for item in items for module in modules_in(item)]


def on_devices_of(value: Any, current: Any) -> Any:
    """A plain value with its tensors on the devices of those at the same places in the current one."""
    if isinstance(value, torch.Tensor):
        return value.to(current.device) if isinstance(current, torch.Tensor) else value
    if type(value) in (list, tuple) and isinstance(current, (list, tuple)) and len(value) == len(current):
        return type(value)(on_devices_of(item, there) for item, there in zip(value, current, strict=True))
    return value


class ResolvedState(NamedTuple):
    """A nested state without objects, its containers that are not plain, and the names of its objects whose state is one thing,
    which is neither a module's nor an optimizer's."""

    state: Any
    containers: Containers
    objects: list[str]


def resolve(state: Any, optimizer_keys: OptimizerKeys = "numbers") -> ResolvedState:
    """The state with every object in it replaced by its `state_dict()`. Nothing is copied but containers.

    Raises ConfigError for keys that are neither all text nor all whole numbers, for names that a wrapper has made, for an
    optimizer whose parameters have no names though these are asked for, and for the first value that could not be restored
    without running code.
    """
    resolver = _Resolver(modules_in(state), optimizer_keys)
    resolved = resolver.visit(state, ())
    _check_keys(resolved)
    containers: Containers = {}
    _check_values(flatten(resolved, is_tensor, MAX_LEAVES, enters=no_tuples, seen=collect(containers)))
    return ResolvedState(resolved, containers | resolver.marked, resolver.objects)


class _Resolver:
    """Visits a state; `marked` are containers that are stored as others are."""

    def __init__(self, modules: list[torch.nn.Module], optimizer_keys: OptimizerKeys) -> None:
        self._modules, self._optimizer_keys = modules, optimizer_keys
        self.marked: Containers = {}
        self.objects: list[str] = []

    def visit(self, value: Any, path: Path) -> Any:
        """The value with its objects replaced."""
        if isinstance(value, torch.nn.Module):
            return unwrapped_state(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, path)
        if is_stateful(value):
            self.objects.append(".".join(map(str, path)))
            return value.state_dict()
        if isinstance(value, Mapping):
            check_names(".".join(map(str, path)), value)
            return _same_kind(value, [(key, self.visit(item, (*path, key))) for key, item in value.items()])
        if type(value) not in (list, tuple) or not _has_object(value):
            return value
        if type(value) is tuple:  # as a list, so that the tensors in it are stored as tensors
            self.marked[path] = Container("tuple")
        return [self.visit(item, (*path, Index(number))) for number, item in enumerate(value)]

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> Any:
        state = optimizer.state_dict()
        names = None if self._optimizer_keys == "numbers" else parameter_names(optimizer, self._modules)
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


def _same_kind(table: Mapping[Any, Any], items: list[tuple[Any, Any]]) -> Any:
    if type(table) is not OrderedDict:
        return Counter(dict(items)) if type(table) is Counter else dict(items)
    ordered = OrderedDict(items)
    if hasattr(table, "_metadata"):
        vars(ordered)["_metadata"] = table._metadata
    return ordered


def _by_name(state: Any, names: list[str]) -> dict[str, Any] | None:
    """An optimizer's state with names in the place of its parameters' numbers; None for one of another form."""
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


def _check_keys(resolved: Any) -> None:
    """Raise ConfigError for a table with other keys than text or whole numbers."""

    def visit(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            kinds = {type(key) for key in value}
            if kinds - {str} and kinds != {int}:
                raise ConfigError(
                    f"state: the keys of {name!r} are not all text, or all whole numbers, and could not be told apart when "
                    "they are restored"
                )
        items: Iterable[tuple[Any, Any]] = (
            value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) in (list, tuple) else ()
        )
        for key, item in items:
            if isinstance(item, (Mapping, list, tuple)):
                visit(item, f"{name}.{key}" if name else str(key))

    visit(resolved, "")


def _check_values(leaves: Mapping[str, Leaf]) -> None:
    for name, leaf in leaves.items():
        if isinstance(leaf.value, torch.Tensor):
            if torch.nn.parameter.is_lazy(leaf.value):
                raise ConfigError(
                    f"state: {name!r} belongs to a lazy module that has not seen a batch yet, and has no elements: save it "
                    "after its first batch"
                )
            if kind := _unreadable_kind(leaf.value):
                raise ConfigError(
                    f"state: {name!r} is {kind}, which is not restored: save the dense tensors that it consists of"
                )
        elif kind := _opaque_kind(leaf.value):
            raise ConfigError(
                f"state: {name!r} holds an object of {kind}, which could not be restored without running code: save numbers, "
                "text, tensors and containers of them, or give the object state_dict and load_state_dict"
            )


def _unreadable_kind(tensor: torch.Tensor) -> str:
    """What a tensor is that could be saved and not restored; "" for an ordinary one, or one of which this rank has a part."""
    if type(tensor).__name__ == "DTensor":
        tensor = cast(Any, tensor).to_local()
    if tensor.is_meta:
        return "on the meta device, and has no elements"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"a {'quantized' if tensor.is_quantized else tensor.layout} tensor"
    has_parts = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return f"a {type(tensor).__name__}" if has_parts and not hasattr(tensor, "trigger_wait") else ""


def _opaque_kind(value: Any) -> str:
    """The class of the first object in a plain value that is no number, text, array, tensor or container of them; "" without
    one. A tensor in a plain value is pickled whole."""
    kind = type(value)
    if kind in _SIMPLE:
        return ""
    if isinstance(value, torch.Tensor):
        return f"{kind.__module__}.{kind.__qualname__} (in a tuple or set)" if _is_no_plain(value) else ""
    if kind in _SEQUENCES:
        return next(filter(None, map(_opaque_kind, value)), "")
    if kind in _TABLES:
        return next(filter(None, map(_opaque_kind, (*value.keys(), *value.values()))), "")
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return ""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_no_plain(tensor: torch.Tensor) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return is_lazy or type(tensor).__name__ == "DTensor" or bool(_unreadable_kind(tensor))
