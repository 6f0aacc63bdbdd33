"""Restores the state of a training process in place: tensors, plain values, and objects with `state_dict`, such as a module.

state ─> leaves ─> object: its state_dict, filled in place where it has the tensor ─> dcp.load through StreamReader
                   an optimizer's state, where it has none yet, is made like its parameters ─> load_state_dict
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.left_out import LeftOut, is_left_out, parsed_left_out
from loaderkit.checkpoint.names import Index, Leaf, Path, texts
from loaderkit.checkpoint.restore.dcp_reader import StreamReader
from loaderkit.checkpoint.restore.objects import ModulePart, ObjectPart, difference, keeps_shape, listed
from loaderkit.checkpoint.restore.optimizers import OptimizerPart, SavedGroups, saved_groups
from loaderkit.checkpoint.restore.renamed import Renaming
from loaderkit.checkpoint.restore.requests import (
    GIVE_MEMORY,
    SAME_MEMORY,
    identity,
    overlap_of,
    overlapping_pair,
    stores_memory_once,
    warn_same_memory,
)
from loaderkit.checkpoint.restore.selection import Strictness, matches
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.state import ExpectsState, is_stateful, leaves_of, modules_in, on_devices_of
from loaderkit.checkpoint.structure import RUN, Structure, nest
from loaderkit.checkpoint.wrappers import wrapper_hint
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError

logger = logging.getLogger("loaderkit")
_NUM_LISTED = 8
_STRICT = Strictness()


class StateMismatchError(CheckpointError):
    """The checkpoint does not fit the state that is to be filled; nothing was written."""


def restore_state(
    url: str,
    state: dict[str, Any],
    *,
    process_group: Any = None,
    timeout_s: float,
    connectors: Mapping[str, Connector] | None = None,
    strict: Strictness = _STRICT,
    rename: Mapping[str, str] | None = None,
    only: LeftOut | None = None,
    begun: set[str] | None = None,
) -> str | None:
    """Restore `state` in place from a checkpoint, saved by any number of ranks; what its run has measured (RUN), if it says so.

    Tensors are filled where they are, plain values replaced, objects get their part by `load_state_dict`. All names, shapes and
    dtypes are compared before the first byte is written. What only the checkpoint has is left out if its first key is not in
    the state, an error in a module, and else made: the state's table or empty list gets it. Of optimizers that the
    checkpoint says it was saved without only the options are restored. `only`: nothing but these optimizers. What `strict`
    names keeps its values, or is left out; `rename` is that of `loaderkit.restore`. `begun` gets the names of what is filled in
    its place, before the first is. Raises CheckpointError, PeerError, FormatError, ConnectorError.
    """
    with OpenCheckpoint.open(url, connectors, "2GiB", "auto") as source:
        run, without = _said(source, Renaming(rename or {}))
        if rename:
            rename = _that_apply(rename, source, without)
            _rename(source, rename)
        structure = source.structure()
        leaves = leaves_of(state, enters=_enters(source.contents))
        within = ("",) if only is None else only.prefixes
        leaves = {
            name: leaf
            for name, leaf in leaves.items()
            if f"{name}.".startswith(within) and not f"{name}.".startswith(without.prefixes)
        }
        optimizers = [leaf.path for leaf in leaves.values() if isinstance(leaf.value, torch.optim.Optimizer)]
        targets = _Targets(source.contents, structure, saved_groups(source, optimizers), state, strict, within=within)
        for name, leaf in leaves.items():
            targets.add(name, leaf)
        targets.add_rest()
        targets.part_shared()
        targets.check()
        targets.tell_expected(source)
    if begun is not None:
        begun |= targets.filled
    reader = StreamReader(url, process_group=process_group, timeout_s=timeout_s, connectors=connectors, rename=rename)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        load(targets.flat, storage_reader=reader, planner=DefaultLoadPlanner(), process_group=process_group)
    else:
        _load_alone(targets.flat, reader)
    targets.settle()
    without.set_options(leaves_of(state))
    return run


def left_out_in(
    url: str, *, connectors: Mapping[str, Connector] | None = None, rename: Mapping[str, str] | None = None
) -> LeftOut:
    """The optimizers that a checkpoint was saved without, by their names in the state. Raises CheckpointError, FormatError,
    ConnectorError."""
    with OpenCheckpoint.open(url, connectors, "2GiB", "auto") as source:
        return _said(source, Renaming(rename or {}))[1]


def _said(source: OpenCheckpoint, renaming: Renaming) -> tuple[str | None, LeftOut]:
    """What a manager says of its run, and the optimizers that it has left out."""
    contents = source.contents
    there = [name for name in (*contents.values, *contents.pickled) if name == RUN or is_left_out(name)]
    values = source.plain_values(there)
    return values.pop(RUN, None), parsed_left_out(values.values(), renaming.name)


def _that_apply(rename: Mapping[str, str], source: OpenCheckpoint, without: LeftOut) -> dict[str, str]:
    """What of `rename` is not only of the optimizers that the checkpoint does not have."""
    contents, begins = source.contents, tuple(f"{name}." for name in without.saved)
    names = (*contents.tensors, *contents.values, *contents.pickled)

    def is_idle(begin: str) -> bool:
        rule = Renaming({begin: rename[begin]})
        is_theirs = begin.startswith(begins) or rule.matches(begins)
        return is_theirs and not rule.matches(names)

    return {begin: here for begin, here in rename.items() if not is_idle(begin)}


def _rename(source: OpenCheckpoint, rename: Mapping[str, str]) -> None:
    try:
        source.renamed(Renaming(rename))
    except CheckpointError as error:  # which is not for another checkpoint to mend
        raise StateMismatchError(str(error)) from error


def _enters(contents: Checkpoint) -> Callable[[str, Any], bool]:
    """A tuple of tensors is a plain value in most checkpoints, and its tensors have names in a torch.save file."""
    return lambda name, value: contents.tells_containers and name not in contents.values


def _load_alone(flat: dict[str, Any], reader: StreamReader) -> None:
    """The result of `load` in a job of one process, without its warning about that."""
    planner, metadata = DefaultLoadPlanner(), reader.read_metadata()
    planner.set_up_planner(flat, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _OnlySaved(NamedTuple):
    """What a container of the state gets that only the checkpoint has: paths by name, and the paths of empty containers."""

    container: Any
    paths: dict[str, Path]
    empty: list[Path]


class _Targets:
    """What is to be filled: `flat`, name -> tensor to be filled, or None for a plain value."""

    def __init__(
        self,
        contents: Checkpoint,
        structure: Structure,
        groups: Mapping[tuple[str, ...], SavedGroups],
        state: dict[str, Any],
        strict: Strictness,
        *,
        within: tuple[str, ...],
    ) -> None:
        """`groups`: of the optimizers of the checkpoint, by path. `within`: how the names begin that are restored."""
        self._strict, self._within = strict, within
        self.flat: dict[str, Any] = {}
        self._contents, self._structure, self._groups, self._state = contents, structure, groups, state
        self._modules = modules_in(state)
        self._names = {*contents.tensors, *contents.values, *contents.pickled}
        self._given: dict[str, Leaf] = {}  # tensors that are filled where they are
        self._plain: list[tuple[str, Leaf]] = []
        self._objects: list[ObjectPart] = []
        self._rest: dict[tuple[str, ...], _OnlySaved] = {}  # by place of a container
        self._same: dict[str, str] = {}  # names of the memory that another name fills
        self._own: set[str] = set()  # names of tensors and plain values here
        self._missing: list[str] = []
        self._problems: list[str] = []

    def add(self, name: str, leaf: Leaf) -> None:
        """Add a leaf of the state."""
        if is_stateful(leaf.value):
            part = self._part(name, leaf)
            self._objects.append(part)
            self._missing += part.missing
            self._problems += part.problems
            self.flat |= part.flat
            return
        self._own.add(name)
        if name not in self._names:
            # An empty list is a value, and in the checkpoint perhaps one with tensors or tables.
            is_entered = leaf.value == [] and any(full.startswith(f"{name}.") for full in self._names)
            if not is_entered and not matches(name, self._strict.missing):
                self._missing.append(name)
        elif isinstance(leaf.value, torch.Tensor):
            self._add_tensor(name, leaf)
        elif name in self._contents.tensors:
            self._problems.append(f"{name!r} is a tensor in the checkpoint, and here a {type(leaf.value).__name__}")
        else:
            self.flat[name] = None
            self._plain.append((name, leaf))

    def _part(self, name: str, leaf: Leaf) -> ObjectPart:
        if isinstance(leaf.value, torch.optim.Optimizer):
            groups = self._groups.get(texts(leaf.path))
            return OptimizerPart(
                name, leaf, self._contents, self._structure, self._strict, groups=groups, modules=self._modules
            )
        kind = ModulePart if isinstance(leaf.value, torch.nn.Module) else ObjectPart
        return kind(name, leaf, self._contents, self._structure, self._strict)

    def add_rest(self) -> None:
        """Add what only the checkpoint has, below the entries at the top of the state."""
        taken = {full for part in self._objects for full in part.names}
        taken |= self._own | {full for full in self._names if matches(full, self._strict.unexpected)}
        tops = {*map(str, self._state)}
        for full in sorted(self._names - taken - self.flat.keys()):
            path = self._contents.paths.get(full, (full,))
            if str(path[0]) in tops and f"{full}.".startswith(self._within):
                self._add_one(full, path)
        for path in self._structure.containers:
            if matches(".".join(texts(path)), self._strict.unexpected):
                continue
            if path and str(path[0]) in tops and ".".join((*texts(path), "")).startswith(self._within):
                container, depth = self._place_of(path)
                if depth < len(path) and self._is_open(container, path[depth]):
                    self._rest_at(path[:depth], container).empty.append(path[depth:])

    def _place_of(self, path: Path) -> tuple[Any, int]:
        """The innermost container of the state on a path, and the number of keys to it."""
        container, depth = self._state, 0
        while depth < len(path) and (inner := _inner(container, path[depth])) is not None:
            container, depth = inner, depth + 1
        return container, depth

    def _is_open(self, container: Any, key: Any) -> bool:
        is_open = container == [] if isinstance(key, Index) else isinstance(container, MutableMapping)
        return is_open and not _has(container, key)

    def _rest_at(self, place: Path, container: Any) -> _OnlySaved:
        return self._rest.setdefault(texts(place), _OnlySaved(container, {}, []))

    def _add_one(self, full: str, path: Path) -> None:
        container, depth = self._place_of(path[:-1])
        if not self._is_open(container, path[depth]):
            self._problems.append(f"only in the checkpoint: {full!r}")
            return
        entry = self._contents.tensors.get(full)
        self.flat[full] = None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)
        self._rest_at(path[:depth], container).paths[full] = path[depth:]

    def _add_tensor(self, name: str, leaf: Leaf) -> None:
        entry = self._contents.tensors.get(name)
        if entry is None:
            self._problems.append(f"{name!r} is a tensor, and none in the checkpoint")
        elif keeps_shape(self._contents, name, leaf.value, entry, self._strict):
            return
        elif problem := difference(leaf.value, entry):
            self._problems.append(f"{name!r} {problem}")
        else:
            self.flat[name] = leaf.value
            self._given[name] = leaf

    def part_shared(self) -> None:
        """Separate tensors that share memory here and did not when they were saved, such as an average of weights that
        is the weights themselves until its first update. The model keeps the memory."""
        modules = {full: part for part in self._objects if part.keeps_memory for full in part.flat}
        others = {full: part for part in self._objects if not part.keeps_memory for full in part.flat}
        owners: dict[str, ObjectPart | None] = {**modules, **dict.fromkeys(self._given), **others}
        by_memory: dict[Any, list[str]] = {}
        for full in owners:
            tensor = self.flat.get(full)
            if isinstance(tensor, torch.Tensor) and tensor.numel() and type(tensor).__name__ != "DTensor":
                by_memory.setdefault(identity(tensor), []).append(full)
        were_apart = stores_memory_once(self._contents)
        for first, *more in by_memory.values():
            kept = first
            for full in more:
                part = owners[full]
                if self._contents.tensors[full].shards == self._contents.tensors[first].shards:
                    continue
                if part is not None and not part.keeps_memory:
                    self.flat[full] = torch.empty_like(self.flat[full])
                elif part is None and len(self._given[full].path) > 1:
                    self.flat[full] = torch.empty_like(self.flat[full])
                    self._plain.append((full, self._given[full]))
                elif were_apart and part is not owners[first]:
                    self._problems.append(f"{full!r} {SAME_MEMORY.format(first)}. {GIVE_MEMORY}")
                else:
                    warn_same_memory(self._contents, kept, full)
                    self._same[kept] = kept = full
        for full in self._same:
            del self.flat[full]
        filled: dict[str, torch.Tensor] = {
            name: tensor for name, *_ in by_memory.values() if _is_plain(tensor := self.flat.get(name))
        }
        overlapping = overlapping_pair(filled)
        if overlapping is not None:  # right if they did when they were saved
            logger.warning("%s, unless they did so when they were saved. %s", overlap_of(*overlapping), GIVE_MEMORY)

    def check(self) -> None:
        """Raise CheckpointError if names are missing, or do not fit."""
        lines = [f"  {item}" for item in self._problems[:_NUM_LISTED]]
        if self._missing:
            lines.append(f"  missing in the checkpoint ({len(self._missing)}): {listed(self._missing)}")
            lines += [f"  {hint}" for hint in [wrapper_hint(self._missing, self._names)] if hint]
            lines.append(
                "  strict={'missing': GLOBS} lets what is new here keep its values; rename={FROM: TO} maps names"
            )
        elif self._strict.missing and not self.flat and self._names and "" in self._within:
            lines.append(
                "  it has none of the names here, so nothing would be restored, and strict's `missing` is meant for some of "
                f"them: it has {listed(self._names)}; rename={{FROM: TO}} maps names"
            )
        if lines:
            raise StateMismatchError(
                f"{self._contents.name} does not fit the state; nothing was written:\n" + "\n".join(lines),
                missing=tuple(self._missing),
            )

    def tell_expected(self, source: OpenCheckpoint) -> None:
        """Tell the objects that want to know the state that they will get, which takes a request; one with tensors is not
        told."""
        for part in self._objects:
            has_tensors = any(isinstance(value, torch.Tensor) for value in part.flat.values())
            if isinstance(part.object, ExpectsState) and not has_tensors:
                part.object.expect_state(part.state_of(source.plain_values([*part.flat])))

    @property
    def filled(self) -> set[str]:
        """The names of what is filled in its place: tensors, and objects that are given a whole state."""
        modules = {full for part in self._objects if part.keeps_memory for full in part.flat}
        return modules | self._given.keys() | {part.name for part in self._objects if not part.is_kept}

    def settle(self) -> None:
        """Put what was read where it belongs."""
        for full in reversed(self._same):
            self.flat[full] = self.flat[self._same[full]]
        for name, leaf in self._plain:
            _put(self._state, leaf.path, on_devices_of(self.flat[name], leaf.value))
        for place, (container, paths, empty) in self._rest.items():
            flat = {full: self.flat[full] for full in paths}
            made = nest(flat, paths, self._structure.within(place), empty=empty)
            if isinstance(container, list):
                container.extend(made)
            else:
                container.update(made)
        for part in self._objects:
            part.load(self.flat)


def _inner(container: Any, key: Any) -> Any:
    """The table or list under a key of a path, in which keys of tables are text; None if there is none."""
    if isinstance(container, Mapping):
        found = next((value for other, value in container.items() if str(other) == str(key)), None)
    else:
        found = container[key] if type(container) is list and isinstance(key, Index) and key < len(container) else None
    return found if isinstance(found, (Mapping, list)) else None


def _has(container: Any, key: Any) -> bool:
    return any(str(other) == str(key) for other in container)


def _put(container: Any, path: Path, value: Any) -> Any:
    """The container with a value at a path: the same one, unless it is a tuple."""
    key = path[0]
    inner = value if len(path) == 1 else _put(container[key], path[1:], value)
    if isinstance(container, tuple):
        return tuple(inner if number == key else item for number, item in enumerate(container))
    if container[key] is not inner:
        container[key] = inner
    return container


def _is_plain(tensor: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta
