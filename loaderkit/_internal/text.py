"""Texts for the user: values from files in messages, and warnings."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from loaderkit.errors import printable

_NOT_THE_USERS = frozenset({"loaderkit", "threading", "concurrent", "contextlib"})


def short_repr(value: Any) -> str:
    """A short text for a value from a file. (`repr` of nested lists can fill all memory, and fails for a long number.)"""
    if isinstance(value, (str, bytes)):
        return repr(value[:100])
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**100):
        return repr(value)
    if isinstance(value, (list, tuple)) and len(value) <= 64 and all(type(item) in (int, str) for item in value):
        return f"[{', '.join(map(short_repr, value))}]"[:100]
    return f"a {type(value).__name__}"


def warn(text: str) -> None:
    """Warn, with the line of the caller's code that called this package; in a thread of the package's own, without a line."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(text), stacklevel=level)
