"""Absolute paths that lead where the system would go."""

from __future__ import annotations

import os
from pathlib import Path


def absolute_path(path: str | Path) -> str:
    """The path made absolute, without ".." and empty parts.

    Behind a link to a directory ".." is the parent of what the link leads to; then the links are resolved, too.
    """
    plain = os.path.abspath(path)
    if ".." not in os.fspath(path).split("/") or os.path.realpath(plain) == (real := os.path.realpath(path)):
        return plain
    return real
