"""Reads the short files in which the kernel shows its counters."""

from __future__ import annotations

import io

_MAX_BYTES = 2**16  # a user in hundreds of groups has a long /proc/self/status


def content(path: str) -> bytes:
    """A short file of the kernel, read without the layers of `open`; empty if there is no such file, or no descriptor left."""
    try:
        with io.FileIO(path) as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""


def numbers_of(content: bytes) -> dict[bytes, int]:
    """The numbers of a file that has a name and a number in each line."""
    split = (line.replace(b":", b" ").split() for line in content.splitlines())
    return {name: int(value) for name, value in (words for words in split if len(words) == 2) if value.isdigit()}
