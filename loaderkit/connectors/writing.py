"""What the writing sides of connectors share: counts, parts of an object, writers of whole objects, writes that wrap
others."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Literal

from loaderkit.connectors.base import ObjectInfo, ObjectWriter, Writes
from loaderkit.errors import ConnectorError

Activity = Literal["writing_s", "syncing_s", "committing_s"]


@dataclass
class WriteCounts:
    """The number of bytes written, and the seconds that took, summed over threads. A copy in another process begins at 0."""

    _written_bytes: int = 0
    _seconds: dict[Activity, float] = field(
        default_factory=partial(dict[Activity, float], writing_s=0.0, syncing_s=0.0, committing_s=0.0)
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type[WriteCounts], tuple[()]]:
        return WriteCounts, ()

    @contextmanager
    def timed(self, activity: Activity, num_bytes: int = 0) -> Iterator[None]:
        """Count the time of the block, and `num_bytes` as written unless it raises."""
        begin_s = time.perf_counter()
        num_written = 0
        try:
            yield
            num_written = num_bytes
        finally:
            took_s = time.perf_counter() - begin_s
            with self._lock:
                self._written_bytes += num_written
                self._seconds[activity] += took_s

    def counters(self) -> dict[str, float]:
        """The counters, as `BulkConnector.counters` names them; none if nothing was written."""
        if not any(self._seconds.values()):
            return {}
        return {"written_bytes": self._written_bytes} | {str(name): took_s for name, took_s in self._seconds.items()}


class Parts:
    """The parts of one object that is being written, and which of them are written. Any number of threads at once."""

    def __init__(self, name: str, size: int, part_bytes: int) -> None:
        """`name` is the object's, for messages."""
        if size < 0:
            raise ValueError(f"{name}: an object cannot have {size} bytes")
        self.size = size
        self.part_bytes = part_bytes
        self.num_parts = -(-size // part_bytes)
        self._name = name
        self._written: set[int] = set()

    def checked(self, start: int, data: memoryview) -> memoryview:
        """The bytes of a part. Raises ValueError if there is no such part."""
        data = memoryview(data).cast("B")
        expected = min(self.part_bytes, self.size - start)
        if start % self.part_bytes or start < 0 or expected <= 0 or len(data) != expected:
            raise ValueError(
                f"{self._name}: {len(data)} bytes at {start} are no part of {self.size} bytes in parts of {self.part_bytes}"
            )
        return data

    def add(self, start: int) -> None:
        """Note that a part is written."""
        self._written.add(start // self.part_bytes)

    def check_whole(self) -> None:
        """Raise ConnectorError if parts are missing."""
        if (num_written := len(self._written)) < self.num_parts:
            raise ConnectorError(
                f"{self._name} has {num_written} of its {self.num_parts} parts, so it is not whole: write all of them "
                "before `commit`"
            )


def put_in_parts(writes: Writes, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
    """`Writes.put` by `create`, without `sync`."""
    view = memoryview(data).cast("B")
    part_bytes = writes.part_bytes_of(len(view))
    writer = writes.create(key, len(view))
    try:
        for start in range(0, len(view), part_bytes):
            writer.write(start, view[start : start + part_bytes])
        return writer.commit()
    except BaseException:
        with suppress(ConnectorError):  # the first error says more
            writer.abort()
        raise


class WholeWriter:
    """Writes to a store that takes all bytes of an object at once: until the commit they are in a file without a name,
    in TMPDIR."""

    def __init__(self, where: str, parts: Parts, upload: Callable[[BinaryIO], ObjectInfo], counts: WriteCounts) -> None:
        """`where` names the object for messages; `upload` creates it from the bytes of a file."""
        self._where, self._parts, self._upload, self._counts = where, parts, upload, counts
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until `abort` or the commit
        except OSError as error:
            raise self._no_room(error) from error

    def write(self, start: int, data: memoryview) -> None:
        """Keep one part; see `ObjectWriter.write`."""
        data = self._parts.checked(start, data)
        num_written = 0
        with self._counts.timed("writing_s", len(data)):
            try:
                while num_written < len(data):
                    num_written += os.pwrite(self._file.fileno(), data[num_written:], start + num_written)
            except OSError as error:
                raise self._no_room(error) from error
        self._parts.add(start)

    def commit(self) -> ObjectInfo:
        """Send the object to the store; see `ObjectWriter.commit`."""
        self._parts.check_whole()
        info = self._upload(self._file)
        self.abort()
        return info

    def abort(self) -> None:
        """Drop the bytes; see `ObjectWriter.abort`."""
        self._file.close()

    def _no_room(self, error: OSError) -> ConnectorError:
        return ConnectorError(
            f"{self._where}: its bytes cannot be kept in {tempfile.gettempdir()!r} until it is whole "
            f"({error.strerror or error}); TMPDIR names another directory"
        )


class WritesLayer(Writes):
    """Writes to `inner`. A subclass overrides what it does differently."""

    def __init__(self, inner: Writes) -> None:
        self.inner = inner

    def part_bytes_of(self, size: int) -> int:
        """The parts of `inner`."""
        return self.inner.part_bytes_of(size)

    def create(self, key: str, size: int) -> ObjectWriter:
        """A writer of `inner`."""
        return self.inner.create(key, size)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Put into `inner`."""
        return self.inner.put(key, data)

    def delete(self, key: str) -> None:
        """Delete from `inner`."""
        self.inner.delete(key)

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """Rename in `inner`."""
        return self.inner.rename(prefix, new_prefix)

    def sync(self, prefix: str) -> None:
        """Sync `inner`."""
        self.inner.sync(prefix)

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        """Clear `inner`."""
        self.inner.clear(prefix, deep=deep)


class WriterLayer(ObjectWriter):
    """Writes through `inner`. A subclass overrides what it does differently."""

    def __init__(self, inner: ObjectWriter) -> None:
        self.inner = inner

    def write(self, start: int, data: memoryview) -> None:
        """Write through `inner`."""
        self.inner.write(start, data)

    def commit(self) -> ObjectInfo:
        """Commit `inner`."""
        return self.inner.commit()

    def abort(self) -> None:
        """Abort `inner`."""
        self.inner.abort()
