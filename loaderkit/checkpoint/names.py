"""Dotted names, as of torch.distributed.checkpoint: a nested state as a flat table of tensors and plain values, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from loaderkit._internal.garbage import collector_off
from loaderkit.checkpoint.formats.plain_values import Array, BufferBytes, Dtype
from loaderkit.checkpoint.formats.restricted_pickle import StandIn
from loaderkit.errors import CheckpointError

MAX_DEPTH = 100


class Index(int):
    """An index of a list in a path; a plain int is a key of a table."""

    __slots__ = ()


Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """A value of a nested state: `container[key]`, where `key` is the last of the keys in `path`."""

    container: Any
    key: Any
    value: Any
    path: Path = ()


def no_tuples(name: str, value: Any) -> bool:
    """Enters no tuple, as torch.distributed.checkpoint: one with tensors is a plain value."""
    return False


@collector_off()
def flatten(
    tree: Any,
    is_tensor: Callable[[Any], bool],
    limit: int,
    *,
    single: str = "tensor",
    enters: Callable[[str, Any], bool] = lambda name, value: True,
    seen: Callable[[Path, Any], None] = lambda path, container: None,
    replaced: Callable[[str, Path, Any], Any] | None = None,
) -> dict[str, Leaf]:
    """Name -> leaf. Tables are entered, and so are lists and tuples that hold a tensor or a table; other values are leaves.

    `enters(name, value)`: whether such a tuple is entered at all. A tree that is a single leaf is called `single`. `seen` gets
    path and value of every container that is entered. `replaced(name, path, value)` gives the value to use in place of
    each value. Raises CheckpointError for two leaves of one name, for more than `limit` leaves and tables, and for
    endless nesting.
    """
    num_visited = 0
    leaves: dict[str, Leaf] = {}
    entered: dict[int, bool] = {}  # by id of a list: shared lists are searched once
    kept: list[Any] = []  # so that no other list gets the id of one that was made

    def is_entered(name: str, value: Any, depth: int) -> bool:
        if depth > MAX_DEPTH:
            raise too_deep()
        if isinstance(value, Mapping):
            return True
        if not isinstance(value, (list, tuple)) or (isinstance(value, tuple) and not enters(name, value)):
            return False
        if id(value) not in entered:
            entered[id(value)] = False
            entered[id(value)] = any(
                is_tensor(item) or is_entered(f"{name}.{number}", item, depth + 1) for number, item in enumerate(value)
            )
        return entered[id(value)]

    def visit(name: str, leaf: Leaf, depth: int) -> None:
        nonlocal num_visited
        num_visited += 1
        if num_visited > limit:
            raise CheckpointError(
                f"it has more than {limit} values and tables, more than its description can hold: it is a bomb"
            )
        value = leaf.value
        if replaced is not None and (other := replaced(name, leaf.path, value)) is not value:
            value, leaf = other, leaf._replace(value=other)
            kept.append(value)
        may_enter = depth > MAX_DEPTH or isinstance(value, (Mapping, list, tuple))
        if not may_enter or not is_entered(name, value, depth):
            if name in leaves:
                raise same_name(name)
            leaves[name] = leaf
            return
        seen(leaf.path, value)
        items = value.items() if isinstance(value, Mapping) else ((Index(n), item) for n, item in enumerate(value))
        for key, item in items:
            visit(_joined(name, key, depth), Leaf(value, key, item, (*leaf.path, key)), depth + 1)

    visit(single, Leaf(None, None, tree), 0)
    return leaves


def too_deep() -> CheckpointError:
    """The error for a value that is nested too deeply, or contains itself."""
    return CheckpointError(f"it is nested more than {MAX_DEPTH} levels deep: that is no checkpoint")


def same_name(name: str) -> CheckpointError:
    """The error for two values of one name."""
    return CheckpointError(f"two values have the name {name!r}: rename one, as names are joined by dots")


def _joined(name: str, key: Any, depth: int) -> str:
    """The name of the value under `key` in the table `name`."""
    if type(key) is str:
        return f"{name}.{key}" if depth else key
    unknown = opaque_in({key})
    if unknown is not None:
        raise CheckpointError(f"a key in {name!r} is an object of {unknown.what}, which is not made")
    try:
        return f"{name}.{key}" if depth else str(key)
    except (ValueError, RecursionError):  # of a number with thousands of digits, or of tuples in tuples
        raise CheckpointError(f"a key in {name!r} cannot be written as text") from None


def opaque_in(value: Any) -> StandIn | type[StandIn] | None:
    """The first stand-in inside a plain value for an object that is not made, or for the class of such an object; None
    if there is none.

    Tensors, arrays and dtypes do not count, because `settle` replaces them; in sets and keys they do, because it does not.
    """
    seen: set[tuple[int, bool]] = set()
    todo = [(value, True)]
    while todo:
        item, is_reached = todo.pop()
        if isinstance(item, StandIn) and not (is_reached and item.is_settled):
            return item
        if isinstance(item, type) and issubclass(item, StandIn):
            return item
        if isinstance(item, Mapping):
            inside = [*((key, False) for key in item), *((inner, is_reached) for inner in item.values())]
        elif isinstance(item, (list, tuple)):
            inside = [(inner, is_reached) for inner in item]
        elif isinstance(item, (set, frozenset)):
            inside = [(inner, False) for inner in item]
        else:
            continue
        if (id(item), is_reached) not in seen:
            seen.add((id(item), is_reached))
            todo += inside
    return None


def settle(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """A plain value with its stand-ins replaced: stand-ins for arrays by NumPy arrays, for buffers by bytes, others by
    the result of `tensor`. Values that are shared stay shared."""
    made: dict[int, Any] = {}

    def visit(item: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise too_deep()
        if isinstance(item, (Array, BufferBytes, Dtype)):
            return item.value
        if not isinstance(item, (list, tuple, Mapping)):
            return tensor(item)
        if id(item) not in made:
            if isinstance(item, Mapping):
                made[id(item)] = _like(item, ((key, visit(inner, depth + 1)) for key, inner in item.items()))
            else:
                made[id(item)] = type(item)(visit(inner, depth + 1) for inner in item)
        return made[id(item)]

    return visit(value, 0)


def _like(table: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A table of the same class: a dict, an OrderedDict, or a Counter."""
    if isinstance(table, Counter):
        return Counter(dict(items))
    return OrderedDict(items) if isinstance(table, OrderedDict) else dict(items)


def texts(path: Iterable[Any]) -> tuple[str, ...]:
    """A path whose keys are all text."""
    return tuple(map(str, path))
