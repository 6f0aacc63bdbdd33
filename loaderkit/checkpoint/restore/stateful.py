"""Restores the state of a training process in place: tensors, plain values, and objects with `state_dict`, such as a module.

state ─> leaves ─> object: its state_dict, filled in place where it has the tensor ─> dcp.load through StreamReader
                   an optimizer's state, where it has none yet, is made like its parameters ─> load_state_dict
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from loaderkit.checkpoint.contents import Checkpoint, TensorEntry
from loaderkit.checkpoint.names import Index, Leaf, Path, flatten
from loaderkit.checkpoint.restore.dcp_reader import StreamReader
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.restore.wrappers import wrapper_hint
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConfigError

_MAX_LEAVES = 100_000_000
_NUM_LISTED = 8
OWN_KEY = "loaderkit"
"""The key in a saved state for what is not the user's."""
_NUMBER_TABLES, _EMPTY_TABLES = "number_tables", "empty_tables"
_SIMPLE = {type(None), bool, int, float, complex, str, bytes, bytearray}
_SEQUENCES = {list, tuple, set, frozenset, torch.Size}
_TABLES = {dict, OrderedDict, defaultdict, Counter}


class StateMismatchError(CheckpointError):
    """The checkpoint does not fit the state that is to be filled; nothing was written."""


def is_stateful(value: Any) -> bool:
    """True for an object that gives its state and takes it back: a module, optimizer, scheduler, loader."""
    return (
        not isinstance(value, (Mapping, torch.Tensor, type))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def leaves_of(state: Any) -> dict[str, Leaf]:
    """Name -> leaf of a nested state: tensors, plain values, objects with `state_dict`. Raises ConfigError, CheckpointError."""
    if not isinstance(state, dict):
        raise ConfigError(
            f'state: expected a dict such as {{"model": model, "optimizer": optimizer}}, not {type(state).__name__}'
        )
    return flatten(state, lambda value: isinstance(value, torch.Tensor) or is_stateful(value), _MAX_LEAVES)


def resolved_state(state: Any) -> Any:
    """The nested state with every object in it replaced by its `state_dict()`. Nothing is copied but containers."""
    if is_stateful(state):
        return state.state_dict()
    if isinstance(state, Mapping):
        return {key: resolved_state(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(resolved_state(value) for value in state)
    return state


def number_tables(state: Any) -> list[str]:
    """The names of the tables of a resolved state whose keys are whole numbers: in a checkpoint all keys are text, and by
    these names they become numbers again.

    Raises ConfigError for other keys, and for the first value that could not be restored without running code.
    """
    found: list[str] = []

    def visit(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            kinds = {type(key) for key in value}
            if kinds == {int}:
                found.append(name)
            elif kinds - {str}:
                raise ConfigError(
                    f"state: the keys of {name!r} are not all text, or all whole numbers, and could not be told apart when "
                    "they are restored"
                )
        items = (
            value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) in (list, tuple) else ()
        )
        for key, item in items:
            if isinstance(item, (Mapping, list, tuple)):
                visit(item, f"{name}.{key}" if name else str(key))

    visit(state, "")
    _check_values(state)
    return found


def with_number_tables(resolved: Any) -> dict[str, Any]:
    """What a state to be saved has under OWN_KEY: its `number_tables`, and the paths of its empty tables, which have no name;
    so that ranks with the same ones save them once, and others save their own. Raises ConfigError."""
    tables, empty = number_tables(resolved), _empty_tables(resolved)
    return {key: {_digest(found): found} for key, found in ((_NUMBER_TABLES, tables), (_EMPTY_TABLES, empty)) if found}


def _digest(found: list[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, found)).encode(errors="surrogatepass")).hexdigest()[:12]


def _empty_tables(resolved: Any) -> list[tuple[str | int, ...]]:
    """Their paths: text for a key of a table, a number for a place in a list."""
    empty: list[Path] = []
    flatten(resolved, lambda value: isinstance(value, torch.Tensor), _MAX_LEAVES, empty=empty)
    return [tuple(int(key) if isinstance(key, Index) else str(key) for key in path) for path in empty]


def _check_values(state: Any) -> None:
    for name, leaf in flatten(state, lambda value: isinstance(value, torch.Tensor), _MAX_LEAVES).items():
        if isinstance(leaf.value, torch.Tensor):
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
    """The class of the first object in a plain value that is no number, text, array or container of them; "" without one."""
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, torch.Tensor):
        return ""
    if kind in _SEQUENCES:
        return next(filter(None, map(_opaque_kind, value)), "")
    if kind in _TABLES:
        return next(filter(None, map(_opaque_kind, (*value.keys(), *value.values()))), "")
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return ""
    return f"{kind.__module__}.{kind.__qualname__}"


def restore_state(
    url: str,
    state: dict[str, Any],
    *,
    process_group: Any = None,
    timeout_s: float,
    connectors: Mapping[str, Connector] | None = None,
) -> None:
    """Restore `state` in place from a checkpoint, saved by any number of ranks.

    Tensors are filled where they are, plain values replaced, objects get their part by `load_state_dict`. All names, shapes and
    dtypes are compared before the first byte is written. What only the checkpoint has is left out if its first key is not in
    the state, an error in a module, and else made: the state's table or empty list gets it.
    Raises CheckpointError, PeerError, FormatError, ConnectorError.
    """
    with OpenCheckpoint.open(url, connectors, "2GiB", "auto") as source:
        contents = source.contents
        known = (*contents.values, *contents.pickled)
        said = [
            [one for found in source.plain_values(names).values() for one in found]
            for key in (_NUMBER_TABLES, _EMPTY_TABLES)
            for names in [[name for name in known if name.startswith(f"{OWN_KEY}.{key}.")]]
        ]
    empty = [tuple(Index(key) if type(key) is int else key for key in path) for path in said[1]]
    targets = _Targets(contents, set(said[0]), empty)
    for name, leaf in leaves_of(state).items():
        targets.add(name, leaf)
    targets.add_rest(state)
    targets.check()
    reader = StreamReader(url, process_group=process_group, timeout_s=timeout_s, connectors=connectors)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        load(targets.flat, storage_reader=reader, planner=DefaultLoadPlanner(), process_group=process_group)
    else:
        _load_alone(targets.flat, reader)
    targets.settle()


def _load_alone(flat: dict[str, Any], reader: StreamReader) -> None:
    """What `load` does in a job of one process, without its warning that it is one."""
    planner, metadata = DefaultLoadPlanner(), reader.read_metadata()
    planner.set_up_planner(flat, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _Targets:
    """What is to be filled: `flat`, name -> tensor to be filled, or None for a plain value."""

    def __init__(self, contents: Checkpoint, numbered: Set[str], empty: Sequence[Path] = ()) -> None:
        """`numbered` are the names that `number_tables` gave, `empty` the paths of empty tables."""
        self._empty = empty
        self.flat: dict[str, Any] = {}
        self._contents = contents
        self._numbered = numbered
        self._names = {*contents.tensors, *contents.values, *contents.pickled}
        self._plain: list[tuple[str, Leaf]] = []
        self._objects: list[_Part] = []
        self._rest: dict[tuple[str, ...], tuple[Any, dict[str, Path]]] = {}  # by place of a container: what it gets
        self._missing: list[str] = []
        self._problems: list[str] = []

    def add(self, name: str, leaf: Leaf) -> None:
        """Add a leaf of the state."""
        if is_stateful(leaf.value):
            part = _Part(name, leaf, self._contents, self._numbered, _below(leaf.path, self._empty))
            self._objects.append(part)
            self._missing += part.missing
            self._problems += part.problems
            self.flat |= part.flat
        elif name not in self._names:
            # An empty list is a value, and in the checkpoint perhaps one with tensors or tables.
            is_entered = leaf.value == [] and any(full.startswith(f"{name}.") for full in self._names)
            if not is_entered:
                self._missing.append(name)
        elif isinstance(leaf.value, torch.Tensor):
            self._add_tensor(name, leaf.value)
        elif name in self._contents.tensors:
            self._problems.append(f"{name!r} is a tensor in the checkpoint, and here a {type(leaf.value).__name__}")
        elif isinstance(leaf.container, tuple):
            self._problems.append(f"{name!r} stands in a tuple, which cannot be changed")
        else:
            self.flat[name] = None
            self._plain.append((name, leaf))

    def add_rest(self, state: Mapping[Any, Any]) -> None:
        """Add what only the checkpoint has, below the entries at the top of the state."""
        taken = {full for part in self._objects for full in part.names}
        for full in sorted(self._names - taken - self.flat.keys()):
            path = self._contents.paths.get(full, (full,))
            if str(path[0]) in map(str, state):
                self._add_one(full, path, state)

    def _add_one(self, full: str, path: Path, state: Any) -> None:
        container, depth = state, 0
        while depth < len(path) - 1 and (inner := _inner(container, path[depth])) is not None:
            container, depth = inner, depth + 1
        is_list = isinstance(path[depth], Index)
        is_open = container == [] if is_list else isinstance(container, MutableMapping)
        if not is_open or _has(container, path[depth]):
            self._problems.append(f"only in the checkpoint: {full!r}")
            return
        entry = self._contents.tensors.get(full)
        self.flat[full] = None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)
        self._rest.setdefault(_texts(path[:depth]), (container, {}))[1][full] = path[depth:]

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        entry = self._contents.tensors.get(name)
        if entry is None:
            self._problems.append(f"{name!r} is a tensor, and none in the checkpoint")
        elif problem := _difference(tensor, entry):
            self._problems.append(f"{name!r} {problem}")
        else:
            self.flat[name] = tensor

    def check(self) -> None:
        """Raise CheckpointError if names are missing, or do not fit."""
        lines = [f"  {item}" for item in self._problems[:_NUM_LISTED]]
        if self._missing:
            lines.append(f"  missing in the checkpoint ({len(self._missing)}): {_listed(self._missing)}")
            lines += [f"  {hint}" for hint in [wrapper_hint(self._missing, self._names)] if hint]
        if lines:
            raise StateMismatchError(
                f"{self._contents.name} does not fit the state; nothing was written:\n" + "\n".join(lines),
                missing=tuple(self._missing),
            )

    def settle(self) -> None:
        """Put what was read where it belongs."""
        for name, leaf in self._plain:
            leaf.container[leaf.key] = self.flat[name]
        for place, (container, paths) in self._rest.items():
            empty = [path for path in _below(place, self._empty) if not _has(container, path[0])]
            made = _like(None, _nested(paths, self.flat, empty), ".".join(place), self._numbered)
            if isinstance(container, list):
                container.extend(made)
            else:
                container.update(made)
        for part in self._objects:
            part.load(self.flat)


class _Part:
    """The part of an object: `flat` as in `_Targets`; what the object lacks is made anew."""

    def __init__(self, name: str, leaf: Leaf, contents: Checkpoint, numbered: Set[str], empty: Sequence[Path]) -> None:
        self._empty = empty
        self.flat: dict[str, Any] = {}
        self._name = name
        self._numbered = {*numbered, f"{name}.state"} if isinstance(leaf.value, torch.optim.Optimizer) else numbered
        self.missing: list[str] = []
        self.problems: list[str] = []
        self._object = leaf.value
        self._current = leaf.value.state_dict()
        present = flatten(self._current, lambda value: isinstance(value, torch.Tensor), _MAX_LEAVES)
        tensors = {_texts(item.path): item.value for item in present.values() if isinstance(item.value, torch.Tensor)}
        depth = len(leaf.path)
        self._paths: dict[str, Path] = {}
        for full in (*contents.tensors, *contents.values, *contents.pickled):
            if full == name:
                self.problems.append(f"{name!r} is a value in the checkpoint, and here a {type(leaf.value).__name__}")
            elif full.startswith(f"{name}."):
                path = contents.paths.get(full, ())
                self._paths[full] = path[depth:] if len(path) > depth else (full[len(name) + 1 :],)
        for full, path in self._paths.items():
            entry = contents.tensors.get(full)
            tensor = tensors.get(_texts(path))
            if entry is None:
                self.flat[full] = None
            elif tensor is None or (not isinstance(leaf.value, torch.nn.Module) and _difference(tensor, entry)):
                self.flat[full] = self._made(path, entry)
            elif problem := _difference(tensor, entry):
                self.problems.append(f"{full!r} {problem}")
            else:
                self.flat[full] = tensor
        if isinstance(leaf.value, torch.nn.Module):
            there = set(map(_texts, self._paths.values()))
            here = {_texts(item.path) for item in present.values() if item.path}
            self.missing += [f"{name}.{'.'.join(path)}" for path in here - there]
            unexpected = [full for full, path in self._paths.items() if _texts(path) not in here]
            if unexpected:
                self.problems.append(f"only in the checkpoint: {_listed(unexpected)}")
        elif not self._paths and present and not isinstance(leaf.value, torch.optim.Optimizer):
            self.missing.append(name)

    @property
    def names(self) -> Set[str]:
        """The names of the checkpoint that are the object's."""
        return self._paths.keys()

    def _made(self, path: Path, entry: TensorEntry) -> torch.Tensor:
        """A tensor for what the object does not have yet; of an optimizer, it is laid out as its parameter is."""
        if isinstance(self._object, torch.optim.Optimizer) and len(path) == 3 and path[0] == "state":
            params = [param for group in self._object.param_groups for param in group["params"]]
            number = int(path[1]) if str(path[1]).isdecimal() else len(params)
            if number < len(params) and params[number].shape == entry.shape:
                return torch.empty_like(params[number], dtype=entry.dtype, requires_grad=False)
        return torch.empty(entry.shape, dtype=entry.dtype)

    def load(self, flat: Mapping[str, Any]) -> None:
        """Give the object its part of what was read."""
        table = _nested(self._paths, flat, self._empty)
        if isinstance(self._object, torch.optim.Optimizer):
            table.setdefault("state", {})
        self._object.load_state_dict(_like(self._current, table, self._name, self._numbered))


def _nested(paths: Mapping[str, Path], flat: Mapping[str, Any], empty: Iterable[Path]) -> dict[Any, Any]:
    """The values by their paths, and empty tables; also what becomes a list is a table here."""
    table: dict[Any, Any] = {}
    for full, path in paths.items():
        inner = table
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = flat[full]
    for path in empty:  # on one rank; another may have something there
        inner = table
        for key in path:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else {}
    return table


def _below(place: Path, paths: Iterable[Path]) -> list[Path]:
    """Those that go on from `place`, from there on."""
    start = _texts(place)
    return [path[len(start) :] for path in paths if len(path) > len(start) and _texts(path[: len(start)]) == start]


def _like(current: Any, value: Any, name: str, numbered: Set[str]) -> Any:
    """What was read, as containers: lists, tables with the keys they had (whole numbers in those of `numbered`), and the empty
    tables of `current`, which no checkpoint names."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, Index) for key in value):
        known = current if isinstance(current, (list, tuple)) else ()
        return [
            _like(known[key] if key < len(known) else None, value[key], f"{name}.{key}", numbered)
            for key in sorted(value)
        ]
    keys = {str(key): key for key in current} if isinstance(current, Mapping) else {}
    table = {}
    for text, item in value.items():
        is_number = name in numbered and str(text).lstrip("-").isdecimal()
        key = int(text) if is_number else keys.get(str(text), text)
        table[key] = _like(current.get(key) if keys else None, item, f"{name}.{text}", numbered)
    if isinstance(current, Mapping):
        table |= {
            key: {} for key, item in current.items() if isinstance(item, Mapping) and not item and key not in table
        }
    return Counter(table) if type(current) is Counter else table


def _inner(container: Any, key: Any) -> Any:
    """The table or list under a key of a path, where keys of tables are text; None: there is none."""
    if isinstance(container, Mapping):
        found = next((value for other, value in container.items() if str(other) == str(key)), None)
    else:
        found = container[key] if type(container) is list and isinstance(key, Index) and key < len(container) else None
    return found if isinstance(found, (Mapping, list)) else None


def _has(container: Any, key: Any) -> bool:
    return any(str(other) == str(key) for other in container)


def _texts(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _difference(tensor: torch.Tensor, entry: TensorEntry) -> str | None:
    """How a tensor differs from that of the checkpoint, so that it cannot be filled; None: it fits."""
    if tuple(tensor.shape) != entry.shape:
        return f"has shape {list(tensor.shape)}, and {list(entry.shape)} in the checkpoint"
    if tensor.dtype != entry.dtype:
        return f"is {tensor.dtype}, and {entry.dtype} in the checkpoint"
    if tensor.is_meta:
        return "is on the meta device and has no memory: call model.to_empty(device=...) first"
    return None


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f", and {len(ordered) - _NUM_LISTED} more" if len(ordered) > _NUM_LISTED else ""
    return ", ".join(ordered[:_NUM_LISTED]) + more
