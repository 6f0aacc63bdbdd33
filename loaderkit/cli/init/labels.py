"""A table of labels beside files: which of its columns names them, and which has the labels."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from loaderkit.cli.init.place import DataPlace
from loaderkit.errors import ConfigError
from loaderkit.sources.files.labels import NAME_FORMS
from loaderkit.sources.listing import extension_of
from loaderkit.sources.patterns import is_hidden

_MOST_BEGIN, _MOST_JSON = 256 << 10, 16 << 20
_MOST_TABLES, _NUM_COMPARED = 16, 1000
_TABLES = ("csv", "tsv", "json", "jsonl")
_LABEL_NAMES = ("label", "labels", "class", "category", "target", "y")


def label_table(place: DataPlace, folder: str, names: list[str]) -> dict[str, Any] | None:
    """`labels` of kind: files, with `file` as it is called at the place; None if no table names the files. Raises
    ConfigError if several do, or if one has several columns that may be the label."""
    tables = [info.key for info in place.infos if extension_of(info.key).lower() in _TABLES and not is_hidden(info.key)]
    if not tables or len(tables) > _MOST_TABLES:
        return None
    keys = [*names, *(f"{folder}{name}" for name in names)]
    known = {named(key) for named in NAME_FORMS.values() for key in keys}
    least = min(len(names), _NUM_COMPARED) / 4
    found = [labels for table in tables if (labels := _labels_in(place, table, known, least)) is not None]
    if len(found) > 1:
        files = " and ".join(labels["file"] for labels in found)
        raise ConfigError(
            f"{place.url} has several tables that name the files, {files}: move all but one away, or write `labels: {{file: "
            "..., key: ..., value: ...}`"
        )
    return found[0] if found else None


def _labels_in(place: DataPlace, table: str, known: set[str], least: float) -> dict[str, Any] | None:
    """The labels in one table, if most of its rows, and at least `least`, name one of the `known` files."""
    rows = _rows(table, place)

    def fit(texts: Iterable[Any]) -> int:
        return sum(str(text).replace("\\", "/").removeprefix("./") in known for text in texts)

    if isinstance(rows, dict):
        are_labels = all(type(value) in (str, int, float) for value in rows.values())
        return {"file": table} if are_labels and fit(rows) >= max(least, len(rows) / 2) else None
    columns = [*rows[0]] if rows else []
    fits = {name: fit(row.get(name) for row in rows) for name in columns}
    key = max(columns, key=fits.__getitem__, default="")
    if not key or fits[key] < max(least, len(rows) / 2):
        return None
    others = [name for name in columns if name != key]
    values = others if len(others) == 1 else [name for name in others if name.lower() in _LABEL_NAMES]
    if len(values) != 1:
        raise ConfigError(
            f"{place.connector.describe(table)} names the files by {key!r}, and which column is the label cannot be told of "
            f"{', '.join(others) or 'none'}: write `labels: {{file: {table}, key: {key}, value: ...}}` with it"
        )
    return {"file": table, "key": key, "value": values[0]}


def _rows(table: str, place: DataPlace) -> list[dict[str, Any]] | dict[str, Any]:
    """The first rows of a table, or its object file: label; nothing of what is none."""
    extension = table.rpartition(".")[2].lower()
    data = place.begin(table, _MOST_JSON if extension == "json" else _MOST_BEGIN)
    text = data.decode("utf-8-sig", "replace")
    lines = text.splitlines()[: -1 if len(data) == _MOST_BEGIN else None]
    try:
        if extension in ("csv", "tsv"):
            reader = csv.reader(io.StringIO("\n".join(lines)), delimiter="\t" if extension == "tsv" else ",")
            header = [name.strip() for name in next(reader, [])]
            return [dict(zip(header, map(str.strip, row), strict=False)) for row in reader]
        value = [json.loads(line) for line in lines if line.strip()] if extension == "jsonl" else json.loads(text)
    except (csv.Error, ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        return value
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
