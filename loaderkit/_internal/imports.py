"""Imports objects by name: "package.module:name" in a config, and a package's public names on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any


def is_name(text: str) -> bool:
    """True if `text` has the form "package.module:name"."""
    return all(text.partition(":")[::2])


def import_named(name: str) -> Any:
    """The object of that name. Raises ValueError, ImportError, AttributeError, and what importing the module raises."""
    module, _, path = name.partition(":")  # pkgutil.resolve_name refuses modules such as my-data.py
    return attrgetter(path)(import_module(module))


def public_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: it imports the module of a name, which may import torch, and returns the object."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
