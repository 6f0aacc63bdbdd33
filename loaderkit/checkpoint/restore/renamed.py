"""The names of a checkpoint as the state here has them: `rename={"module.": ""}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.names import Path, texts
from loaderkit.checkpoint.structure import Structure, is_inner
from loaderkit.errors import CheckpointError, ConfigError

_GROUPS, _STATE, _PARAMS = ".param_groups.", ".state.", ".params"


class Renaming:
    """How names begin in a checkpoint, and how they begin here. If several beginnings fit a name, the longest is
    replaced, once.

    A `*` stands for one part of a name, between dots, and is carried over: {"blocks.*.mlp.": "layers.*.ffn."}.
    """

    def __init__(self, rename: Mapping[str, str]) -> None:
        """Raises ConfigError."""
        if not isinstance(rename, Mapping) or not all(type(a) is str and type(b) is str for a, b in rename.items()):
            raise ConfigError(f"rename: expected how names begin in the checkpoint and here, not {rename!r}")
        for begin, here in rename.items():
            if here.count("*") not in (0, begin.count("*")):
                raise ConfigError(f"rename: {here!r} needs as many '*' as {begin!r}, or none")
        self._rules = [(begin, re.compile(_pattern(begin)), rename[begin]) for begin in sorted(rename, key=_longest)]
        self._used: set[str] = set()
        self._groups: dict[str, str] = {}  # the names of an optimizer's lists of parameters: here -> in the checkpoint

    def name(self, name: str) -> str:
        """The name here."""
        for begin, pattern, here in self._rules:
            if match := pattern.match(name):
                self._used.add(begin)
                return _filled(here, match) + name[match.end() :]
        return name

    def matches(self, names: Iterable[str]) -> bool:
        """True if any of these names begins as one of the beginnings."""
        return any(pattern.match(name) for name in names if not is_inner(name) for _, pattern, _ in self._rules)

    def path(self, path: Path) -> Path:
        """The path here. The keys of the old beginning are replaced by keys of the new one; what is left of the new
        beginning goes in front of the next key."""
        return self._path(path, ".".join(texts(path)))

    def container(self, path: Path) -> Path:
        """The path here of a container, which has the names that begin with it and a dot."""
        return self._path(path, ".".join((*texts(path), "")))

    def _path(self, path: Path, name: str) -> Path:
        for _, pattern, here in self._rules:
            match = pattern.match(name)
            if match is None:
                continue
            size, at = 0, 0
            while size < len(path) and at + len(str(path[size])) + 1 <= match.end():
                at += len(str(path[size])) + 1
                size += 1
            numbers = {str(key): key for key in path[:size] if type(key) is not str}
            *parts, last = _filled(here, match).split(".", size)
            keys = [numbers.get(part, part) for part in parts]  # a number that is carried over stays one
            rest, cut = path[size:], match.end() - at
            if not rest:  # a container, whose keys get what is left of the new beginning
                return tuple(keys)
            return (*keys, last + str(rest[0])[cut:], *rest[1:]) if last or cut else (*keys, *rest)
        return path

    def value(self, name: str, value: Any) -> Any:
        """A plain value by its name here: an optimizer's list of parameters by names has those that their states have here."""
        there = self._groups.get(name)
        if there is None or not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return value
        before, here = (f"{full.rpartition(_GROUPS)[0]}{_STATE}" for full in (there, name))
        states = [self.name(f"{before}{item}.") for item in value]
        return [
            state[len(here) : -1] if state.startswith(here) and state.endswith(".") else item
            for state, item in zip(states, value, strict=True)
        ]

    def renamed(self, contents: Checkpoint) -> Checkpoint:
        """The contents by their names here. Raises CheckpointError for two of one name, and for a beginning that none has."""
        names: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in (*contents.tensors, *contents.values, *contents.pickled):
            names[name] = here = name if is_inner(name) else self.name(name)
            if name.endswith(_PARAMS) and _GROUPS in name and _GROUPS in here:
                self._groups[here] = name
            if (other := taken.setdefault(here, name)) != name:
                raise CheckpointError(f"{contents.name}: rename gives {other!r} and {name!r} the same name, {here!r}")
        for begin, _, _ in self._rules:
            if begin not in self._used:
                near = get_close_matches(begin, {name[: len(begin)] for name in names}, 1) or [*names][:1]
                raise CheckpointError(
                    f"{contents.name} has no name that begins with {begin!r}, which rename gives"
                    + (f"; there is {near[0]!r}" if near else "")
                )
        return replace(
            contents,
            tensors={names[name]: entry for name, entry in contents.tensors.items()},
            values={names[name]: value for name, value in contents.values.items()},
            pickled={names[name]: where for name, where in contents.pickled.items()},
            paths={names[name]: self._path_of(name, path) for name, path in contents.paths.items() if name in names},
            containers={},
        )

    def _path_of(self, name: str, path: Path) -> Path:
        return path if is_inner(name) else self.path(path)

    def structure(self, structure: Structure) -> Structure:
        """The containers by their paths here. A container whose new path is another one's only gives its versions, if
        the other has none."""
        containers = {path: one for path, one in structure.containers.items() if self.container(path) == path}
        for path, one in structure.containers.items():
            here = self.container(path)
            if here != path:
                known = containers.get(here)
                versions = one.versions if known is None or known.versions is None else known.versions
                containers[here] = one if known is None else known._replace(versions=versions)
        return replace(structure, containers=containers, numbered=frozenset(map(self.name, structure.numbered)))


def _longest(begin: str) -> int:
    return -len(begin)


def _pattern(begin: str) -> str:
    return r"([^.]+)".join(map(re.escape, begin.split("*")))


def _filled(here: str, match: re.Match[str]) -> str:
    parts = here.split("*")
    return parts[0] + "".join(found + part for found, part in zip(match.groups(), parts[1:], strict=False))
