"""Which samples there are, and where their bytes lie."""

from loaderkit.connectors.config import SourceArgs
from loaderkit.sources.base import ItemSource, RecordSource, Source

__all__ = ["ItemSource", "RecordSource", "Source", "SourceArgs"]
