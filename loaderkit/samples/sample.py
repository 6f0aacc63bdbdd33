"""A sample as the ranges where its bytes lie."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from loaderkit.connectors.base import ByteRange, Ranges

Sample = dict[str, Any]
"""One sample between two stages: field name -> value (bytes, `Encoded`, `Image`, tensor, number, text, ...)."""


class FieldRange(NamedTuple):
    """Where the bytes of one field of a sample lie, and the extension that says what they are."""

    field: str
    extension: str
    range: ByteRange


class Table(NamedTuple):
    """The ranges of several samples with the same fields: sample by sample, the fields in their order."""

    fields: tuple[tuple[str, str], ...]  # (field, extension)
    ranges: Ranges
    constants: Mapping[str, list[Any]] = MappingProxyType({})  # the fields known without reading: one value per sample
