"""`kind: lines`: text and JSON Lines, a line a sample.

files (listing) ──> scan_lines: where lines begin ──> one range a sample ──> text, or the fields of a JSON object

A line ends with LF or CR LF, the last one also with the file. Text: an empty line is a sample, as for Hugging Face's `text`;
JSON: lines of spaces are none, as for its `json`. A byte order mark at the begin of a file belongs to no line.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import as_array
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import SourceKind
from loaderkit.sources.fields import Include
from loaderkit.sources.serial.files import SerialArgs, SerialFiles, list_files, load_with
from loaderkit.sources.serial.offsets import Offsets
from loaderkit.sources.serial.offsets_file import beside_or_found, is_beside
from loaderkit.sources.typed_fields import FieldOrigin, Names

_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # all but the white space around


class LinesArgs(SerialArgs):
    """The lines of text files, or the objects of JSON Lines."""

    kind: Literal["lines"] = "lines"
    format: Literal["json", "text"] = Field(
        "json", description="json: a line is an object, whose keys become fields; text: a line is the field `text`"
    )
    include: Include | None = Field(
        None, description="which files of the folder `url`: globs and braces; default: *.jsonl, of text *.txt"
    )
    fields: Names | None = Field(
        None,
        description="field -> key of the object, or keys of nested ones with dots between, as in {label: meta.label}; or its "
        "type, as in {x: float32} or {label: meta.label int64}; default: all keys",
    )

    @model_validator(mode="after")
    def _fits(self) -> LinesArgs:
        if self.format == "text" and self.fields is not None and [*self.fields.values()] != ["text"]:
            raise ValueError("of text lines `fields` can only rename `text`, as in {prompt: text}")
        return self

    @property
    def usual(self) -> str:
        return "*.jsonl" if self.format == "json" else "*.txt"

    @property
    def also_usual(self) -> tuple[str, ...]:
        return (".jsonl", ".ndjson") if self.format == "json" else (".txt",)


class LinesSource(SerialFiles):
    """The lines of all matching files of `connector`; a key ends with the number of the line, from 1."""

    first_number = 1

    def __init__(self, connector: Connector, args: LinesArgs, found_bad: BadShards | None = None) -> None:
        found_bad = found_bad or BadShards()
        infos, self.left_out = list_files(connector, args, is_beside, found_bad)
        self._is_text = args.format == "text"
        self._text = "text" if args.fields is None else next(iter(args.fields))
        self._picked = None if args.fields is None else [FieldOrigin.parse(*pair) for pair in args.fields.items()]
        super().__init__(connector, infos, args.limit, found_bad, skips_blanks=not self._is_text)

    def load(self, info: ObjectInfo) -> Offsets:
        return load_with(self._connector, info, "lines", beside_or_found)

    def parse(self, index: int, data: memoryview) -> Sample:
        """The line as text, without its end; or the fields of its object, lists of numbers as arrays."""
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(
                f"it is not UTF-8: byte {error.start + 1} of the line is 0x{data[error.start]:02x}"
            ) from None
        end = text.find("\n")
        behind = text[end + 1 :] if end >= 0 else ""
        if (behind and (self._is_text or behind.strip(" \t\r\n"))) or (end < 0 and not self.is_last(index)):
            raise FormatError(
                "it does not end where the index of the file says: run `loaderkit index` again, or remove it"
            )
        if self._is_text:
            return {self._text: text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text}
        value = parse_json(text)
        if type(value) is not dict:
            raise FormatError(f"it is {_named(value)}, not an object, as lines of JSON are (text: `format: text`)")
        if self._picked is not None:
            value = {origin.field: origin.of(value) for origin in self._picked}
        for name, item in value.items():
            if type(item) is list:
                value[name] = as_array(item)
        return value


def parse_json(text: str) -> Any:
    """The value of one line. Raises FormatError, which names the column."""
    stripped = text.strip(" \t\r\n")
    try:
        value, end = _scan(stripped, 0)
        if end == len(stripped):
            return value
    except StopIteration:
        pass
    except json.JSONDecodeError:
        pass
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise FormatError(f"it is no JSON that can be read: {error}") from None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"it is no JSON: {error.msg}, in column {error.pos + 1}") from None
    raise FormatError("it is no JSON")


def _named(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _fields_of(args: LinesArgs) -> dict[str, str] | None:
    if args.format == "text":
        return {"text" if args.fields is None else next(iter(args.fields)): "text"}
    return None if args.fields is None else dict.fromkeys(args.fields, "a value of JSON")


LINES = SourceKind(
    LinesArgs,
    lambda args, connector, found_bad: LinesSource(connector, args, found_bad),
    lambda args: args.root,
    _fields_of,
    has_shards=True,
)
