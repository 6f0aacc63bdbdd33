"""Finds what a name in a config stands for: ours, what the program registered, or an entry point of an installed package.

    name ──> ours, by the dict given ──> `register`ed by the program ──> an entry point, which is imported now

Entry points are looked up, which takes 10 ms, only for a name that is not ours and for a list of all names.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

from loaderkit.errors import USER_ERRORS, ConfigError

T = TypeVar("T")
OURS = "loaderkit"
_NAME = re.compile(r"[A-Za-z][\w.+-]*")


class Entry(NamedTuple, Generic[T]):
    """What a name stands for, and where it comes from: "module:name" of the program, or "package version"."""

    item: T
    origin: str


class Registry(Mapping[str, T]):
    """Name -> what it stands for, of one group of entry points.

    A look-up raises KeyError for a name that neither loaderkit, the program nor a package has, and ConfigError if two of them
    claim it, if its package cannot be imported, or if that has something else under it.
    """

    def __init__(
        self, group: str, noun: str, expected: str, is_one: Callable[[Any], bool], ours: Mapping[str, T]
    ) -> None:
        """`group` is the group of the entry points, without "loaderkit.". In messages `noun` says what a name stands
        for, and `expected` what object that has to be."""
        self.group, self.noun = f"loaderkit.{group}", noun
        self._expected, self._is_one = expected, is_one
        self._entries: dict[str, Entry[T]] = {}  # ours, and what the program registered
        self._resolved: dict[str, Entry[T]] = {}  # names that are not ours, once all who may claim them were asked
        for name, item in ours.items():
            self._add(name, item, OURS)

    # ------------------------------------------------------------------------------------------------- looking up

    def __getitem__(self, name: str) -> T:
        return self.entry(name).item

    def entry(self, name: str) -> Entry[T]:
        """What the name stands for, and which program or package brought it; raises as a look-up does."""
        if self.is_ours(name):
            return self._entries[name]
        if (entry := self._resolved.get(name)) is None:
            entry = self._resolved[name] = self._claimed(name)
        return entry

    @property
    def ours(self) -> dict[str, T]:
        """What loaderkit brings."""
        return {name: entry.item for name, entry in self._entries.items() if entry.origin == OURS}

    def is_ours(self, name: str) -> bool:
        """True for a name that loaderkit brings."""
        entry = self._entries.get(name)
        return entry is not None and entry.origin == OURS

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._resolved or any(name == found.name for found in self._found())

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys(self._entries)
        yield from names
        yield from sorted({found.name for found in self._found()} - names.keys())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def check_unclaimed(self, name: str) -> None:
        """Raise ConfigError if a package claims a name of ours: a look-up of ours does not ask for packages."""
        self._claimed(name)

    def _claimed(self, name: str) -> Entry[T]:
        """The one entry of this name, after a look at all entries that may have it."""
        known = self._entries.get(name)
        found = {_package(point): point for point in self._found() if point.name == name}
        if known is None and not found:
            raise KeyError(name)
        if known is None and len(found) == 1:
            return self._import(name, *found.popitem())
        if known is not None and not found:
            return known
        if known is not None and known.origin != OURS and len(found) == 1:
            package, point = next(iter(found.items()))
            if self._import(name, package, point).item is known.item:  # it was registered by its package, too
                return known
        claims = [_said(known.origin)] if known is not None else []
        claims += [f"the package {package} ({point.value})" for package, point in sorted(found.items())]
        raise ConfigError(
            f"the {self.noun} {name!r} is claimed by {' and by '.join(claims)}: uninstall one of them, or have it renamed"
        )

    def _import(self, name: str, package: str, point: EntryPoint) -> Entry[T]:
        what = f"the {self.noun} {name!r} of the package {package} ({point.value})"
        try:
            item = point.load()
        except USER_ERRORS as error:
            raise ConfigError(
                f"{what} cannot be imported: {type(error).__name__}: {error}; mend that package, or uninstall it"
            ) from error
        if (problem := self._problem_of(name, item)) is not None:
            raise ConfigError(f"{what} {problem}")
        return Entry(item, package)

    def _found(self) -> list[EntryPoint]:
        """The entry points of installed packages, now: a notebook may just have installed one."""
        return list(_installed(self.group, tuple((place, _changed_ns(place)) for place in sys.path)))

    # ------------------------------------------------------------------------------------------------- registering

    def register(self, name: str, item: T) -> None:
        """Give a name a meaning in this process. The same thing, defined again, takes the place of the earlier one, as in a
        notebook. Raises ConfigError for a name that is taken, and for an object that is none of these."""
        origin = origin_of(item)
        known = self._entries.get(name)
        if known is not None and known.item is not item and known.origin != origin:
            raise ConfigError(
                f"the {self.noun} {name!r} is claimed by {_said(known.origin)} and by {_said(origin)}: choose another name"
            )
        self._add(name, item, origin)

    def _add(self, name: str, item: T, origin: str) -> None:
        if (problem := self._problem_of(name, item)) is not None:
            raise ConfigError(f"{name!r} ({origin}) {problem}")
        self._entries[name] = Entry(item, origin)
        self._resolved.pop(name, None)

    def _problem_of(self, name: str, item: Any) -> str | None:
        if not self._is_one(item):
            return f"is {_described(item)}, and has to be {self._expected}"
        if not _NAME.fullmatch(name):
            return (
                f"is no name for a {self.noun}: it begins with a letter, and has letters, digits, _, -, + and . in it"
            )
        return None

    # ------------------------------------------------------------------------------------------------- other processes

    def registered(self) -> dict[str, Entry[T]]:
        """What the program registered, for another process to `adopt`."""
        return {name: entry for name, entry in self._entries.items() if entry.origin != OURS}

    def adopt(self, entries: Mapping[str, Entry[T]]) -> None:
        """Take over what the process that sent this has registered."""
        self._entries |= entries
        self._resolved |= entries


@lru_cache(maxsize=8)
def _installed(group: str, places: tuple[tuple[str, int | None], ...]) -> EntryPoints:
    """The entry points of the packages in these folders, (folder, time of change); 200 packages take 10 ms to read."""
    return entry_points(group=group)


def _changed_ns(place: str) -> int | None:
    try:
        return os.stat(place or os.curdir).st_mtime_ns
    except OSError:
        return None  # nothing is there, or only a zip importer knows


def origin_of(item: Any) -> str:
    """The module and the name of a function, or of the arguments of a kind."""
    while isinstance(item, partial):
        item = item.func
    named = getattr(item, "args", item)
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}:{named.__qualname__}"


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _said(origin: str) -> str:
    return "loaderkit itself" if origin == OURS else f"this program ({origin})"


def _described(item: Any) -> str:
    if isinstance(item, (type, FunctionType)):
        return f"the {'class' if isinstance(item, type) else 'function'} {item.__qualname__}{_parameters(item)}"
    return f"a {type(item).__name__}"


def _parameters(item: Callable[..., Any]) -> str:
    try:
        found = inspect.signature(item, follow_wrapped=False)
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
        return str(inspect.Signature(bare))
    except Exception:  # what is built in tells none, and an annotation may be of a name that is not there
        return "(...)"
