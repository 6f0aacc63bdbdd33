"""The contract of connectors: the calls that every connector has, the traits and faster reads it may declare, and their
records; and the base class of connectors that wrap another one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import ConnectorError


class ObjectInfo(NamedTuple):
    """One object of a store: its key (relative, POSIX), its size in bytes, and a tag that changes with its content."""

    key: str
    size: int
    etag: str


def etag_of(mtime_ns: int, size: int) -> str:
    """A file's etag, from the time of its last change and its size."""
    return f"{mtime_ns:x}-{size:x}"


class ByteRange(NamedTuple):
    """The half-open range [start, start + length) of an object, as it was when its etag was taken."""

    key: str
    start: int
    length: int
    etag: str | None = None


class Ranges(NamedTuple):
    """Many byte ranges as columns of equal length; see `ByteRange`."""

    keys: list[str]
    starts: list[int]
    lengths: list[int]
    etags: list[str | None]


class Connector(Protocol):
    """A store of objects. One instance serves any number of threads at once."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, ordered by the UTF-8 bytes of the key."""

    def stat(self, key: str) -> ObjectInfo:
        """Size and etag of one object. Raises `ObjectNotFoundError`, `AccessDeniedError`."""

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` (writable, contiguous bytes) with the object's bytes from `start` on, or raise.

        Raises `ShortReadError` if the object ends first, `ObjectChangedError` if it no longer has the `etag` given.
        """

    def describe(self, key: str) -> str:
        """The full name of an object for messages: a path or a URL, without secrets."""

    def close(self) -> None:
        """Release what is held; idempotent."""


class Hashed(NamedTuple):
    """The hashes of consecutive blocks, the last of which may be shorter, and the seconds that hashing took."""

    hashes: list[int]
    took_s: float


class ReadInto(Protocol):
    """The signature of `Connector.read_into`."""

    def __call__(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None: ...


class ReadMany(Protocol):
    """Reads every range to its offset in `buffer`; returns the errors, as `read_into` raises them, by index of the range."""

    def __call__(self, ranges: Ranges, offsets: list[int], buffer: memoryview) -> Mapping[int, Exception]: ...


class GatherInto(Protocol):
    """Fills `buffer` with the ranges [start, start + length), concatenated, or raises as `read_into` does."""

    def __call__(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None: ...


class ScatterInto(Protocol):
    """Reads the ranges [starts[i], starts[i] + lengths[i]) of one object to offsets[i] of `buffer`, int64 [n] all three, or
    raises as `read_into` does."""

    def __call__(
        self,
        key: str,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        offsets: NDArray[np.int64],
        buffer: memoryview,
        *,
        etag: str | None = None,
    ) -> None: ...


class ReadHashed(Protocol):
    """Reads as `read_into` does (`direct`: as `read_direct`) and hashes every `block_bytes` while they lie in the CPU's cache.

    `address` is the address of a C function, `uint64_t (const void *, size_t)`. Returns None, with nothing read, where
    the connector cannot do this.
    """

    def __call__(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        block_bytes: int,
        address: int,
        direct: bool = False,
        etag: str | None = None,
    ) -> Hashed | None: ...


class MapObject(Protocol):
    """Maps an object: its bytes as read-only memory that no read has to fill. Raises as `read_into` does. The mapping
    ends with the last view of it. If the object is truncated meanwhile, touching the lost bytes ends the process."""

    def __call__(self, key: str, *, etag: str | None = None) -> memoryview: ...


@dataclass(frozen=True)
class BulkReads:
    """A connector's faster reads beside `read_into`; None for a read that it does not have."""

    read_many: ReadMany | None = None
    gather_into: GatherInto | None = None
    read_direct: ReadInto | None = None  # past the page cache
    read_hashed: ReadHashed | None = None
    scatter_into: ScatterInto | None = None
    map_object: MapObject | None = None


@dataclass(frozen=True, kw_only=True)
class ConnectorTraits:
    """What a connector declares about its store. The defaults hold for a connector that declares nothing."""

    is_remote: bool = False  # reads wait for a network: the loader reads ahead, and keeps the indexes of archives
    coalesce_gap: int = 2**20  # reading this many unwanted bytes costs less than another request
    part_size: int = 0  # a read of this many bytes is split into concurrent requests; 0: a read is one request
    store: str = ""  # names the store in the keys of a shared cache
    is_in_process: bool = (
        False  # its objects lie in this process's memory: what another process writes is not seen here
    )


class ObjectWriter(Protocol):
    """One object while it is being written. Until `commit` nothing is visible under its key that could be taken for the
    object.

    Any number of threads write at once; `commit` and `abort` are called when no `write` is running.
    """

    def write(self, start: int, data: memoryview) -> None:
        """Write one part: the object's bytes from `start` on. Parts come in any order, each may be written again.

        `start` is a multiple of the `part_bytes_of` the object's size; every part has that many bytes, except the last one,
        which ends with the object. `data` is contiguous bytes and is not used after the return; memory that starts at a
        multiple of 4,096 is written to files past the page cache.
        """

    def commit(self) -> ObjectInfo:
        """Make the object whole and visible, its bytes durable (its name in a directory is after `Writes.sync`).

        Raises ConnectorError if parts are missing, or if the store failed; then `abort` is still to be called.
        """

    def abort(self) -> None:
        """Leave nothing of it behind, unless it is committed. Idempotent."""


class Writes(Protocol):
    """The writing side of a connector; see `writes_of`. One instance serves any number of threads at once.

    Errors are the same as for reading, and name the object. A key that leads out of the store raises ObjectNotFoundError.
    """

    def part_bytes_of(self, size: int) -> int:
        """The bytes of a part of an object of `size` bytes: a multiple of 4,096, at most 8 MiB where the store allows it."""

    def create(self, key: str, size: int) -> ObjectWriter:
        """Begin to write an object of `size` bytes, which replaces another of that key at `commit`."""

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Create or replace a small object, durably: readers see the old bytes or the new ones."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error. Durable after `sync`."""

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """Give the directory `prefix` another name, atomically and durably; False, with nothing done, where the store cannot.

        The names end with a slash or not. Raises ObjectNotFoundError if there is no such directory, ConnectorError if there
        are objects below `new_prefix`.
        """

    def sync(self, prefix: str) -> None:
        """Make the names of all objects below the directory `prefix` durable, and its own; "" is the whole store."""

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        """Remove, durably, what is no object below the directory `prefix`: empty directories, itself included, and what
        dead writers have left, such as unfinished uploads. A writer that is still at work there can then not commit,
        unless its store takes objects as a whole. Without `deep` the directories in it are left alone."""


class BulkConnector(Connector):
    """A `Connector` with traits, faster reads, writes and counters; a subclass overrides those it has."""

    traits: ConnectorTraits = ConnectorTraits()

    def bulk(self) -> BulkReads:
        """The connector's faster reads. A subclass that overrides `read_into` overrides this too."""
        return BulkReads()

    def writes(self) -> Writes | None:
        """The connector's writing side; None for one that cannot write."""
        return None

    def counters(self) -> dict[str, float]:
        """Counts and seconds of the requests to the store, by name; what was written as `written_bytes`, `writing_s`,
        `syncing_s`, `committing_s`."""
        return {}

    def time_objects(self) -> None:
        """Measure from now on how long the reads of each object take, if the connector can."""

    def object_times(self) -> Mapping[str, tuple[float, float]]:
        """(seconds to the first byte, seconds of the body) by `describe(key)`, each summed over all reads of the object."""
        return {}

    def modified_s(self, key: str) -> float | None:
        """When an object was last written, in seconds since 1970 by the store's clock; None where the store does not say."""
        return None

    def links(self, prefix: str) -> Sequence[str]:
        """The keys of the symbolic links to directories: the directory `prefix` itself, or those in it.

        To delete an object behind a link deletes it in the directory that the link leads to. To delete the link does not.
        """
        return []

    def local_path(self) -> str | None:
        """The directory of this machine whose regular files are the objects; None for other stores."""
        return None


def traits_of(connector: Connector) -> ConnectorTraits:
    """The traits of a connector; the defaults for one that declares none."""
    return connector.traits if isinstance(connector, BulkConnector) else ConnectorTraits()


def bulk_of(connector: Connector) -> BulkReads:
    """The faster reads of a connector; empty for a connector that declares none."""
    return connector.bulk() if isinstance(connector, BulkConnector) else BulkReads()


def writes_of(connector: Connector) -> Writes:
    """The writing side of a connector. Raises ConnectorError for one that cannot write."""
    writes = connector.writes() if isinstance(connector, BulkConnector) else None
    if writes is None:
        raise ConnectorError(
            f"{connector.describe('')} cannot be written to: {type(connector).__name__} only reads; write to a directory, "
            "s3:// or a filesystem of fsspec, or give the connector a method `writes`"
        )
    return writes


def counters_of(connector: Connector) -> dict[str, float]:
    """A copy of a connector's counters."""
    return dict(connector.counters()) if isinstance(connector, BulkConnector) else {}


def modified_s_of(connector: Connector, key: str) -> float | None:
    """When an object was last written, in seconds since 1970 by the store's clock; None where the store does not say.

    Raises as `Connector.stat` does.
    """
    return connector.modified_s(key) if isinstance(connector, BulkConnector) else None


def links_of(connector: Connector, prefix: str) -> Sequence[str]:
    """The keys of the symbolic links to directories: `prefix`, or those in it."""
    return connector.links(prefix) if isinstance(connector, BulkConnector) else []


def local_path_of(connector: Connector) -> str | None:
    """The directory of this machine whose regular files are the objects; None for other stores."""
    return connector.local_path() if isinstance(connector, BulkConnector) else None


def version_of(connector: Connector, info: ObjectInfo) -> str:
    """Tells the versions of an object apart, for what is kept of it beyond a run: its etag, and of a local file the time
    of its last change as well, which unlike the one in its etag no program sets: all files of an image may have one time."""
    root = local_path_of(connector)
    if root is not None:
        with suppress(OSError):  # reading raises the error
            return f"{info.etag}-{os.stat(f'{root}/{info.key}').st_ctime_ns:x}"
    return info.etag


class ConnectorLayer(BulkConnector):
    """A connector around `inner`. It has the traits and writes of `inner`, and no faster reads unless a subclass gives
    them."""

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

    def writes(self) -> Writes | None:
        """The writing side of `inner`."""
        return self.inner.writes() if isinstance(self.inner, BulkConnector) else None

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

    def modified_s(self, key: str) -> float | None:
        """The time that `inner` gives."""
        return modified_s_of(self.inner, key)

    def links(self, prefix: str) -> Sequence[str]:
        """The links of `inner`."""
        return links_of(self.inner, prefix)

    def close(self) -> None:
        """Close `inner`."""
        self.inner.close()
