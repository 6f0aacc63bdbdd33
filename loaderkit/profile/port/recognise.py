"""Recognises an object, and where it was written, by its class's module and name: nothing is imported, and no text is
run as code."""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = ("site-packages", "dist-packages")
_MAIN = ("__main__", "__mp_main__")


class CannotPort(Exception):  # noqa: N818 - an answer, not an error of anyone's
    """loaderkit has nothing that does the same as `subject`; the message says why."""

    def __init__(self, subject: Any, why: str) -> None:
        super().__init__(why)
        self.subject = subject


def class_of(value: Any) -> str:
    """The class of an object, as in "torchvision.transforms.v2._geometry.Resize"."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_of_torchvision(value: Any, place: str) -> str | None:
    """The name of an object's class if that is torchvision's own, below `torchvision.PLACE`; None for a subclass."""
    kind = type(value)
    return kind.__name__ if f"{kind.__module__}.".startswith(f"torchvision.{place}.") else None


def name_of_function(function: Any) -> str:
    """As in "torch.utils.data._utils.collate.default_collate"; for an object, the name of its class."""
    if hasattr(function, "__qualname__"):
        return f"{getattr(function, '__module__', '')}.{function.__qualname__}"
    return class_of(function)


def describe(value: Any) -> str:
    """A function by its name, another object by its class; without the module of a script."""
    if isinstance(value, partial):
        return f"a partial of {describe(value.func)}"
    name = name_of_function(value)
    for main in _MAIN:
        name = name.removeprefix(f"{main}.")
    return name


def where(value: Any) -> str:
    """File and line of a function or class of the user's own, as in "train.py:12"; of a library's its module."""
    found = value.func if isinstance(value, partial) else value
    found = found if inspect.isroutine(found) or isinstance(found, type) else type(found)
    module = getattr(found, "__module__", None) or "builtins"
    with suppress(OSError, TypeError):
        file = inspect.getsourcefile(found)
        is_own = file is not None and not any(part in file for part in _PACKAGES) and not _is_standard(module)
        if file is not None and is_own:
            code = getattr(found, "__code__", None)
            line = code.co_firstlineno if code is not None else inspect.findsource(found)[1] + 1
            return f"{Path(file).name}:{line}"
    return module


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names and module not in _MAIN


def reference_to(value: Any) -> str | None:
    """ "module:attribute" of an object that is an attribute of a module which can be imported again; None if there is none."""
    found = [
        f"{name}:{attribute}"
        for name, module in list(sys.modules.items())
        if name not in _MAIN and isinstance(module, ModuleType) and getattr(module, "__spec__", None) is not None
        for attribute, one in list(vars(module).items())
        if one is value and not attribute.startswith("__")
    ]
    return min(found, key=lambda name: (name.count("."), len(name), name), default=None)


def name_in_script(value: Any) -> str | None:
    """The name of the script's own variable that holds an object; None if none does."""
    script = sys.modules.get("__main__")
    return next((name for name, one in list(vars(script).items()) if one is value), None) if script else None


def folder_of_module(reference: str) -> str | None:
    """The folder that must be on Python's path for a reference, unless that is where packages are installed."""
    module = sys.modules[reference.partition(":")[0]]
    file = getattr(module, "__file__", None)
    if file is None or any(part in file for part in _PACKAGES):
        return None
    folder = Path(file).absolute().parent
    num_packages = module.__name__.count(".") + (Path(file).name == "__init__.py")
    return os.fspath(folder.parents[num_packages - 1] if num_packages else folder)
