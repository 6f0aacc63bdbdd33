"""Which samples there are, and where their bytes lie: one module a source, which declares its arguments and its kind."""

from loaderkit.connectors.config import SourceArgs
from loaderkit.sources.base import ItemSource, RecordSource, Source, SourceKind

__all__ = ["ItemSource", "RecordSource", "Source", "SourceArgs", "SourceKind"]
