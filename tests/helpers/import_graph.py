"""What each module of a package imports, wherever in it the import stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def import_graph(package: Path) -> dict[str, set[str]]:
    """Of each module the modules of the package that it imports: at module level, in functions and under TYPE_CHECKING.

    A package that an import runs on the way to a module in it does not count, or every module would import `package`.
    """
    files = {_name(file, package): file for file in package.rglob("*.py")}
    return {name: set(_imported(file, name, files)) - {name} for name, file in files.items()}


def _name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, name: str, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            start = _start(node, name, file)
            for alias in node.names:
                yield from [of for of in (f"{start}.{alias.name}", start) if of in modules][:1]


def _start(node: ast.ImportFrom, name: str, file: Path) -> str:
    """The absolute name of what `from` names, which dots may count from the module's package."""
    if not node.level:
        return str(node.module)
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
