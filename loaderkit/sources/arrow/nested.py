"""Columns of structs, and of lists of texts, pictures or structs, as values of Python.

A struct is a dict, a list a list, a picture its bytes; numbers and texts are Python's, and a null inside is None. So a chat is
a list of {role: ..., content: ...}. Texts of JSON, where features say so, are what they hold.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from loaderkit.sources.arrow.buffers import node_of, plain, there
from loaderkit.sources.arrow.columns import NULL, NumberNode, Rows
from loaderkit.sources.arrow.features import parsed
from loaderkit.sources.arrow.row_groups import Taken
from loaderkit.sources.arrow.types import arrow_errors, is_file


class NestedColumn:
    """Rows of an Arrow array, made when they are taken."""

    def __init__(self, pa: Any, array: Any, json: Any = None) -> None:
        stored = _without_views(pa, array.type)  # which pyarrow does not take rows from
        self._pa, self._array = pa, array if stored.equals(array.type) else array.cast(stored)
        self._json = json
        self.num_bytes: int = self._array.nbytes

    def take(self, rows: Rows) -> Taken:
        try:
            values = self._values(rows)
        except arrow_errors():
            values, bad = [], dict[int, str]()
            for place in range(len(rows)):
                try:
                    values += self._values(rows[place : place + 1])
                except arrow_errors() as error:
                    values.append(None)
                    bad[place] = f"cannot be read: {error}"
            return Taken(values, bad | _nulls(values, bad))
        return Taken(values, _nulls(values, {}))

    def _values(self, rows: Rows) -> list[Any]:
        values = values_of(self._pa, self._array.take(self._pa.array(rows)))
        return values if self._json is None else [parsed(self._json, value) for value in values]


def _nulls(values: list[Any], bad: dict[int, str]) -> dict[int, str]:
    return {place: NULL for place, value in enumerate(values) if value is None and place not in bad}


def values_of(pa: Any, array: Any) -> list[Any]:
    """The items of an array as values of Python. Raises ValueError, and what pyarrow raises."""
    array = plain(pa, array)
    types, kind = pa.types, array.type
    if types.is_struct(kind):
        children = [values_of(pa, child) for child in array.flatten()]
        names = [field.name for field in kind]
        if is_file(pa, kind):
            return list(children[names.index("bytes")])
        values: list[Any] = [dict(zip(names, row, strict=True)) for row in zip(*children, strict=True)]
    elif types.is_fixed_size_list(kind):
        size = kind.list_size
        items = values_of(pa, array.values.slice(array.offset * size, len(array) * size))
        values = [items[number * size : (number + 1) * size] for number in range(len(array))]
    elif types.is_list(kind) or types.is_large_list(kind):
        bounds = array.offsets.to_pylist()
        first = bounds[0] if bounds else 0
        items = values_of(pa, array.values.slice(first, bounds[-1] - first)) if bounds else []
        values = [items[begin - first : end - first] for begin, end in pairwise(bounds)]
    elif (node := None if _is_encoded(pa, kind) else node_of(pa, array)) is not None:
        assert isinstance(node, NumberNode)
        if node.or_else and node.is_there is not None and int((~node.is_there).sum()) > array.null_count:
            raise ValueError(node.or_else.removeprefix(", or "))
        values = node.values.tolist()
    else:
        return list(array.to_pylist())
    if (is_there := there(array)) is not None:
        return [value if here else None for value, here in zip(values, is_there.tolist(), strict=True)]
    return values


def _without_views(pa: Any, kind: Any) -> Any:
    """The type with large texts and bytes in place of views; a type without views is unchanged."""
    types = pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pa.large_string() if types.is_string_view(kind) else pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(pa, field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(pa, kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_views(pa, kind.value_type)))
    return kind


def _is_encoded(pa: Any, kind: Any) -> bool:
    types = pa.types
    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_string, types.is_large_string)
    return any(test(kind) for test in tests)
