"""Collects all errors of a config and raises them together, with file, line, key and the nearest right name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loaderkit.errors import ConfigError, Problem

KeyPath = tuple[str | int, ...]
_IN_YAML: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "true or false",
        "callable_type": "a function",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "string_type": "text",
        "tuple_type": "a list",
    }
)


class Problems:
    """Collects problems while a config is read, and knows the line of every key. `what` names the config if it is no file."""

    def __init__(self, file: Path | None, what: str = "the pipeline") -> None:
        self.file = file
        self._what = what
        self.lines: dict[KeyPath, int] = {}
        self.texts: dict[KeyPath, str] = {}  # texts of variables that were read as numbers
        self.problems: list[Problem] = []
        self._settled: set[KeyPath] = set()

    def error(self, path: KeyPath, message: str, *, line: int | None = None, settles: bool = False) -> None:
        """Add a problem. `settles`: later problems of this key are consequences and are dropped."""
        if path in self._settled:
            return
        if settles:
            self._settled.add(path)
        for length in range(len(path), 0, -1):
            line = line or self.lines.get(path[:length])
        self.problems.append(Problem(dotted(path), message, line))

    def raise_problems(self) -> None:
        if not self.problems:
            return
        where = str(self.file) if self.file is not None else self._what
        problems = sorted(dict.fromkeys(self.problems), key=lambda problem: problem.line or 0)
        texts = []
        for problem in problems:
            line = f"line {problem.line}: " if problem.line else ""
            key = f"{problem.where}: " if problem.where else ""
            texts.append(f"{line}{key}{problem.message}")
        message = (
            f"{where}: {texts[0]}" if len(texts) == 1 else f"{where}: {len(texts)} problems\n  " + "\n  ".join(texts)
        )
        raise ConfigError(message, tuple(problems))


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def say_expected(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """What pydantic expected where it raised an error of this `kind`, in YAML's terms instead of Python's."""
    if kind in ("too_short", "too_long"):
        what = "a mapping" if context["field_type"] == "Dictionary" else "a list"
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"{what} of {bound} items"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    return _IN_YAML.get(kind) or message.removeprefix("Value error, ").removeprefix("Input should be ")


def say_unmet(expected: Sequence[str], value: Any) -> str:
    """The message that `value` was not expected, with the nearest fixed value."""
    stated = " or ".join(expected)
    if ", not " in stated:
        return f"expected {stated}"
    fixed = re.findall(r"'([^']*)'", stated)
    near = _near(value, fixed) if isinstance(value, str) and len(fixed) > 1 else ""
    hint = f"; did you mean {near}?" if near else ""
    return f"expected {stated}, not {value!r}{hint}"


def nearest(name: str, known: Iterable[str]) -> str:
    """'did you mean ...?', or the list of known names."""
    names = list(known)
    near = _near(name, names)
    return f"did you mean {near}?" if near else f"expected one of {', '.join(names)}"


def _near(name: str, names: list[str]) -> str:
    """Up to three names that have all words of `name`, else the one spelled most like it; "" if there is none."""
    words = set(name.split("_"))
    fuller = [one for one in names if words <= {*one.split("_")}]
    near = difflib.get_close_matches(name, fuller, 3, 0) or difflib.get_close_matches(name, names, 1, 0.6)
    return " or ".join(repr(one) for one in near)
