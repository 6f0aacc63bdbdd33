"""A decoded row group: its columns, and how the values of rows are taken from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


def _all_is_well() -> None:
    pass


class StoredBytes(NamedTuple):
    """The bytes of one field of a row, a view of its row group's memory, and the extension of the file they come from,
    or "" if that is not known."""

    data: memoryview
    extension: str


class Taken(NamedTuple):
    """One field of some rows: an array [rows, ...], or a list. `bad` says, by index among these rows, what is wrong
    with a row; the row's place in `values` then means nothing."""

    values: NDArray[Any] | list[Any]
    bad: dict[int, str]


class Column(Protocol):
    """One field of a row group."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""

    def take(self, rows: NDArray[np.int64]) -> Taken:
        """The values of these rows, int64 [n]: in memory of their own, except for `StoredBytes`."""


class RowGroup(NamedTuple):
    """A decoded row group: its fields, the memory it takes, and the bytes that were read for it. `check`, called before
    rows are taken, raises if its memory is no longer valid, as may happen where a file is mapped."""

    columns: Mapping[str, Column]
    memory_bytes: int
    read_bytes: int
    check: Callable[[], None] = _all_is_well
