"""`loaderkit index` for files whose samples lie one behind another: lines (.offsets) and TFRecords (.idx, as DALI's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.errors import FormatError

if TYPE_CHECKING:
    from loaderkit.connectors.base import Connector, ObjectInfo

_LINES = (".jsonl", ".ndjson", ".json", ".txt")


class Indexed(NamedTuple):
    """What is found in a file: the content of its index, the number of samples and of all lines or records, and whether
    the index beside it says the same (None if there is no index)."""

    data: bytes
    num_samples: int
    num_items: int
    is_right: Callable[[], bool | None]


def has_lines(key: str) -> bool:
    """True if a file's name says that it holds lines."""
    return key.lower().endswith(_LINES)


def has_records(key: str) -> bool:
    """True if a file's name says that it holds TFRecords."""
    return ".tfrec" in key.lower().rpartition("/")[2]


def index_key(key: str) -> str | None:
    """The key of a file's index; None if the file holds neither lines nor records."""
    from loaderkit.sources.serial.offsets_file import key_beside
    from loaderkit.sources.serial.records import keys_beside

    return key_beside(key) if has_lines(key) else keys_beside(key)[0] if has_records(key) else None


def indexed(connector: Connector, info: ObjectInfo) -> Indexed:
    """Read a file through. Raises LoaderkitError."""
    return _lines(connector, info) if has_lines(info.key) else _records(connector, info)


def _lines(connector: Connector, info: ObjectInfo) -> Indexed:
    """Of JSON lines, blank ones are no samples."""
    from loaderkit.sources.serial.offsets import parse
    from loaderkit.sources.serial.offsets_file import read_index, write_index
    from loaderkit.sources.serial.scan import find_lines

    data = write_index(connector, info, find_lines(connector, info))
    found = parse(data, info)

    def is_right() -> bool | None:
        offsets = read_index(connector, info)
        return None if offsets is None else offsets.digest == found.digest

    num_lines = len(found.starts) - 1
    num_blanks = 0 if info.key.lower().endswith(".txt") else len(found.blanks)
    return Indexed(data, num_lines - num_blanks, num_lines, _unless_damaged(is_right))


def _records(connector: Connector, info: ObjectInfo) -> Indexed:
    import numpy as np

    from loaderkit.sources.serial.records import read_idx, scan_records, write_idx

    starts = np.concatenate([part for part, _ in scan_records(connector, info)])

    def is_right() -> bool | None:
        found = read_idx(connector, info)
        return None if found is None else np.array_equal(found, starts)

    return Indexed(write_idx(starts), len(starts) - 1, len(starts) - 1, _unless_damaged(is_right))


def _unless_damaged(is_right: Callable[[], bool | None]) -> Callable[[], bool | None]:
    def call() -> bool | None:
        try:
            return is_right()
        except FormatError:
            return False

    return call
