"""Access to stores of objects: one module for each kind of store. A connector fills memory given to it, or raises; most of them
write, too."""

from loaderkit.connectors.base import (
    BulkConnector,
    BulkReads,
    Connector,
    ConnectorTraits,
    ObjectInfo,
    ObjectWriter,
    Writes,
    writes_of,
)
from loaderkit.connectors.config import CacheArgs, ReadAheadArgs, RetryArgs, S3Args, StoreArgs
from loaderkit.connectors.factory import open_connector

__all__ = [
    "BulkConnector",
    "BulkReads",
    "CacheArgs",
    "Connector",
    "ConnectorTraits",
    "ObjectInfo",
    "ObjectWriter",
    "ReadAheadArgs",
    "RetryArgs",
    "S3Args",
    "StoreArgs",
    "Writes",
    "open_connector",
    "writes_of",
]
