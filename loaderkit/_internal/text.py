"""Values of files as text for messages."""

from __future__ import annotations

from typing import Any


def short_repr(value: Any) -> str:
    """A value from a file, for a message: short whatever it is. (`repr` of a few lists within lists can fill all memory, and
    of a long number it fails.)"""
    if isinstance(value, (str, bytes)):
        return repr(value[:100])
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**100):
        return repr(value)
    if isinstance(value, (list, tuple)) and len(value) <= 64 and all(type(item) in (int, str) for item in value):
        return f"[{', '.join(map(short_repr, value))}]"[:100]
    return f"a {type(value).__name__}"
