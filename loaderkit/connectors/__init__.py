"""Access to stores of objects: one module for each kind of store. A connector fills memory given to it, or raises."""

from loaderkit.connectors.base import BulkConnector, BulkReads, Connector, ConnectorTraits, ObjectInfo
from loaderkit.connectors.config import CacheArgs, ReadAheadArgs, RetryArgs, S3Args, StoreArgs
from loaderkit.connectors.factory import open_connector

__all__ = [
    "BulkConnector",
    "BulkReads",
    "CacheArgs",
    "Connector",
    "ConnectorTraits",
    "ObjectInfo",
    "ReadAheadArgs",
    "RetryArgs",
    "S3Args",
    "StoreArgs",
    "open_connector",
]
