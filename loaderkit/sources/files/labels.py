"""Labels from a table beside the files: CSV, JSON or JSON Lines, one row a file."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from posixpath import basename, splitext
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from loaderkit._internal.config.settings import Model
from loaderkit.connectors.base import Connector
from loaderkit.errors import SourceError, printable
from loaderkit.sources.base import shortened
from loaderkit.sources.listing import StringTable
from loaderkit.sources.patterns import said_of_form

_MOST_BYTES = 1 << 30
_MOST_NAMED = 3
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")  # 007 is a name
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST_DIGITS = 19

NAME_FORMS: Mapping[str, Callable[[str], str]] = {
    "path": lambda key: key,
    "path without its extension": lambda key: splitext(key)[0],
    "file name": basename,
    "file name without its extension": lambda key: splitext(basename(key))[0],
}
"""What a row may call a file."""


def _checked_file(value: str) -> str:
    if not value.lower().endswith((".csv", ".tsv", ".json", ".jsonl")):
        raise ValueError(f"the name of a table, .csv, .tsv, .json or .jsonl, not {value!r}")
    return value


class LabelTableArgs(Model):
    """A table beside the files that has a label for each."""

    file: Annotated[str, AfterValidator(_checked_file)] = Field(
        description="its path relative to url: .csv or .tsv with a header, .json (a list of objects, or one object, file: "
        "label) or .jsonl",
    )
    key: str | None = Field(
        None,
        min_length=1,
        description="the column that names the file: its path relative to url, or its name, with or without extension; not "
        "for an object of JSON",
    )
    value: str | None = Field(
        None, min_length=1, description="the column that is `label`; not for an object of JSON, file: label"
    )
    unmatched: Literal["raise", "skip"] = Field(
        "raise", description="for a file without a row, and a row without a file: an error, or both are left out"
    )


class Labels(NamedTuple):
    """The labels of the files that have one: `rows` are these files' places among the given keys, in order: int64 [n]."""

    rows: NDArray[np.int64]
    values: NDArray[Any]  # int64 or float64 [n]
    classes: list[str] | None  # the texts that the values number; None if the table has numbers
    left_out: tuple[str, ...]  # a sentence each


class LabelTable:
    """The rows of a table: file -> label. Raises SourceError, with the name of the table and the row, for a table that
    cannot be used."""

    def __init__(self, connector: Connector, args: LabelTableArgs) -> None:
        self._args, self._where = args, connector.describe(args.file)
        self._labels: dict[str, Any] = {}
        data = self._read(connector)
        try:
            rows = list(self._rows(data.decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._where} is no UTF-8 text (byte {error.start}): save it as UTF-8") from None
        for number, (key, label) in enumerate(rows, 1):
            name = key.replace("\\", "/").removeprefix("./")
            if not name:
                raise SourceError(f"{self._where}, row {number}, names no file in {args.key!r}")
            if self._labels.setdefault(name, label) is not label and self._labels[name] != label:
                raise SourceError(
                    f"{self._where} has two labels for {printable(name)}: {self._labels[name]!r} and, in row {number}, "
                    f"{label!r}; a file has one"
                )
        if not self._labels:
            raise SourceError(f"{self._where} has no rows")

    def match(self, keys: StringTable, classes: Mapping[str, int] | None, describe: Callable[[str], str]) -> Labels:
        """The labels of files. `classes` gives the numbers of texts; without it all texts of the table, sorted, are
        numbered from 0."""
        form, numbers = self._numbers(keys, describe)
        alone = self._unmatched(keys, numbers, form)
        if alone and (self._args.unmatched == "raise" or not numbers):
            hint = (
                ", or leave both out by `labels: {unmatched: skip}`"
                if numbers
                else ": no row names a file that is there"
            )
            raise SourceError(f"{' and '.join(alone)}; narrow `include`, mend the table{hint}")
        order = sorted(numbers, key=numbers.__getitem__)
        all_values, names = self._values(classes)
        values = np.array([all_values[name] for name in order])
        return Labels(np.array([numbers[name] for name in order], np.int64), values, names, tuple(alone))

    # ------------------------------------------------------------------------------------------------------- the table

    def _read(self, connector: Connector) -> bytes:
        info = connector.stat(self._args.file)
        if info.size > _MOST_BYTES:
            raise SourceError(f"{self._where} has {info.size} bytes; a table of labels has at most {_MOST_BYTES}")
        data = bytearray(info.size)
        connector.read_into(self._args.file, 0, memoryview(data), etag=info.etag)
        return bytes(data)

    def _rows(self, text: str) -> Iterator[tuple[str, Any]]:
        extension = self._args.file.rpartition(".")[2].lower()
        if extension in ("csv", "tsv"):
            yield from self._rows_of_csv(text, "\t" if extension == "tsv" else ",")
            return
        for number, row in enumerate(self._objects(text, is_lines=extension == "jsonl"), 1):
            if isinstance(row, tuple):
                yield row[0], self._checked(row[1], number)
            elif not isinstance(row, dict):
                raise SourceError(f"{self._where}, row {number}, is {type(row).__name__}, not an object")
            else:
                key, value = (self._column(row, name, number) for name in self._columns())
                if not isinstance(key, (str, int)) or isinstance(key, bool):
                    raise SourceError(
                        f"{self._where}, row {number}: {self._args.key!r} is {key!r}, which names no file"
                    )
                yield str(key), self._checked(value, number)

    def _objects(self, text: str, *, is_lines: bool) -> Iterable[Any]:
        try:
            if is_lines:
                return [_parse(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
            found = _parse(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{self._where} is no JSON: {error}") from None
        if isinstance(found, list):
            return found
        if not isinstance(found, dict):
            raise SourceError(f"{self._where} holds {type(found).__name__}, not a list of objects, or one object")
        if self._args.key is not None or self._args.value is not None:
            raise SourceError(f"{self._where} is one object, file: label: remove `key` and `value`")
        return list(found.items())

    def _rows_of_csv(self, text: str, delimiter: str) -> Iterator[tuple[str, str]]:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            header = [name.strip() for name in next(rows, [])]
            places = [self._place(header, name) for name in self._columns()]
            for number, row in enumerate(rows, 1):
                if not row:
                    continue
                if len(row) != len(header):
                    raise SourceError(
                        f"{self._where}, row {number}, has {len(row)} values; the header has {len(header)}: "
                        f"{', '.join(header)}"
                    )
                key, value = (row[place].strip() for place in places)
                yield key, self._checked(value, number)
        except csv.Error as error:
            raise SourceError(f"{self._where}, line {rows.line_num}: {error}") from None

    def _columns(self) -> tuple[str, str]:
        if self._args.key is None or self._args.value is None:
            raise SourceError(
                f"{self._where} has columns: say which names the file and which is the label, as in "
                "`labels: {file: train.csv, key: name, value: class}`"
            )
        return self._args.key, self._args.value

    def _place(self, header: list[str], name: str) -> int:
        if header.count(name) != 1:
            number = "no column" if name not in header else "several columns"
            raise SourceError(f"{self._where} has {number} {name!r}; it has: {', '.join(header) or 'nothing'}")
        return header.index(name)

    def _column(self, row: dict[str, Any], name: str, number: int) -> Any:
        if name not in row:
            raise SourceError(f"{self._where}, row {number}, has no {name!r}; it has: {', '.join(row) or 'nothing'}")
        return row[name]

    def _checked(self, value: Any, number: int) -> Any:
        if type(value) not in (str, int, float) or value == "":
            what = "no label" if value in ("", None) else f"the label {value!r}, which is neither a number nor a text"
            raise SourceError(f"{self._where}, row {number}, has {what}")
        return value

    # ------------------------------------------------------------------------------------------------------- the files

    def _numbers(self, keys: StringTable, describe: Callable[[str], str]) -> tuple[str, dict[str, int]]:
        """The form in which most rows name a file, and row -> the number of its file."""
        best: tuple[str, dict[str, int]] = ("path", {})
        for form, named in NAME_FORMS.items():
            numbers: dict[str, int] = {}
            twice: tuple[int, int] | None = None
            for number, key in enumerate(keys):
                name = named(key)
                if name in self._labels and numbers.setdefault(name, number) != number:
                    twice = twice or (numbers[name], number)
            if len(numbers) > len(best[1]):
                if twice is not None:
                    first, second = (describe(keys[number]) for number in twice)
                    raise SourceError(
                        f"{self._where} names files by their {form}, and both {first} and {second} have the same: name them by "
                        "their path relative to `url` there, or narrow `include`"
                    )
                best = form, numbers
        return best

    def _unmatched(self, keys: StringTable, numbers: Mapping[str, int], form: str) -> list[str]:
        found = []
        if len(numbers) < len(keys):
            has_row = np.zeros(len(keys), bool)
            has_row[list(numbers.values())] = True
            without = np.flatnonzero(~has_row)
            names = [NAME_FORMS[form](keys[number]) for number in without[:_MOST_NAMED].tolist()]
            named = _named(names, len(without)) + said_of_form(names[0], self._labels)
            found.append(f"{len(without)} of {len(keys)} files have no row in {self._where}: {named}")
        if len(numbers) < len(self._labels):
            rows = list(islice((name for name in self._labels if name not in numbers), _MOST_NAMED))
            num = len(self._labels) - len(numbers)
            found.append(f"{num} of {len(self._labels)} rows of {self._where} have no file: {_named(rows, num)}")
        return found

    def _values(self, classes: Mapping[str, int] | None) -> tuple[dict[str, Any], list[str] | None]:
        """The values of all rows, also of rows without a file, so that a class keeps its number whatever files there are."""
        values = self._labels.values()
        if classes is not None:
            unknown = next((value for value in values if str(value) not in classes), None)
            if unknown is not None:
                raise SourceError(
                    f"{self._where} has the label {unknown!r}, which is none of `classes` ({shortened(list(classes))})"
                    f"{said_of_form(str(unknown), classes)}: add it there"
                )
            return {name: classes[str(value)] for name, value in self._labels.items()}, None
        if all(_is_like(value, int, _INTEGER) for value in values):
            if all(len(str(value)) < _MOST_DIGITS for value in values):  # what is longer is an identifier
                return {name: int(value) for name, value in self._labels.items()}, None
        elif all(_is_like(value, (int, float), _NUMBER) for value in values):
            numbers = {name: float(value) for name, value in self._labels.items()}
            if all(map(math.isfinite, numbers.values())):
                return numbers, None
        if not all(isinstance(value, str) for value in values):
            raise SourceError(
                f"{self._where} has labels that are neither all texts nor all finite numbers below 1e18: quote them, or give "
                "numbers alone"
            )
        odd = [value for value in values if not _NUMBER.fullmatch(value)]
        if 0 < len(odd) < len(self._labels) / 2:
            raise SourceError(
                f"{self._where} has {odd[0]!r} among labels of which most are numbers: mend or remove it, or, if all are "
                "names, give them in `classes`"
            )
        names = sorted({*values})
        number_of = {name: number for number, name in enumerate(names)}
        return {name: number_of[value] for name, value in self._labels.items()}, names


def _parse(text: str, line: int | None = None) -> Any:
    """JSON in which no name comes twice: the first of two labels would be lost. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{error}" if line is None else f"{error}, of line {line} of the file") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in found if names.count(name) > 1)!r} is there twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _is_like(value: Any, kinds: type | tuple[type, ...], pattern: re.Pattern[str]) -> bool:
    return pattern.fullmatch(value) is not None if isinstance(value, str) else isinstance(value, kinds)


def _named(names: list[str], num: int) -> str:
    return ", ".join(map(printable, names)) + (", ..." if num > len(names) else "")
