"""What every connector offers, and the records it speaks in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class ObjectInfo(NamedTuple):
    """One object of a store: its key (relative, POSIX), its size in bytes, and a tag that changes with its content."""

    key: str
    size: int
    etag: str


class ByteRange(NamedTuple):
    """The half-open range [start, start + length) of an object, as it was when its etag was taken."""

    key: str
    start: int
    length: int
    etag: str | None = None


class Ranges(NamedTuple):
    """Many byte ranges, as columns of one length: what `ByteRange` says of one."""

    keys: list[str]
    starts: list[int]
    lengths: list[int]
    etags: list[str | None]


class Connector(Protocol):
    """A place with objects. One instance serves any number of threads at once."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, ordered by the UTF-8 bytes of the key."""

    def stat(self, key: str) -> ObjectInfo:
        """Size and etag of one object. Raises `ObjectNotFoundError`, `AccessDeniedError`."""

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` (writable, contiguous bytes) with the object's bytes from `start` on, or raise.

        Raises `ShortReadError` if the object ends first, `ObjectChangedError` if `etag` is given and no longer fits.
        """

    def describe(self, key: str) -> str:
        """The full name of an object for messages: a path or a URL, without secrets."""

    def close(self) -> None:
        """Release what is held; idempotent."""


class Hashed(NamedTuple):
    """The hashes of blocks that were read one behind another, the last of which may be shorter, and the seconds they took."""

    hashes: list[int]
    took_s: float


class BulkConnector(Connector, Protocol):
    """What a connector may have besides, where many ranges cost less together: any of the methods.

    A subclass that overrides `read_into` overrides these too, or they are not used; see `ranges.bulk_method`.
    `coalesce_gap` says from how many unwanted bytes on another range costs less than reading them; without it, 1 MiB, as for
    a store that takes milliseconds to answer, and many ranges are asked for at a time. `split_read_size`: a read of so many is
    several requests at a time, by the connector's own doing; without it, or 0, a read is one.
    """

    coalesce_gap: int
    split_read_size: int

    def read_many(self, ranges: Ranges, offsets: list[int], buffer: memoryview) -> Mapping[int, Exception]:
        """Read every range to its offset in `buffer`; the errors, as `read_into` raises them, by number of the range."""

    def gather_into(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None:
        """Fill `buffer` with the ranges [start, start + length) one behind another, or raise as `read_into` does."""

    def read_direct(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """`read_into`, of what is not in the page cache and need not be there behind it."""

    def read_hashed(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        block_bytes: int,
        address: int,
        around: bool = False,
        etag: str | None = None,
    ) -> Hashed | None:
        """`read_into`, or `read_direct`, and the hash of every `block_bytes` from `start` on, made while they lie in the CPU's
        cache. `address` is that of a C function, `uint64_t (const void *, size_t)`. None: nothing is read, as it cannot do
        that here."""
