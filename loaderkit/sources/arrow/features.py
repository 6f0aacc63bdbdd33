"""What the features of Hugging Face's datasets, as JSON has them, say of columns besides their Arrow types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loaderkit.samples.values import as_array
from loaderkit.sources.arrow.types import ColumnType, is_file, stored_type

_JSON = "JSON"


def class_names(features: Any) -> dict[str, list[str]]:
    """The names of classes by column."""
    return {
        name: [str(one) for one in feature["names"]]
        for name, feature in (features.items() if isinstance(features, dict) else ())
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
    }


def with_json(columns: Mapping[str, ColumnType], features: Any) -> dict[str, ColumnType]:
    """The columns, of which those with texts that a `Json` feature says are JSON become its values."""
    import pyarrow as pa

    found = dict(columns)
    for name, feature in features.items() if isinstance(features, dict) else ():
        column = found.get(name)
        if column is None or column.content not in ("text", "nested"):
            continue
        kind = pa.string() if column.arrow is None else column.arrow
        if parts := _json_parts(pa, kind, feature):
            found[name] = column._replace(content="nested", stored=f"{column} as {parts}", arrow=kind, json=parts)
    return found


def _json_parts(pa: Any, kind: Any, feature: Any) -> Any:
    """Where a type has texts of JSON: _JSON, a list of one such place, or a dict of some by the field's name; else None.

    A feature that is of another type than the column says nothing of it: other programs keep features that they made wrong.
    """
    kind, types = stored_type(pa, kind), pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and isinstance(feature, list) and len(feature) == 1:
        feature = {"feature": feature[0]}  # as early versions wrote a list
    if not isinstance(feature, dict) or is_file(pa, kind):
        return None
    if is_list:
        items = _json_parts(pa, kind.value_type, feature.get("feature"))
        return [items] if items else None
    if types.is_struct(kind):
        parts = {field.name: _json_parts(pa, field.type, feature.get(field.name)) for field in kind}
        return {name: part for name, part in parts.items() if part} or None
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    is_json = feature.get("_type") == "Json" and feature.get("decode", True) is True
    return _JSON if is_json and any(test(kind) for test in tests) else None


def parsed(parts: Any, value: Any) -> Any:
    """A value of a column, with the values of its JSON in place of the texts; a list of numbers is an array, as in JSON Lines.
    Raises ValueError for what is no JSON."""
    value = _parsed(parts, value)
    return as_array(value) if type(value) is list else value


def _parsed(parts: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(parts, list):
        return [_parsed(parts[0], item) for item in value]
    if isinstance(parts, dict):
        return {name: _parsed(parts[name], item) if name in parts else item for name, item in value.items()}
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its feature is Json, and a text of it is no JSON: {error}") from None
