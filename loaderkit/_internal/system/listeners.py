"""Finds the process that listens on a port of this machine, for error messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"  # the state in /proc/net/tcp
_MOST_CHARACTERS = 200


def listener_of(port: int) -> str | None:
    """The process that listens on a TCP port, by its number and command; None if this process may not know."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or it has just ended
            if not sockets.isdisjoint(_open_in(folder / "fd")):
                command = (
                    (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
                )
                return f"process {folder.name} ({command[:_MOST_CHARACTERS]})"
    return None


def _open_in(folder: Path) -> Iterator[str]:
    for descriptor in os.listdir(folder):
        with suppress(OSError):  # it was closed meanwhile, as the descriptor of the listing itself is
            yield os.readlink(folder / descriptor)


def _listening(port: int) -> list[str]:
    """The inodes of the sockets that listen on a port."""
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.append(words[9])
    return inodes
