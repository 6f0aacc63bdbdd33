"""The columns of a decoded row group: NumPy arrays over Arrow's memory, from which the values of rows are taken.

Numbers, also in lists, are a tree as in Arrow: `ListNode`s with their bounds, down to the `NumberNode` of all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.sources.arrow.row_groups import Column, StoredBytes, Taken

Rows = NDArray[np.int64]
_Valid = NDArray[np.bool_] | None
NULL = "is null"


class Node(Protocol):
    """A node of the tree: numbers, or lists of nodes, one after another."""

    def array(self, low: int, high: int) -> NDArray[Any]:
        """The items from `low` to `high` as one array [high - low, ...]. Raises ValueError for a null among them, and
        for lists of different lengths."""

    def valid(self) -> _Valid:
        """True for items that are not null and have no null in them: bool [n]; None if that is all of them."""

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""

    @property
    def or_else(self) -> str:
        """What else, besides nulls, the missing numbers may be, in words."""


@dataclass(frozen=True)
class NumberNode:
    values: NDArray[Any]  # [n]
    is_there: _Valid
    or_else: str = ""

    def array(self, low: int, high: int) -> NDArray[Any]:
        _refuse_nulls(self.is_there, low, high, self.or_else)
        return self.values[low:high]

    def valid(self) -> _Valid:
        return self.is_there

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + _num_bytes(self.is_there)


@dataclass(frozen=True)
class FixedListNode:
    """Lists of `size` items each."""

    num: int
    size: int
    items: Node
    is_there: _Valid

    def array(self, low: int, high: int) -> NDArray[Any]:
        _refuse_nulls(self.is_there, low, high)
        items = self.items.array(low * self.size, high * self.size)
        return items.reshape(high - low, self.size, *items.shape[1:])

    def valid(self) -> _Valid:
        items = self.items.valid()
        if items is None:
            return self.is_there
        inside: NDArray[np.bool_] = np.all(items.reshape(self.num, self.size), axis=1)
        return inside if self.is_there is None else inside & self.is_there

    @property
    def num_bytes(self) -> int:
        return self.items.num_bytes + _num_bytes(self.is_there)

    @property
    def or_else(self) -> str:
        return self.items.or_else


@dataclass(frozen=True)
class ListNode:
    """Lists that may differ in length: list i is of the items from bounds[i] to bounds[i + 1]."""

    bounds: NDArray[np.int64]  # [n + 1]
    items: Node
    is_there: _Valid

    def array(self, low: int, high: int) -> NDArray[Any]:
        _refuse_nulls(self.is_there, low, high)
        bounds = self.bounds[low : high + 1]
        items = self.items.array(int(bounds[0]), int(bounds[-1]))
        lengths = np.diff(bounds)
        if len(lengths) and (lengths != lengths[0]).any():
            raise ValueError(
                f"holds lists of {lengths.min()} to {lengths.max()} items in one row, which are no array: give them one length"
            )
        return items.reshape(high - low, int(lengths[0]) if len(lengths) else 0, *items.shape[1:])

    def valid(self) -> _Valid:
        return self.is_there

    @property
    def num_bytes(self) -> int:
        return self.bounds.nbytes + self.items.num_bytes + _num_bytes(self.is_there)

    @property
    def or_else(self) -> str:
        return self.items.or_else


def _num_bytes(is_there: _Valid) -> int:
    return 0 if is_there is None else is_there.nbytes


def _refuse_nulls(is_there: _Valid, low: int, high: int, or_else: str = "") -> None:
    if is_there is not None and not is_there[low:high].all():
        raise ValueError(f"has a null in a list{or_else}")


class FixedColumn:
    """Numbers, or arrays of one `shape`."""

    def __init__(self, node: Node, num_rows: int, shape: tuple[int, ...]) -> None:
        self._valid, self._or_else = node.valid(), node.or_else
        self._values = _without_nulls(node).array(0, num_rows).reshape(num_rows, *shape)
        self.num_bytes = self._values.nbytes + _num_bytes(self._valid)

    def take(self, rows: Rows) -> Taken:
        values = self._values[rows]
        if self._valid is None:
            return Taken(values, {})
        what = (NULL if values.ndim == 1 else f"{NULL}, or has a null in it") + self._or_else
        return Taken(values, dict.fromkeys(np.flatnonzero(~self._valid[rows]).tolist(), what))


def _without_nulls(node: Node) -> Node:
    """The same array, with other values in place of nulls."""
    if isinstance(node, FixedListNode):
        return FixedListNode(node.num, node.size, _without_nulls(node.items), None)
    assert isinstance(node, NumberNode)
    return NumberNode(node.values, None)


class ListColumn:
    """Lists of numbers that may differ in length: an array a row."""

    def __init__(self, node: Node, is_there: _Valid) -> None:
        self._node, self._is_there = node, is_there
        self.num_bytes = node.num_bytes  # with `is_there`

    def lengths(self) -> NDArray[np.int64] | None:
        """The length of the list in every row; None if a list is null, or has nulls in it."""
        node = self._node
        if not isinstance(node, ListNode) or node.items.valid() is not None or self._is_there is not None:
            return None
        return np.diff(node.bounds)

    def take(self, rows: Rows) -> Taken:
        values: list[Any] = [None] * len(rows)
        bad: dict[int, str] = {}
        node = self._node
        if (
            isinstance(node, ListNode)
            and isinstance(node.items, NumberNode)
            and self._is_there is node.items.is_there is None
        ):
            bounds = zip(node.bounds[rows].tolist(), node.bounds[rows + 1].tolist(), strict=True)
            return Taken([node.items.values[begin:end].copy() for begin, end in bounds], bad)
        for place, row in enumerate(rows.tolist()):
            if self._is_there is not None and not self._is_there[row]:
                bad[place] = NULL
                continue
            try:
                values[place] = self._node.array(row, row + 1)[0].copy()
            except ValueError as error:
                bad[place] = str(error)
        return Taken(values, bad)


class BytesColumn:
    """Bytes, as `StoredBytes`: `data[bounds[i] : bounds[i + 1]]`."""

    def __init__(self, data: memoryview, bounds: NDArray[np.int64], is_there: _Valid) -> None:
        self._data, self._bounds, self._is_there = data, bounds, is_there
        self.num_bytes = data.nbytes + bounds.nbytes + _num_bytes(is_there)

    def views(self, rows: Rows) -> list[memoryview | None]:
        """The bytes of some rows; None for a null."""
        ends = zip(self._bounds[rows].tolist(), self._bounds[rows + 1].tolist(), strict=True)
        views: list[memoryview | None] = [self._data[begin:end] for begin, end in ends]
        if self._is_there is not None:
            for place in np.flatnonzero(~self._is_there[rows]).tolist():
                views[place] = None
        return views

    def take(self, rows: Rows) -> Taken:
        views = self.views(rows)
        bad = {place: NULL for place, view in enumerate(views) if view is None}
        return Taken([None if view is None else StoredBytes(view, "") for view in views], bad)


class TextColumn:
    """Strings."""

    def __init__(self, encoded: BytesColumn) -> None:
        self._encoded = encoded
        self.num_bytes = encoded.num_bytes

    def take(self, rows: Rows) -> Taken:
        values: list[Any] = []
        bad: dict[int, str] = {}
        for place, view in enumerate(self._encoded.views(rows)):
            try:
                values.append(None if view is None else str(view, "utf-8"))
                if view is None:
                    bad[place] = NULL
            except UnicodeDecodeError as error:
                values.append(None)
                bad[place] = f"is no UTF-8 ({error})"
        return Taken(values, bad)


class FileColumn:
    """Files with their paths, as Hugging Face's datasets have images and audio: `StoredBytes` with the path's extension."""

    def __init__(self, contents: BytesColumn, paths: BytesColumn) -> None:
        self._contents, self._paths = contents, paths
        self.num_bytes = contents.num_bytes + paths.num_bytes

    def take(self, rows: Rows) -> Taken:
        values: list[Any] = []
        bad: dict[int, str] = {}
        pairs = zip(self._contents.views(rows), self._paths.views(rows), strict=True)
        for place, (view, path) in enumerate(pairs):
            name = "" if path is None else str(path, "utf-8", "replace").rpartition("/")[2]
            values.append(
                None if view is None else StoredBytes(view, name.rpartition(".")[2].lower() if "." in name else "")
            )
            if view is None:
                bad[place] = f"has no bytes, only the path {name!r}: embed the files" if path is not None else NULL
        return Taken(values, bad)


class ConstantColumn:
    """One value in every row, as the folder of a file says it: a text, or with `is_number` int64; None is null."""

    num_bytes = 8

    def __init__(self, value: int | str | None, *, is_number: bool) -> None:
        self._value, self._is_number = value, is_number

    def take(self, rows: Rows) -> Taken:
        bad = dict.fromkeys(range(len(rows)), NULL) if self._value is None else {}
        values = np.full(len(rows), self._value or 0, np.int64) if self._is_number else [self._value] * len(rows)
        return Taken(values, bad)


class NullColumn:
    """Nothing but nulls, where other files have values of a dtype and a `shape`, or with `dtype` "" no numbers."""

    num_bytes = 8

    def __init__(self, dtype: str, shape: tuple[int | None, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def take(self, rows: Rows) -> Taken:
        bad = dict.fromkeys(range(len(rows)), NULL)
        if not self._dtype or None in self._shape:
            return Taken([None] * len(rows), bad)
        return Taken(np.zeros((len(rows), *(length or 0 for length in self._shape)), self._dtype), bad)


class _JoinedBytes(BytesColumn):
    """The bytes of several columns, one behind another."""

    def __init__(self, parts: Sequence[BytesColumn]) -> None:
        self._parts = [part._data for part in parts]
        self._owners = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part._bounds) - 1 for part in parts])
        self._starts = np.concatenate([part._bounds[:-1] for part in parts])
        self._ends = np.concatenate([part._bounds[1:] for part in parts])
        self._is_there = _joined_valid([(part._is_there, len(part._bounds) - 1) for part in parts])
        self.num_bytes = self._owners.nbytes + self._starts.nbytes + self._ends.nbytes + _num_bytes(self._is_there)

    def views(self, rows: Rows) -> list[memoryview | None]:
        places = zip(self._owners[rows].tolist(), self._starts[rows].tolist(), self._ends[rows].tolist(), strict=True)
        parts = self._parts
        views: list[memoryview | None] = [parts[number][begin:end] for number, begin, end in places]
        if self._is_there is not None:
            for place in np.flatnonzero(~self._is_there[rows]).tolist():
                views[place] = None
        return views


def join(columns: Sequence[Column]) -> Column:
    """Joins columns of one kind: bytes stay where they are, numbers are copied."""
    if len(columns) == 1:
        return columns[0]
    first = columns[0]
    if isinstance(first, NullColumn):
        return first
    if isinstance(first, TextColumn):
        return TextColumn(_JoinedBytes([column._encoded for column in columns if isinstance(column, TextColumn)]))
    if isinstance(first, FileColumn):
        files = [column for column in columns if isinstance(column, FileColumn)]
        return FileColumn(_JoinedBytes([one._contents for one in files]), _JoinedBytes([one._paths for one in files]))
    if isinstance(first, BytesColumn):
        return _JoinedBytes([column for column in columns if isinstance(column, BytesColumn)])
    numbers = [column for column in columns if isinstance(column, FixedColumn)]
    valid = _joined_valid([(column._valid, len(column._values)) for column in numbers])
    or_else = max((column._or_else for column in numbers), key=len)
    node = NumberNode(np.concatenate([column._values for column in numbers]), valid, or_else)
    return FixedColumn(node, len(node.values), ())


def _joined_valid(parts: Sequence[tuple[_Valid, int]]) -> _Valid:
    if all(valid is None for valid, _ in parts):
        return None
    return np.concatenate([np.ones(num, np.bool_) if valid is None else valid for valid, num in parts])
