"""Results go to stdout, everything else to stderr, so that a pipe gets the result alone."""

from __future__ import annotations

import json
import sys
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
