"""The file that names all others of a checkpoint in a directory, by format; replacing it replaces the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Literal, NamedTuple

from loaderkit.checkpoint.discovery.kinds import METADATA
from loaderkit.checkpoint.formats.dcp import read_metadata
from loaderkit.checkpoint.formats.state_file import STATE, companions_of, read_state

Format = Literal["dcp", "safetensors"]


class Description(NamedTuple):
    """`format` is what a summary calls it, `key` the file's name; the names of the files that it names end with
    `suffix`. Its bytes give the names of the files it needs, and the content of the files that go with it, which only
    other programs read. Both functions raise FormatError."""

    format: Format
    key: str
    suffix: str
    files_of: Callable[[bytes], set[str]]
    companions_of: Callable[[bytes], dict[str, bytes]]


def _files_in_metadata(data: bytes) -> set[str]:
    contents = read_metadata(data)
    names = {shard.key for entry in contents.tensors.values() for shard in entry.shards}
    return names | {item.key for item in contents.values.values()}


DCP = Description("dcp", METADATA, ".distcp", _files_in_metadata, lambda _: {})
SAFETENSORS = Description(
    "safetensors",
    STATE,
    ".safetensors",
    lambda data: {*read_state(data).files},
    lambda data: companions_of(read_state(data)),
)
DESCRIPTIONS = (DCP, SAFETENSORS)


def description_in(names: Container[str]) -> Description | None:
    """The description of the checkpoint whose directory has these names, or None if it has none."""
    return next((known for known in DESCRIPTIONS if known.key in names), None)
