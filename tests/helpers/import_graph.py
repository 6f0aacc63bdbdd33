"""What each module of a package imports, wherever in it the import stands, and a circle among these imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def import_graph(package: Path) -> dict[str, set[str]]:
    """The modules of the package that each module imports: at module level, in functions, under TYPE_CHECKING, and by a name
    that stands there as text ("package.module" or "package.module:name").

    An import of a module also runs the packages around it. These do not count, or every module would import `package`.
    """
    files = {_name(file, package): file for file in package.rglob("*.py")}
    return {name: set(_imported(file, name, files.keys())) - {name} for name, file in files.items()}


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Modules each of which imports the next one, and the last one the first; none if imports make no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1][:0:-1]  # it begins and ends with the same one, each imported by the next
        return modules
    return []


def _name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, name: str, modules: Set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from modules & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = _start(node, name, file)
            for alias in node.names:
                yield from [found for found in (f"{start}.{alias.name}", start) if found in modules][:1]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value.partition(":")[0]
            if "." in named and named in modules:  # the package's name alone is that of its logger
                yield named


def _start(node: ast.ImportFrom, name: str, file: Path) -> str:
    """The absolute name of what `from` names, whose dots count from the module's package."""
    if not node.level:
        return str(node.module)
    parts = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
