"""Shows values from files in messages."""

from __future__ import annotations

from typing import Any


def short_repr(value: Any) -> str:
    """A short text for a value from a file. (`repr` of nested lists can fill all memory, and fails for a long number.)"""
    if isinstance(value, (str, bytes)):
        return repr(value[:100])
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**100):
        return repr(value)
    if isinstance(value, (list, tuple)) and len(value) <= 64 and all(type(item) in (int, str) for item in value):
        return f"[{', '.join(map(short_repr, value))}]"[:100]
    return f"a {type(value).__name__}"
