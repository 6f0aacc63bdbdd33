"""The containers of a nested state, which flat names do not describe: keys that are numbers, empty tables, tuples, versions.

A torch.save file has them itself. For the other formats a `CheckpointManager` saves them as plain values:

    loaderkit.structure.<digest>: [[["scheduler", "milestones"], {"kind": "Counter", "numbered": true}], ...]
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loaderkit.checkpoint.formats.plain_values import FrozenCounter
from loaderkit.checkpoint.names import MAX_DEPTH, Index, Path, texts
from loaderkit.errors import CheckpointError

OWN_KEY = "loaderkit"
"""The key in a saved state for what loaderkit adds to the user's state."""
STRUCTURE, OBJECTS = f"{OWN_KEY}.structure.", f"{OWN_KEY}.objects."
WITHOUT = f"{OWN_KEY}.without"
"""Below it are the names of the optimizers that a checkpoint does not have, where it was saved in a hurry."""
RUN = f"{OWN_KEY}.run"
"""What a run has measured of its saves and interruptions, as JSON."""
_NUMBER_TABLES, _EMPTY_TABLES = f"{OWN_KEY}.number_tables.", f"{OWN_KEY}.empty_tables."  # of checkpoints of before
_KINDS = ("", "tuple", "OrderedDict", "Counter")
_PLAIN = (type(None), bool, int, float, str)
_MAX_GAP = 1_000_000  # items of a list that are not there


class Container(NamedTuple):
    """A table, a list or a tuple. `kind`: "" for a dict or list. `numbered`: its keys are whole numbers. `versions`: what
    `_metadata` says of the modules whose state it is. `shapes`: it is the state of an optimizer by names of parameters, and
    these are their shapes, in its own order."""

    kind: str = ""
    numbered: bool = False
    versions: Mapping[str, Any] | None = None
    shapes: list[list[int]] | None = None

    @classmethod
    def of(cls, value: Any) -> Container:
        """What is to be known of a container."""
        versions = getattr(value, "_metadata", None)
        if isinstance(value, (Counter, FrozenCounter)):
            kind = "Counter"
        else:
            kind = "OrderedDict" if isinstance(value, OrderedDict) else "tuple" if isinstance(value, tuple) else ""
        is_numbered = isinstance(value, Mapping) and bool(value) and all(type(key) is int for key in value)
        return cls(kind, is_numbered, plain_versions(versions) if isinstance(versions, Mapping) else None)

    def described(self) -> dict[str, Any]:
        """As it is saved: what is not the default."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}


Containers = dict[Path, Container]


def collect(containers: Containers) -> Callable[[Path, Any], None]:
    """For `flatten`: adds the containers that are not plain, and the empty ones, which have no name."""

    def seen(path: Path, value: Any) -> None:
        container = Container.of(value)
        if not value or container != Container():
            containers[path] = container

    return seen


def saved_structure(containers: Containers) -> dict[str, Any]:
    """What a state has under OWN_KEY for its containers. Ranks with the same ones save them once, others save their own."""
    found = [
        ([int(key) if isinstance(key, Index) else str(key) for key in path], container.described())
        for path, container in containers.items()
    ]
    return _by_digest(STRUCTURE, found)


def saved_objects(names: list[str]) -> dict[str, Any]:
    """What a state has under OWN_KEY for the objects whose state is one thing, so that ranks are not mixed in it."""
    return _by_digest(OBJECTS, names) if names else {}


def saved_without(found: list[Any]) -> dict[str, Any]:
    """What a state has under OWN_KEY for the optimizers that it does not have; ranks may have different ones."""
    return _by_digest(f"{WITHOUT}.", found) if found else {}


def _by_digest(prefix: str, found: list[Any]) -> dict[str, Any]:
    digest = hashlib.sha256(repr(found).encode(errors="surrogatepass")).hexdigest()[:12]
    return {prefix.split(".")[1]: {digest: found}}


@dataclass(frozen=True)
class Structure:
    """The containers of a checkpoint by path. `numbered` are names of tables whose keys are whole numbers. With
    `is_complete`, a container that is not listed is a dict with keys of text, or a list."""

    containers: Containers = field(default_factory=dict)
    numbered: frozenset[str] = frozenset()
    is_complete: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_text", {texts(path): one for path, one in self.containers.items()})

    def at(self, path: Iterable[Any]) -> Container | None:
        """The container at a path, of whose keys only the text counts."""
        key = texts(path)
        by_text: dict[tuple[str, ...], Container] = vars(self)["_by_text"]
        found = by_text.get(key)
        if found is None and ".".join(key) in self.numbered:
            return Container(numbered=True)
        return found

    def within(self, path: Iterable[Any]) -> Structure:
        """The structure of the part of the state at a path."""
        start = texts(path)
        size, prefix = len(start), ".".join((*start, ""))
        below = {full[size:]: one for full, one in self.containers.items() if texts(full[:size]) == start}
        numbered = frozenset(name[len(prefix) :] for name in self.numbered if f"{name}.".startswith(prefix))
        return Structure(below, numbered, self.is_complete)


def structure_names(names: Iterable[str]) -> list[str]:
    """The names of the plain values that describe the containers."""
    return [name for name in names if name.startswith((STRUCTURE, _NUMBER_TABLES, _EMPTY_TABLES))]


def is_inner(name: str) -> bool:
    """True for a plain value that only the manager needs."""
    return name.startswith((STRUCTURE, OBJECTS, f"{WITHOUT}.", _NUMBER_TABLES, _EMPTY_TABLES))


def parsed_structure(values: Mapping[str, Any]) -> Structure:
    """The structure that the plain values describe. Raises CheckpointError for values that no writer writes."""
    containers: Containers = {}
    numbered: set[str] = set()
    try:
        for name, said in values.items():
            if name.startswith(_NUMBER_TABLES):
                numbered |= {str(table) for table in said}
            elif name.startswith(_EMPTY_TABLES):
                containers |= {_parsed_path(path): Container() for path in said}
            else:
                for path, described in said:
                    _add(containers, _parsed_path(path), _parsed(described))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"what it says of its tables is damaged: {error!r:.200}") from None
    is_complete = any(name.startswith(STRUCTURE) for name in values)
    return Structure(containers, frozenset(numbered), is_complete)


def _parsed_path(path: Any) -> Path:
    return tuple(Index(key) if type(key) is int else str(key) for key in path)


def _parsed(described: Any) -> Container:
    container = Container(**described)
    shapes = [] if container.shapes is None else container.shapes
    versions = {} if container.versions is None else container.versions
    is_valid = container.kind in _KINDS and isinstance(versions, Mapping)
    if not is_valid or not all(isinstance(shape, (list, tuple)) for shape in shapes):
        raise ValueError(f"{described!r:.100}")
    return container


def _add(containers: Containers, path: Path, container: Container) -> None:
    """Where ranks have parts of a model, each gives the versions of its own part."""
    known = containers.get(path, container)
    if known.versions and container.versions:
        container = container._replace(versions={**container.versions, **known.versions})
    if known.shapes != container.shapes:
        container = container._replace(shapes=[])
    containers[path] = container


# ------------------------------------------------------------------------------------------------------------ nesting


class _Node(dict[Any, Any]):
    """A container that is not made yet, and no plain value."""


def nest(
    flat: Mapping[str, Any],
    paths: Mapping[str, Path],
    structure: Structure,
    *,
    empty: Iterable[Path] | None = None,
    like: Any = None,
) -> Any:
    """The nested state of flat names, in which each has its path in `paths`; `structure` begins there, too.

    Items of a list stay at their places; missing items are None. `empty`: the paths of containers that are
    there even if nothing is in them; by default all of the structure's. `like` is a state of the same kind, whose keys
    and Counters count where the structure is not complete. Raises CheckpointError.
    """
    root = _Node()
    leaves = {texts(paths.get(name, (name,))) for name in flat}
    for path in structure.containers if empty is None else empty:
        if not any(
            texts(path[:size]) in leaves for size in range(len(path) + 1)
        ):  # another rank may have a value there
            _entered(root, path)
    for name, value in flat.items():
        path = paths.get(name, (name,))
        if not path:
            return value
        node = _entered(root, path[:-1])
        if isinstance(there := node.get(path[-1]), _Node) and there:
            raise CheckpointError(f"{'.'.join(texts(path))!r} is a value, and a table with values in it, too")
        node[path[-1]] = value
    return _made(root, (), structure, like)


def _entered(node: _Node, path: Path) -> _Node:
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"it is nested more than {MAX_DEPTH} levels deep: that is no checkpoint")
    for key in path:
        inner = node.setdefault(key, _Node())
        if not isinstance(inner, _Node):
            raise CheckpointError(f"{'.'.join(texts(path))!r} is a value, and a table with values in it, too")
        node = inner
    return node


def _made(node: _Node, path: Path, structure: Structure, like: Any) -> Any:
    container = structure.at(path)
    current = like if isinstance(like, Mapping) and not structure.is_complete else {}
    keys = {str(key): key for key in current}
    table: dict[Any, Any] = {}
    for key, item in node.items():
        known = number_of(key) if container is not None and container.numbered else keys.get(str(key), key)
        inner = current.get(known) if current else _item_of(like, key)
        table[known] = _made(item, (*path, key), structure, inner) if isinstance(item, _Node) else item
    if not structure.is_complete:
        table |= {
            key: {} for key, item in current.items() if isinstance(item, Mapping) and not item and key not in table
        }
        table = _with_numbers_of_optimizer(table)
    if table and all(isinstance(key, Index) for key in table):
        items = _listed(table, path)
        return tuple(items) if container is not None and container.kind == "tuple" else items
    return of_kind(table, container, like if current else None)


def of_kind(table: dict[Any, Any], container: Container | None, like: Any = None) -> Any:
    """A table as the container says, or as a Counter if `like` is one."""
    if isinstance(like, Counter) or (container is not None and container.kind == "Counter"):
        return Counter(table)
    if container is None or container.kind != "OrderedDict":
        return table
    ordered = OrderedDict(table)
    if container.versions is not None:
        vars(ordered)["_metadata"] = OrderedDict(plain_versions(container.versions))
    return ordered


def plain_versions(versions: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """What a `_metadata` says, as far as it is numbers and text."""
    return {
        str(name): {str(key): value for key, value in said.items() if type(value) in _PLAIN}
        for name, said in versions.items()
        if isinstance(said, Mapping)
    }


def _item_of(like: Any, key: Any) -> Any:
    return like[key] if isinstance(like, (list, tuple)) and isinstance(key, Index) and key < len(like) else None


def _listed(table: Mapping[Any, Any], path: Path) -> list[Any]:
    size = max(table) + 1
    if size > len(table) + _MAX_GAP:
        raise CheckpointError(
            f"{'.'.join(texts(path))!r} is a list with item {size - 1}, and {len(table)} of its items"
        )
    return [table.get(Index(number)) for number in range(size)]


def number_of(key: Any) -> Any:
    """A key that is the text of a whole number as that number; others as they are."""
    text = str(key)
    if isinstance(key, int) or len(text) > 1000 or not text.removeprefix("-").isdecimal():
        return key
    return int(text)


def _with_numbers_of_optimizer(table: dict[Any, Any]) -> dict[Any, Any]:
    """A table with an optimizer's groups gets its state by the numbers of its parameters again.
    torch.distributed.checkpoint has made these numbers text, which `load_state_dict` would accept, and leave the whole
    state out."""
    state, groups = table.get("state"), table.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return table
    params = [param for group in groups if isinstance(group, dict) for param in group.get("params") or ()]
    if not params or not all(type(param) is int for param in params):
        return table
    numbers = {str(param): param for param in params}
    return table | {"state": {numbers.get(str(key), key): item for key, item in state.items()}}
