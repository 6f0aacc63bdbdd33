"""Objects held in this process's memory: for tests, demonstrations and small generated data sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from hashlib import blake2b

from loaderkit.connectors.base import BulkConnector, ConnectorTraits, ObjectInfo
from loaderkit.connectors.writing import Parts, WriteCounts
from loaderkit.errors import ConnectorError, ObjectChangedError, ObjectNotFoundError, ShortReadError

_PART_BYTES = 64 << 10


class MemoryConnector(BulkConnector):
    """A dictionary of objects. The etag is a digest of the content, so it means the same in another process."""

    traits = ConnectorTraits(coalesce_gap=64 * 2**10, is_in_process=True)  # as for files, so that tests coalesce alike

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts = WriteCounts()
        self._objects: dict[str, tuple[bytes, str]] = {}
        for key, data in (objects or {}).items():
            self._store(key, data)

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

    def writes(self) -> MemoryConnector:
        """The connector itself."""
        return self

    def counters(self) -> dict[str, float]:
        """What was written."""
        return self._counts.counters()

    def part_bytes_of(self, size: int) -> int:
        """64 KiB."""
        return _PART_BYTES

    def create(self, key: str, size: int) -> MemoryWriter:
        """Begin to write an object of `size` bytes."""
        return MemoryWriter(self, key, Parts(self.describe(key), size, _PART_BYTES), self._counts)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Create or replace an object (the bytes are copied unless immutable)."""
        _check_key(key)
        with self._counts.timed("committing_s", len(data)):
            return self._store(key, data)

    def _store(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        content = bytes(data)
        etag = blake2b(content, digest_size=8).hexdigest()
        with self._lock:
            self._objects[key] = (content, etag)
        return ObjectInfo(key, len(content), etag)

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        with self._lock:
            self._objects.pop(key, None)

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """Give all objects below `prefix` another key, at once."""
        old, new = (f"{name.removesuffix('/')}/" for name in (prefix, new_prefix))
        _check_key(new[:-1])
        with self._lock:
            keys = [key for key in self._objects if key.startswith(old)]
            if not keys:
                raise ObjectNotFoundError(f"there is no object below {self.describe(old)}")
            if any(key.startswith(new) for key in self._objects):
                raise ConnectorError(
                    f"{self.describe(old)} cannot be renamed to {self.describe(new)}: there are objects below it already"
                )
            self._objects.update({new + key[len(old) :]: self._objects.pop(key) for key in keys})
        return True

    def sync(self, prefix: str) -> None:
        """Nothing to do."""

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        """Nothing to remove: objects that are not committed belong to their writers."""

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


class MemoryWriter:
    """An object of a MemoryConnector while it is being written."""

    def __init__(self, store: MemoryConnector, key: str, parts: Parts, counts: WriteCounts) -> None:
        _check_key(key)
        self._store, self._key, self._parts, self._counts = store, key, parts, counts
        self._data = bytearray(parts.size)

    def write(self, start: int, data: memoryview) -> None:
        """Copy one part; see `ObjectWriter.write`."""
        data = self._parts.checked(start, data)
        with self._counts.timed("writing_s"):
            self._data[start : start + len(data)] = data
        self._parts.add(start)

    def commit(self) -> ObjectInfo:
        """Put the object into the store; see `ObjectWriter.commit`."""
        self._parts.check_whole()
        return self._store.put(self._key, self._data)

    def abort(self) -> None:
        """Forget the bytes; see `ObjectWriter.abort`."""
        self._data = bytearray()


def _check_key(key: str) -> None:
    """Raise ObjectNotFoundError for a key that is invalid in a file system, too."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise ObjectNotFoundError(f"{key!r} is no key: a key has no '.', '..' and empty parts")
