"""Classes by folders: decides which folder of a key is the class, and what looks wrong in a set of such folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unicodedata import normalize

from loaderkit.errors import SourceError
from loaderkit.sources.base import shortened
from loaderkit.sources.patterns import is_hidden, said_of_form

_MOST_SIBLINGS, _MOST_NAMED = 16, 5


class ClassFolders:
    """Numbers the folders of files, `top` (the first of a key) or the last one; the classes `given` keep their numbers.

    The same last folder under several parents would make one class of all of them. That is an error, unless the classes are
    given.
    """

    def __init__(self, given: dict[str, int], *, top: bool, is_given: bool) -> None:
        self.numbers = dict(given)
        self._paths: dict[str, str] = {}  # class -> the first folder that it was found in
        self._top = top
        self._is_given = is_given
        self._last = ("", -1)  # the newest folder and its number: files come folder by folder

    def number_of(self, key: str, describe: Callable[[str], str], url: str) -> int:
        """The number of a file's folder: its class if given, else counted in order of first use. Raises SourceError."""
        path = key.rpartition("/")[0]
        if path and path == self._last[0]:
            return self._last[1]
        name = path.partition("/")[0] if self._top else path.rpartition("/")[2]
        if not name:
            raise SourceError(
                f"{describe(key)} lies in no folder below {url!r}, so `label: {'top' if self._top else 'parent'}` gives it no "
                "class; move it, narrow `include`, or use `label: none`"
            )
        if self._is_given and name not in self.numbers:
            raise SourceError(
                f"{describe(key)} lies in the folder {name!r}, which is none of `classes` ({shortened(list(self.numbers))})"
                f"{said_of_form(name, self.numbers)}: add it there, or narrow `include`"
            )
        first = self._paths.setdefault(name, path)
        if first != path and not self._top and not self._is_given:
            raise SourceError(
                f"folders called {name!r} lie in several folders ({first!r} and {path!r}), and `label: parent` would make them "
                "one class: `label: top` takes the first folder of a path as the class; if they are one class, name all in "
                "`classes`"
            )
        number = self.numbers.setdefault(name, len(self.numbers))
        self._last = path, number
        return number


def oddities(root: str, classes: Sequence[str]) -> Iterator[str]:
    """What looks odd in the classes that were found below `root`, in sentences."""
    if all(name.isdecimal() for name in classes) and sorted(classes, key=int) != list(classes):
        by_number = ", ".join(f"{name!r} is class {number}" for number, name in enumerate(classes[:3]))
        yield f"the folders are numbers that are sorted as text ({by_number}): `classes` says another order"
    by_name: dict[str, str] = {}
    for name in classes:
        if said := said_of_form(name, [by_name.setdefault(normalize("NFC", name), name)]):
            yield f"two folders, and so two classes, have one name{said}"
    folder = _local(root)
    if folder is not None and (empty := sorted(_folders_in(folder) - {*classes})):
        more = f" and {len(empty) - _MOST_NAMED} more" if len(empty) > _MOST_NAMED else ""
        yield f"these folders have no sample, and are no classes: {', '.join(empty[:_MOST_NAMED])}{more}"


def shifted(root: str, classes: Sequence[str]) -> str | None:
    """What to say if class folders beside `root`, such as a validation set's, give the same classes other numbers; else
    None."""
    folder = _local(root)
    if folder is None:
        return None
    numbers = {name: number for number, name in enumerate(classes)}
    for sibling in sorted(_folders_in(folder.parent) - {folder.name})[:_MOST_SIBLINGS]:
        beside = folder.parent / sibling
        others = sorted(name for name in _folders_in(beside) if _has_entry(beside / name))
        shared = [name for name in others if name in numbers]
        if 2 * len(shared) < min(len(classes), len(others)):
            continue
        for name in shared:
            if numbers[name] != others.index(name):
                only = {"here": {*classes} - {*others}, "there": {*others} - {*classes}}
                alone = [f"only {where}: {shortened(sorted(names))}" for where, names in only.items() if names]
                return (
                    f"the class {name!r} is {numbers[name]} in {str(folder)!r} and {others.index(name)} in {str(beside)!r}, as "
                    f"their folders differ ({'; '.join(alone)}): give both the same `classes`"
                )
    return None


def _local(root: str) -> Path | None:
    scheme, separator, path = root.rpartition("://")
    return Path(os.path.abspath(path)) if not separator or scheme == "file" else None


def _folders_in(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_dir() and not is_hidden(f"{entry.name}/")}
    except OSError:
        return set()


def _has_entry(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(not is_hidden(entry.name) for entry in entries)
    except OSError:
        return False
