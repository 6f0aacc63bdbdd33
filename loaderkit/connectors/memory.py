"""Objects held in this process's memory: for tests, demonstrations and small generated data sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from hashlib import blake2b

from loaderkit.connectors.base import BulkConnector, ConnectorTraits, ObjectInfo
from loaderkit.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError


class MemoryConnector(BulkConnector):
    """A dictionary of objects. The etag is a digest of the content, so it means the same in another process."""

    traits = ConnectorTraits(coalesce_gap=64 * 2**10)  # as for files, so that tests coalesce alike

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, str]] = {}
        for key, data in (objects or {}).items():
            self.write(key, data)

    def __reduce__(self) -> tuple[type[MemoryConnector], tuple[dict[str, bytes]]]:
        """A copy for another process has the current objects."""
        with self._lock:
            return MemoryConnector, ({key: data for key, (data, _) in self._objects.items()},)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """A snapshot of the objects whose key starts with `prefix`, ordered by the UTF-8 bytes of the key."""
        with self._lock:
            infos = [
                ObjectInfo(key, len(data), etag)
                for key, (data, etag) in self._objects.items()
                if key.startswith(prefix)
            ]
        infos.sort(key=lambda info: info.key.encode("utf-8", "surrogateescape"))
        yield from infos

    def stat(self, key: str) -> ObjectInfo:
        """Size in bytes and etag of one object. Raises `ObjectNotFoundError`."""
        data, etag = self._get(key)
        return ObjectInfo(key, len(data), etag)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        data, current = self._get(key)
        if etag is not None and etag != current:
            raise ObjectChangedError(
                f"{self.describe(key)} was replaced since it was listed (then {etag}, now {current}); "
                "start again, so that it is listed again"
            )
        if start < 0:
            raise ShortReadError(f"{self.describe(key)}: the offset {start} is negative")
        part = memoryview(data)[start : start + len(buffer)]
        if len(part) < len(buffer):
            raise ShortReadError(
                f"{self.describe(key)} ended after {len(part)} of the {len(buffer)} bytes requested at offset {start}: "
                f"its size is {len(data)}"
            )
        buffer[:] = part

    def write(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Create or replace an object (the bytes are copied unless immutable)."""
        content = bytes(data)
        etag = blake2b(content, digest_size=8).hexdigest()
        with self._lock:
            self._objects[key] = (content, etag)

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error, as in S3."""
        with self._lock:
            self._objects.pop(key, None)

    def describe(self, key: str) -> str:
        """The object's URL."""
        return f"memory://{key}"

    def close(self) -> None:
        """Nothing to release: the objects live as long as the connector."""

    def _get(self, key: str) -> tuple[bytes, str]:
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            raise ObjectNotFoundError(f"there is no object {self.describe(key)}")
        return stored
