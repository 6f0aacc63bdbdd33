"""Results go to stdout, everything else to stderr, so that a pipe gets the result alone."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from rich.console import Console


class Interrupted(Exception):  # noqa: N818 - not an error of anyone's
    """Ctrl-C came, and was dealt with; the message says how far the work had got."""


def stdout() -> Console:
    """For results. Names in brackets are names, not markup."""
    return Console(markup=False, highlight=False, soft_wrap=False)


def stderr() -> Console:
    """For progress."""
    return Console(stderr=True, markup=False, highlight=False)


def say(message: str) -> None:
    """One line on stderr, never wrapped."""
    if sys.stderr is not None:  # it may be closed
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def tell(message: str = "") -> None:
    """One line of the result on stdout, never wrapped."""
    sys.stdout.write(f"{message}\n")


def tell_json(document: Any) -> None:
    """The result as the one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Create or replace a file: whoever reads it sees the old text or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
