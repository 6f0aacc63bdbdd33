"""Sources list the samples and locate their bytes: one module a source, with its arguments and its kind."""

from loaderkit.connectors.config import SourceArgs
from loaderkit.sources.base import ItemSource, RecordSource, Source, SourceKind

__all__ = ["ItemSource", "RecordSource", "Source", "SourceArgs", "SourceKind"]
