"""Results go to stdout and everything else to stderr, so that a pipe gets the result alone. Names from data may hold
any text: here none of it is markup, or a command to the terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from loaderkit.errors import printable
from loaderkit.profile.render.summary import PlainConsole


class Interrupted(Exception):  # noqa: N818 - not an error of anyone's
    """Ctrl-C ended the work in an orderly way; the message says how far it had come."""


def stdout() -> Console:
    """For results."""
    return PlainConsole(soft_wrap=False)


def stderr() -> Console:
    """For progress."""
    return PlainConsole(stderr=True)


def say(message: str) -> None:
    """One line on stderr, never wrapped."""
    if sys.stderr is not None:  # it may be closed
        sys.stderr.write(f"{printable(message)}\n")
        sys.stderr.flush()


def tell(message: str = "") -> None:
    """One line of the result on stdout, never wrapped."""
    sys.stdout.write(f"{printable(message)}\n")


def tell_json(document: Any) -> None:
    """The result as the one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
