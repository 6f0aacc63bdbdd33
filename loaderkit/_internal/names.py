"""Imports objects by name: "package.module:name"."""

from __future__ import annotations

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
