"""The base of connectors that wrap another connector and delegate to it what they do not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loaderkit.connectors.base import BulkConnector, Connector, ObjectInfo, counters_of, traits_of


class ConnectorLayer(BulkConnector):
    """A connector that reads from `inner`. Its traits are those of `inner`; it has no faster reads unless it says so."""

    def __init__(self, inner: Connector) -> None:
        self.inner = inner
        self.traits = traits_of(inner)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The listing of `inner`."""
        return self.inner.list(prefix)

    def stat(self, key: str) -> ObjectInfo:
        """The answer of `inner`."""
        return self.inner.stat(key)

    def describe(self, key: str) -> str:
        """The object's name in the store."""
        return self.inner.describe(key)

    def counters(self) -> dict[str, float]:
        """The counters of `inner`."""
        return counters_of(self.inner)

    def time_objects(self) -> None:
        """Let `inner` time its objects, if it can."""
        if isinstance(self.inner, BulkConnector):
            self.inner.time_objects()

    def object_times(self) -> Mapping[str, tuple[float, float]]:
        """The times that `inner` measured."""
        return self.inner.object_times() if isinstance(self.inner, BulkConnector) else {}

    def close(self) -> None:
        """Close `inner`."""
        self.inner.close()
