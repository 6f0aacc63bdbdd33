"""Files of text: a class number, a text, JSON."""

from __future__ import annotations

import json
from typing import Any

_BOM = b"\xef\xbb\xbf"


def read_class(data: memoryview, *_: Any) -> int:
    """The number of a class. Raises ValueError."""
    try:
        return int(bytes(data).removeprefix(_BOM))
    except ValueError:
        raise ValueError(f"a class is a whole number, not {bytes(data[:64])!r} ({len(data)} bytes)") from None


def read_text(data: memoryview, *_: Any) -> str:
    """A text, without a byte order mark. Raises ValueError."""
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text is UTF-8, and these {len(data)} bytes are not: {error}") from None


def read_json(data: memoryview, *_: Any) -> Any:
    """The value that JSON describes. Raises ValueError."""
    try:
        return json.loads(bytes(data).removeprefix(_BOM))
    except (ValueError, RecursionError) as error:  # RecursionError for deeply nested lists
        raise ValueError(f"not JSON ({len(data)} bytes): {error}") from None
