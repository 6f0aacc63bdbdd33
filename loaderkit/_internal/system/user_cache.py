"""The user's cache directory, which keeps what was found out about files, so that it is found out once."""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import IO

from loaderkit._internal.temporary_files import create_temporary, remove_leftovers
from loaderkit.errors import LoaderkitError

_TEMPORARY_NAME = re.compile(r".+\.[0-9a-f]{16}\.tmp", re.DOTALL)


def default_cache_dir() -> Path:
    """$LOADERKIT_CACHE_DIR, or `loaderkit` in $XDG_CACHE_HOME, or ~/.cache/loaderkit."""
    configured = os.environ.get("LOADERKIT_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loaderkit"


def path_in_cache(cache_dir: Path, folder: str, what: str, extension: str) -> Path:
    """The path for what is kept about `what`, such as the full name of an object."""
    return (
        Path(cache_dir)
        / folder
        / (blake2b(what.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest() + extension)
    )


def keep(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Create or replace a file by what `write` writes, whole or not at all. False if this machine's disk does not take it, as
    when it is full: that only costs time at the next start. Raises the other errors of `write`, such as errors of a store."""
    try:
        replace_file(path, write)
    except LoaderkitError:
        raise
    except OSError:
        return False
    return True


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """`keep`, but raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with io.BufferedWriter(create_temporary(temporary)) as file:
            write(file)
            file.flush()
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # on a disk that has become read-only
            temporary.unlink(missing_ok=True)


@cache  # a folder may hold an index for each of many thousand files: it is looked through once
def _remove_leftovers(folder: Path) -> None:
    remove_leftovers(folder, _TEMPORARY_NAME)
