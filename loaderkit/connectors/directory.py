"""Lists the files below a directory in the order of their whole keys."""

from __future__ import annotations

import errno
import os
import re
import stat as stat_bits
from collections.abc import Callable, Iterator, Sequence

from loaderkit._internal.text import warn
from loaderkit.connectors.base import ObjectInfo, etag_of
from loaderkit.errors import ConnectorError, ObjectNotFoundError

OF_SYSTEMS = re.compile(r"(?:\A|/)(?:\.[^/]*|lost\+found)/\Z")
_Entry = tuple[str, os.DirEntry[str]]
_OpenDirectory = tuple[Iterator[_Entry], tuple[int, int]]


class Directory:
    """The directory `base`, which ends with a slash. `translate` turns an OSError about a key into the error to raise."""

    def __init__(self, base: str, translate: Callable[[str, OSError], ConnectorError]) -> None:
        self._base = base
        self._translate = translate

    def files(self, prefix: str) -> Iterator[ObjectInfo]:
        """All regular files whose key starts with `prefix`, ordered by the bytes of the whole key.

        Symbolic links are followed; a file that vanishes meanwhile is left out, and so are links that lead nowhere, with a
        warning at the end, and hidden folders and lost+found if they may not be read and `prefix` does not name them. Raises
        `ObjectNotFoundError` if the directory is missing, and what `translate` makes of an OSError.
        """
        # One entry for each open directory: its remaining entries, and its identity (against endless loops of links).
        identity = self._identity("")
        if identity is None:
            raise ObjectNotFoundError(
                f"there is no directory {self._base.rstrip('/') or '/'!r}; check the source's `url`"
            )
        lost: list[str] = []
        stack: list[_OpenDirectory] = [(iter(self._entries("", prefix)), identity)]
        while stack:
            entries, _ = stack[-1]
            for key, entry in entries:
                if not key.endswith("/"):
                    info = self._info_of(key, entry)
                    if info is not None:
                        yield info
                    elif not entry.name.startswith(".") and self._leads_nowhere(key):
                        lost.append(key)
                    continue
                identity = self._identity(key)
                if identity is not None and all(identity != above for _, above in stack):
                    stack.append((iter(self._entries(key, prefix)), identity))
                    break
            else:
                stack.pop()
        if lost:
            warn(
                f"below {self._base!r} links that lead nowhere are left out ({len(lost)}, such as {lost[0]!r}): was what "
                "they lead to moved, or is a disk not mounted?"
            )

    def _entries(self, directory: str, prefix: str) -> Sequence[_Entry]:
        """The entries of a directory that can match, in canonical order; a directory's key ends with "/"."""
        matching = []
        try:
            with os.scandir(self._base + directory) as entries:
                for entry in entries:
                    key = directory + entry.name
                    if _is_directory(entry):
                        key += "/"
                    if key.startswith(prefix) or (key.endswith("/") and prefix.startswith(key)):
                        matching.append((key, entry))
        except FileNotFoundError:
            return []  # removed since its parent was read
        except OSError as error:
            if isinstance(error, PermissionError) and OF_SYSTEMS.search(directory) and not prefix.startswith(directory):
                return []
            raise self._translate(directory, error) from error
        # "a-b/x" comes before "a/x": sorting directories with their slash walks in the order of whole keys.
        return sorted(matching, key=lambda pair: os.fsencode(pair[0]))

    def _identity(self, directory: str) -> tuple[int, int] | None:
        """Device and inode number of a directory; None if it is gone."""
        try:
            status = os.stat(self._base + directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            root = self._base.rstrip("/")
            if not directory and os.path.isfile(root):
                raise ObjectNotFoundError(
                    f"{root!r} is a file, and a directory is wanted here; of a source name the file's directory in `url`, and "
                    "the file in `include`"
                ) from error
            raise self._translate(directory, error) from error
        return status.st_dev, status.st_ino

    def _leads_nowhere(self, key: str) -> bool:
        path = self._base + key
        return os.path.lexists(path) and not os.path.exists(path)

    def _info_of(self, key: str, entry: os.DirEntry[str]) -> ObjectInfo | None:
        try:
            status = entry.stat()
        except FileNotFoundError:
            return None  # removed meanwhile, or a dangling link
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise self._translate(key, error) from error
        etag = etag_of(status.st_mtime_ns, status.st_size)
        return ObjectInfo(key, status.st_size, etag) if stat_bits.S_ISREG(status.st_mode) else None


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a directory without permission: reading it raises the error
        return False
