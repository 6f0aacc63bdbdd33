"""Writes text files atomically, and checks beforehand that they can be written."""

from __future__ import annotations

import io
import os
import re
import secrets
from pathlib import Path

from loaderkit._internal.temporary_files import create_temporary, remove_leftovers


def write_atomically(path: Path, text: str) -> None:
    """Create or replace a file: readers see the old text or the new one, even after a crash. Links and permissions are kept.
    Raises OSError naming `path`."""
    path = path.resolve()
    remove_leftovers(path.parent, re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp"))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with io.TextIOWrapper(io.BufferedWriter(create_temporary(temporary)), encoding="utf-8") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:  # of a full disk it names no file, else `temporary`
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def why_not_writable(path: Path) -> str | None:
    """Why `write_atomically` would fail, or None; found out by creating and removing a file beside it."""
    path = path.resolve()
    if path.is_dir():
        return f"{path} is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    return None
