"""A directory of this machine as a store of objects."""

from __future__ import annotations

import errno
import mmap
import os
import stat as stat_bits
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.config.paths import absolute_path
from loaderkit.connectors.base import (
    BulkConnector,
    BulkReads,
    ConnectorTraits,
    Hashed,
    ObjectInfo,
    Ranges,
    Writes,
    etag_of,
)
from loaderkit.connectors.directory import Directory
from loaderkit.connectors.file_writes import FileWrites
from loaderkit.connectors.writing import WriteCounts
from loaderkit.errors import (
    AccessDeniedError,
    ConnectorError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    TemporaryError,
)

# Errors of a network disk while its server is away or restarts; a broken disk gives EIO as well.
_TEMPORARY = {
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN,
}  # fmt: skip


class FileConnector(BulkConnector):
    """The regular files below `root`; keys are POSIX paths relative to it, hidden files included.

    Symbolic links are followed when listing and reading, so a link may lead outside `root`; a key may not. A read of
    a small file in the page cache costs four system calls, about 6 us.
    """

    traits = ConnectorTraits(coalesce_gap=64 * 2**10)

    def __init__(self, root: str | Path) -> None:
        self._root = absolute_path(root)
        self._base = self._root if self._root.endswith("/") else self._root + "/"
        self._counts = WriteCounts()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All regular files whose key starts with `prefix`, ordered by the bytes of the whole key.

        A file that vanishes meanwhile is left out. Raises `ObjectNotFoundError` if the root is missing,
        `AccessDeniedError` for a directory that may not be read.
        """
        return Directory(self._base, self._translated).files(prefix)

    def stat(self, key: str) -> ObjectInfo:
        """Size in bytes and etag (from the time of change and the size) of one file."""
        try:
            status = os.stat(self._path(key))
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error
        self._require_regular(key, status.st_mode)
        return ObjectInfo(key, status.st_size, etag_of(status.st_mtime_ns, status.st_size))

    def modified_s(self, key: str) -> float:
        """The time of the file's last change of content."""
        try:
            return os.stat(self._path(key)).st_mtime
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error

    def links(self, prefix: str) -> Sequence[str]:
        """The keys of the symbolic links to directories: the directory `prefix` itself, or those in it."""
        name = prefix.removesuffix("/")
        if name and os.path.islink(self._base + name):
            return [name]
        inside = (f"{folder}/{name}" for folder, names, _ in os.walk(self._base + name) for name in names)
        return [os.path.relpath(path, self._root) for path in inside if os.path.islink(path)]

    def local_path(self) -> str | None:
        """The root; None for a subclass with a listing of its own."""
        return self._root if type(self).list is FileConnector.list else None

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the file's bytes from `start` on, or raise; see `Connector.read_into`."""
        self._read(key, start, buffer, etag)

    def bulk(self) -> BulkReads:
        """All faster reads; none for a subclass that overrides `read_into` (to decrypt or count), as they would bypass it."""
        if type(self).read_into is not FileConnector.read_into:
            return BulkReads()
        return BulkReads(
            self.read_many,
            self.gather_into,
            self.read_direct,
            self.read_hashed,
            self.scatter_into,
            self.map_object,
        )

    def read_direct(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """`read_into` past the page cache (O_DIRECT); through it where the file system has no O_DIRECT."""
        self._read(key, start, buffer, etag, direct=True)

    def _read(self, key: str, start: int, buffer: memoryview, etag: str | None, *, direct: bool = False) -> None:
        if start < 0:  # preadv(2) reads from the file's current position at -1
            raise self._before_the_start(key, start)
        try:
            num_read, *status = native.read_range(self._path(key), start, buffer, direct)
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error
        self._check_status(key, status, etag)
        if num_read < len(buffer):
            raise self._cut_short(key, num_read, len(buffer), start, status)

    def read_hashed(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        block_bytes: int,
        address: int,
        direct: bool = False,
        etag: str | None = None,
    ) -> Hashed:
        """`read_into`, or `read_direct`, with the hash of every `block_bytes` by the C function at `address`."""
        if start < 0:
            raise self._before_the_start(key, start)
        try:
            (num_read, *status), hashes, took_s = native.read_hashed(
                self._path(key), start, buffer, block_bytes, address, direct
            )
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error
        self._check_status(key, status, etag)
        if num_read < len(buffer):
            raise self._cut_short(key, num_read, len(buffer), start, status)
        return Hashed(hashes, took_s)

    def gather_into(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None:
        """Fill `buffer` with the ranges [start, start + length), concatenated, or raise as `read_into` does.

        `starts` is int64 [n] in any order, `buffer` has n * length bytes. The file is opened once: 64 records of 16 bytes in
        the page cache cost 30 us instead of 400.
        """
        if len(buffer) != len(starts) * length:
            raise ValueError(f"{len(starts)} ranges of {length} bytes do not fill a buffer of {len(buffer)} bytes")
        if not len(buffer):
            return
        try:
            num_read, *status = native.gather_ranges(self._path(key), starts, length, buffer)
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error
        self._check_status(key, status, etag)
        if num_read < len(buffer):
            index, num_read_here = divmod(num_read, length)
            start = int(starts[index])
            if start < 0:
                raise self._before_the_start(key, start)
            raise self._cut_short(key, num_read_here, length, start, status)

    def scatter_into(
        self,
        key: str,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        offsets: NDArray[np.int64],
        buffer: memoryview,
        *,
        etag: str | None = None,
    ) -> None:
        """`gather_into` of ranges that differ in length: range i goes to offsets[i] of `buffer`. All int64 [n]."""
        try:
            num_read, *status = native.scatter_ranges(self._path(key), starts, lengths, offsets, buffer)
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error
        self._check_status(key, status, etag)
        if num_read < lengths.sum():
            ends = np.cumsum(lengths)
            index = int(np.searchsorted(ends, num_read, side="right"))
            start, length = int(starts[index]), int(lengths[index])
            if start < 0:
                raise self._before_the_start(key, start)
            raise self._cut_short(key, num_read - int(ends[index]) + length, length, start, status)

    def map_object(self, key: str, *, etag: str | None = None) -> memoryview:
        """A file's bytes, mapped; see `MapObject`."""
        try:
            with open(self._path(key), "rb", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                self._check_status(key, (status.st_mode, status.st_size, status.st_mtime_ns), etag)
                if not status.st_size:
                    return memoryview(b"")
                return memoryview(mmap.mmap(file.fileno(), status.st_size, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise self._translated(key, error) from error

    def read_many(self, ranges: Ranges, offsets: Sequence[int], buffer: memoryview) -> Mapping[int, ConnectorError]:
        """Read every range to its offset in `buffer`; see `ReadMany`.

        Ranges that ascend in one file are read together, small gaps included; the GIL is released once for all of them.
        """
        keys, starts, lengths, etags = ranges
        failed: Iterable[int] | None = range(len(keys))
        if _is_plain("/".join({*keys})):
            path_of = self._base.__add__  # no call of Python for each of them
            failed = native.read_many(path_of, keys, starts, lengths, etags, offsets, buffer)
        # Each failed range is read again by itself, so that it raises its own error or succeeds.
        errors: dict[int, ConnectorError] = {}
        for number in failed or ():
            offset = offsets[number]
            part = buffer[offset : offset + lengths[number]]
            try:
                self.read_into(keys[number], starts[number], part, etag=etags[number])
            except ConnectorError as error:
                errors[number] = error
        return errors

    def writes(self) -> Writes | None:
        """The writing side. A subclass that overrides `read_into` to decrypt overrides this, too."""
        return FileWrites(self._root, self._path, self._translated, self._counts)

    def counters(self) -> dict[str, float]:
        """What was written."""
        return self._counts.counters()

    def describe(self, key: str) -> str:
        """The file's path."""
        return self._base + key

    def close(self) -> None:
        """Nothing is held between two calls."""

    def _path(self, key: str) -> str:
        if not _is_plain(key):
            raise ObjectNotFoundError(
                f"{key!r} is no key: a key is a path below {self._root!r} without '.', '..' and empty parts"
            )
        return self._base + key

    def _check_status(self, key: str, status: Sequence[int], etag: str | None) -> None:
        """Raise unless the file is regular and still has `etag`. `status` is (mode, size in bytes, mtime in ns)."""
        mode, size, mtime_ns = status
        self._require_regular(key, mode)
        if etag is not None and etag != (current := etag_of(mtime_ns, size)):
            raise ObjectChangedError(
                f"{self.describe(key)} was changed since it was listed "
                f"(then {etag}, now {current}); start again, so that it is listed again"
            )

    def _before_the_start(self, key: str, start: int) -> ShortReadError:
        return ShortReadError(f"{self.describe(key)}: the offset {start} is negative")

    def _cut_short(self, key: str, num_read: int, num_bytes: int, start: int, status: Sequence[int]) -> ShortReadError:
        return ShortReadError(
            f"{self.describe(key)} ended after {num_read} of the {num_bytes} bytes requested at offset {start}: "
            f"its size is {status[1]}; it is truncated, or its index is stale"
        )

    def _require_regular(self, key: str, mode: int) -> None:
        if not stat_bits.S_ISREG(mode):
            kind = "a directory" if stat_bits.S_ISDIR(mode) else "a device, pipe or socket"
            raise ObjectNotFoundError(f"{self.describe(key)} is {kind}, not a file")

    def _translated(self, key: str, error: OSError | ValueError) -> ConnectorError:
        if isinstance(error, ConnectorError):
            return error
        name = self._base + key
        if isinstance(error, ValueError):  # a NUL, or a character that a file name cannot encode
            return ObjectNotFoundError(f"{key!r} is no key: {error}")
        if error.errno == errno.ENOTDIR:
            return ObjectNotFoundError(
                f"{name!r} cannot be: a part of its path is a file, not a directory; check the path"
            )
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP):
            return ObjectNotFoundError(f"there is no file {name!r} ({error.strerror}); was it moved or deleted?")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return AccessDeniedError(f"{name!r} cannot be read or changed by this user ({error.strerror})")
        kind = TemporaryError if error.errno in _TEMPORARY else ConnectorError
        return kind(f"{name!r}: {error.strerror or error}")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer


def _is_plain(key: str) -> bool:
    """False if a part is empty, "." or "..": such a key is a second spelling, or leaves the root."""
    slashed = f"/{key}/"  # searching it takes a fifth of the time of a regular expression
    return not ("//" in slashed or "/./" in slashed or "/../" in slashed)
