"""Optimizers whose state a checkpoint does not have, as it was saved in a hurry, and the options that they had then.

    loaderkit.without.<digest>: [["optimizer", "[{\"lr\": 0.1, ...}]"], ...]     names, and JSON of the options by group

The moments come from an older checkpoint. The options, which a scheduler changes step by step, do not: a scheduler that
multiplies the learning rate it finds would go on from a wrong one for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from loaderkit.checkpoint.names import Leaf
from loaderkit.checkpoint.state import FlatState
from loaderkit.checkpoint.structure import WITHOUT
from loaderkit.errors import CheckpointError

_GROUPS, _PARAMS = "param_groups", ("params", "param_names")
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class LeftOut:
    """`options` of the groups of each optimizer by its name, as they were at the save; `saved`: their names in the
    checkpoint."""

    options: Mapping[str, Sequence[Mapping[str, Any]]]
    saved: tuple[str, ...] = ()

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names begin that are theirs."""
        return tuple(f"{name}." for name in self.options)

    def set_options(self, leaves: Mapping[str, Leaf]) -> None:
        """Give the optimizers, and tables of optimizers, among `leaves` the options of the save; none to one that has another
        number of groups."""
        for name, groups in self.options.items():
            here = _groups_at(name, leaves)
            if len(here) != len(groups):
                continue
            for group, options in zip(here, groups, strict=True):
                for key, value in options.items():
                    group[key] = _like(group.get(key), value)


def saved_left_out(names: Iterable[str], flat: FlatState) -> list[tuple[str, str]]:
    """What is saved of the optimizers of these names in a state."""
    return [(name, json.dumps(_options_in(name, flat))) for name in names]


def is_left_out(name: str) -> bool:
    """True for the name of a plain value that tells of optimizers that were left out."""
    return name.startswith(f"{WITHOUT}.")


def parsed_left_out(values: Iterable[Any], renamed: Callable[[str], str] = str) -> LeftOut:
    """What the plain values of a checkpoint tell; `renamed` gives the name here. Raises CheckpointError for what no writer
    writes."""
    options: dict[str, Sequence[Mapping[str, Any]]] = {}
    saved: list[str] = []
    try:
        for name, said in (item for value in values for item in value):
            groups = json.loads(said)
            if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
                raise ValueError(f"{said!r:.100}")
            options[renamed(f"{name}.").removesuffix(".")] = groups
            saved.append(name)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"what it says of the optimizers that it does not have is damaged: {error}") from None
    return LeftOut(options, tuple(saved))


def _options_in(name: str, flat: FlatState) -> list[dict[str, Any]]:
    """By group its options: plain values, and tensors of one element, such as a learning rate, as numbers."""
    groups: dict[int, dict[str, Any]] = {}
    for full, value in flat.values.items():
        if not full.startswith(f"{name}.{_GROUPS}."):
            continue
        index, *keys = _below(name, flat.paths[full])[1:]
        group = groups.setdefault(int(index), {})
        if len(keys) == 1 and keys[0] not in _PARAMS:
            found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if _is_plain(found):
                group[str(keys[0])] = found
    return [groups[index] for index in sorted(groups)]


def _below(name: str, path: Sequence[Any]) -> Sequence[Any]:
    """The keys of a path that follow those of `name`."""
    texts = [*accumulate(map(str, path), "{}.{}".format)]
    return path[texts.index(name) + 1 :]


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _groups_at(name: str, leaves: Mapping[str, Leaf]) -> list[Any]:
    """The groups of an optimizer, or of the table of one."""
    if name in leaves:
        return list(getattr(leaves[name].value, _GROUPS, ()))
    tables = {}
    for full, leaf in leaves.items():
        if full.startswith(f"{name}.{_GROUPS}.") and len(keys := _below(name, leaf.path)) == 3:
            tables[int(keys[1])] = leaf.container
    return [tables[index] for index in sorted(tables)]


def _like(current: Any, value: Any) -> Any:
    if isinstance(current, torch.Tensor) and not isinstance(value, (list, str)) and value is not None:
        return current.fill_(value) if not current.requires_grad else torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value
