"""Columns that the folders of a file name, as Hive, Spark and pyarrow write them: `year=2024/lang=de/part-0.parquet`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from loaderkit.errors import SourceError
from loaderkit.sources.arrow.types import ColumnType

Value = int | str | None
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


class Partitions:
    """The columns that the folders of some files name, and their types: int64 if all values are whole numbers, else text.
    Raises SourceError if files differ in these columns."""

    def __init__(self, keys: Sequence[str]) -> None:
        texts: dict[str, set[str | None]] = {}
        for number, key in enumerate(keys):
            named = _named(key)
            if number and [*named] != [*texts]:
                raise SourceError(
                    f"the folders of {key!r} name the columns {', '.join(named) or 'none'}, and those of {keys[0]!r} "
                    f"{', '.join(texts) or 'none'}: choose files of one kind by `include`"
                )
            for name, text in named.items():
                texts.setdefault(name, set()).add(text)
        self.types: dict[str, ColumnType] = {}
        for name, distinct in texts.items():
            is_whole = all(text is None or _WHOLE.fullmatch(text) for text in distinct)
            self.types[name] = ColumnType("number", (), "int64") if is_whole else ColumnType("text", ())

    def values_in(self, key: str) -> dict[str, Value]:
        """The values that the folders of one of the files give; None for a null."""
        return {
            name: int(text) if text is not None and self.types[name].content == "number" else text
            for name, text in _named(key).items()
        }


def _named(key: str) -> dict[str, str | None]:
    folders = key.split("/")[:-1]
    pairs = [folder.partition("=") for folder in folders if "=" in folder.removeprefix("=")]
    return {unquote(name): None if text == _NULL else unquote(text) for name, _, text in pairs}
