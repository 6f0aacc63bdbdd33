"""Everything wrong with a description, collected and raised together, with file, line, key and the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from loaderkit.errors import ConfigError, Problem

KeyPath = tuple[str | int, ...]


class Problems:
    """Collects problems while a description is read; knows the line of every key."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.lines: dict[KeyPath, int] = {}
        self.texts: dict[KeyPath, str] = {}  # what stood in variables, before it was taken for a number
        self.problems: list[Problem] = []
        self._settled: set[KeyPath] = set()

    def complain(self, path: KeyPath, message: str, *, line: int | None = None, settles: bool = False) -> None:
        """Note a problem. `settles`: what is said of this key later would only be a consequence, and is left out."""
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
        where = str(self.file) if self.file is not None else "the pipeline"
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


def nearest(name: str, known: Iterable[str]) -> str:
    """', did you mean ...?' or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1, 0.6)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
