"""Sources list the samples, locate their bytes and read them: one module or package a kind, with its arguments and its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.connectors.config import SourceArgs
    from loaderkit.sources.base import ReadContext, Reader, Source, SourceKind
    from loaderkit.sources.objects.reader import ItemSource
    from loaderkit.sources.ranges import RangeSource
    from loaderkit.sources.records.reader import RecordSource

__all__ = ["ItemSource", "RangeSource", "ReadContext", "Reader", "RecordSource", "Source", "SourceArgs", "SourceKind"]
__getattr__ = public_names(
    __name__,
    {
        "ItemSource": "loaderkit.sources.objects.reader",
        "RangeSource": "loaderkit.sources.ranges",
        "ReadContext": "loaderkit.sources.base",
        "Reader": "loaderkit.sources.base",
        "RecordSource": "loaderkit.sources.records.reader",
        "Source": "loaderkit.sources.base",
        "SourceArgs": "loaderkit.connectors.config",
        "SourceKind": "loaderkit.sources.base",
    },
)
