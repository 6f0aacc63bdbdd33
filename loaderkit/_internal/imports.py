"""Imports objects by name: "package.module:name" in a config, and a package's public names on first use; waits for imports."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

from loaderkit._internal.garbage import collector_off
from loaderkit.errors import ConfigError

_importing: dict[tuple[int, str], str] = {}
"""(thread, module) of the imports by `import_named` that are under way -> what the module itself asks for meanwhile, or ""."""


def is_name(text: str) -> bool:
    """True if `text` has the form "package.module:name"."""
    return all(text.partition(":")[::2])


def import_named(name: str) -> Any:
    """The object of that name; the working directory is searched last, however the program was started. Raises
    ValueError, ImportError, AttributeError, and what importing the module raises."""
    # `python -m` looks there, a script and a console script do not; last, so that no file there hides an installed package.
    if "" not in sys.path and (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    module, _, path = name.partition(":")  # pkgutil.resolve_name refuses modules such as my-data.py
    importing = threading.get_ident(), module
    if importing in _importing:
        _importing[importing] = name
        return attrgetter(path)(import_module(module))
    _importing[importing] = ""
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        places = (
            f"neither in the working directory, {os.getcwd()}, nor elsewhere in sys.path, such as a script's own folder"
        )
        raise ModuleNotFoundError(f"{error}, {places}", name=error.name) from error
    finally:
        del _importing[importing]
    return attrgetter(path)(imported)


def check_not_importing() -> None:
    """Raise ConfigError in a module that is imported for its own pipeline: each process that loads would import it, begin here
    and start others."""
    thread = threading.get_ident()
    for (importing, module), asked in [*_importing.items()]:
        if asked and importing == thread:
            raise ConfigError(
                f"{module} is imported for {asked!r}, and iterates over the loader itself: put what runs there under "
                f'`if __name__ == "__main__":`, or {asked.partition(":")[2]} in a module of its own'
            )


def public_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: it imports the module of a name, which may import torch, and returns the object, or that
    module if it is what the name means."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collector_off():  # it takes two fifths of the time of such an import
            module = import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def when_imported(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `then` with a module right after it is executed, or at once if it has been executed already. Returns a
    function that undoes this.

    What the module's import raises, it raises; `then` may not import what imports this module.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return lambda: None
    finder = _OnceFinder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.stop


class _OnceFinder(MetaPathFinder):
    """Finds one module as all others do, and calls a function when it has been executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def stop(self) -> None:
        """Find nothing any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of that one module, by the other finders."""
        if name != self._name:
            return None
        self.stop()
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
