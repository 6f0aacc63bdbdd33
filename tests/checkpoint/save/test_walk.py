"""One walk over a state gives what torch's own flattening gives of it once its objects are replaced, in the same order."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from checkpoint_states import same
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from loaderkit.checkpoint.state import resolve
from loaderkit.errors import CheckpointError

Path = tuple[Any, ...]


class Holder:
    """An object whose state is `value`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.num_asked = 0

    def state_dict(self) -> Any:
        self.num_asked += 1
        return self.value

    def load_state_dict(self, value: Any) -> None:
        raise NotImplementedError


def drawn(rng: random.Random, depth: int, *, holds: bool = True) -> Any:
    """Any value; `holds`: objects may stand in it."""
    again: dict[str, Any] = {"depth": depth + 1, "holds": holds}
    size = rng.randrange(4)
    kinds: list[Callable[[], Any]] = [
        lambda: torch.full((size,), float(size)),
        rng.random,
        lambda: (1, torch.ones(1)),
        lambda: [1, "x"],
        lambda: Counter("abca"),
        lambda: {number: drawn(rng, **again) for number in range(size)},
        lambda: {f"k{number}": drawn(rng, **again) for number in range(size)},
        lambda: OrderedDict((f"o{number}", drawn(rng, **again)) for number in range(size)),
        lambda: [drawn(rng, **again) for _ in range(size)],
        lambda: tuple(drawn(rng, **again) for _ in range(size)),
        lambda: Holder(drawn(rng, depth + 1, holds=False)),
    ]
    return rng.choice(kinds[: 5 if depth > 3 else len(kinds) - (not holds)])()


def holders_in(value: Any) -> Iterator[Holder]:
    if isinstance(value, Holder):
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        yield from holders_in(item)


def by_hand(value: Any) -> Any:
    """The state with objects replaced, and tuples that hold objects as lists."""
    if isinstance(value, Holder):
        return value.value
    if isinstance(value, Mapping):
        return {key: by_hand(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and any(holders_in(value)):
        return [by_hand(item) for item in value]
    return value


def tables_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """The tables that have names: those in tuples are part of a plain value."""
    if isinstance(value, Mapping):
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from tables_in(item, (*path, key))


def test_a_walk_gives_what_torch_gives(rng: random.Random) -> None:
    for _ in range(200):
        state = {f"top{number}": drawn(rng, 0) for number in range(3)}
        nested = by_hand(state)
        values, paths = flatten_state_dict(nested)
        flat, containers, objects = resolve(state)
        assert [*flat.values] == [*values], "in the order in which they are written"
        assert all(
            same(flat.values[name], value) for name, value in values.items() if not isinstance(value, (list, tuple))
        )
        assert repr(flat.paths) == repr(paths)
        empty = {path for path, table in tables_in(nested) if not table}
        numbered = {path for path, table in tables_in(nested) if table and all(type(key) is int for key in table)}
        assert {path for path, one in containers.items() if one.numbered} == numbered
        assert empty <= containers.keys()
        assert len(objects) == len([*holders_in(state)])
        assert all(holder.num_asked == 1 for holder in holders_in(state))


@pytest.mark.parametrize("is_second_an_object", [False, True])
def test_an_object_and_a_value_of_one_name(is_second_an_object: bool) -> None:
    second: Any = Holder({"y": 2}) if is_second_an_object else 2
    with pytest.raises(CheckpointError, match=r"two values have the name 'a\.b'"):
        resolve({"a.b": Holder({"x": 1}), "a": {"b": second}})


@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("container", ["dict", "list", "list with a module", "tuple", "plain list"])
def test_a_state_that_holds_itself(container: str, has_optimizer: bool, rng: random.Random) -> None:
    model = torch.nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model}
    if has_optimizer:
        state["optimizer"] = torch.optim.SGD(model.parameters())
    around: Any = state
    for number in range(rng.randint(0, 3)):
        around[f"inner{number}"] = around = {}
    if container == "dict":
        around["again"] = around["twice"] = state
    else:
        items: list[Any] = [7] if container == "plain list" else [model if "module" in container else torch.ones(1)]
        items += [(items,), (items,)] if container == "tuple" else [items, items]
        around["items"] = items
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        resolve(state, "auto")
