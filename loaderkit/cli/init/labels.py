"""A table of labels beside files: which of its columns names them, and which has the labels."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from loaderkit.cli.init.place import Place
from loaderkit.errors import ConfigError
from loaderkit.sources.files.labels import NAME_FORMS

_MOST_BEGIN, _MOST_JSON = 256 << 10, 16 << 20
_LABEL_NAMES = ("label", "labels", "class", "category", "target", "y")


def label_table(place: Place, tables: list[str], folder: str, names: list[str]) -> dict[str, Any] | None:
    """`labels` of kind: files, with `file` as it is called at the place; None if no table names the files. Raises
    ConfigError if several do, or if one has several columns that may be the label."""
    found = []
    keys = [*names, *(f"{folder}{name}" for name in names)]
    known = {named(key) for named in NAME_FORMS.values() for key in keys}
    for table in tables:
        rows = _rows(table, place)
        if isinstance(rows, dict):
            if any(str(name) in known for name in rows):
                found.append({"file": table})
            continue
        columns = [name for name in (rows[0] if rows else {}) if isinstance(name, str)]
        fits = {name: sum(str(row.get(name, "")).removeprefix("./") in known for row in rows) for name in columns}
        key = max(columns, key=fits.__getitem__, default=None)
        if key is None or not fits[key]:
            continue
        others = [name for name in columns if name != key]
        named = [name for name in others if name.lower() in _LABEL_NAMES]
        values = others if len(others) == 1 else named
        if len(values) != 1:
            raise ConfigError(
                f"{place.connector.describe(table)} names the files by {key!r}, and which column is the label cannot be told of "
                f"{', '.join(others) or 'none'}: write `labels: {{file: {table}, key: {key}, value: ...}}` with it"
            )
        found.append({"file": table, "key": key, "value": values[0]})
    if len(found) > 1:
        raise ConfigError(
            f"{place.url} has several tables that name the files, {' and '.join(one['file'] for one in found)}: move all but one "
            "away, or write `labels: {file: ..., key: ..., value: ...}`"
        )
    return found[0] if found else None


def _rows(table: str, place: Place) -> list[dict[str, Any]] | dict[str, Any]:
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
