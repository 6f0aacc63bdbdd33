"""Another connector's reads tried again: files on a network disk (EIO, ESTALE), filesystems of fsspec, a connector of yours.

With a timeout every read is made by a thread of its own into memory of its own, so that one that hangs can be given up
without its ever writing to memory that has become another one's. Without one there is no thread and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.backoff import Retries, RetryPolicy
from loaderkit.connectors.base import Connector, Hashed, ObjectInfo, Ranges
from loaderkit.connectors.call_pool import CallPool
from loaderkit.connectors.ranges import bulk_method
from loaderkit.errors import RequestTimeoutError, TemporaryError

T = TypeVar("T")
_NUM_HANDS = 64
_NUM_LISTED = 1000
_LISTING_PATIENCE = 30  # fsspec lists in one call, however many pages that takes


class RetryConnector:
    """What `inner` has; what it raises as `TemporaryError` is tried again. Use `with_retries` to make one.

    `timeout_s` bounds one try; None: it may take as long as it takes.
    """

    def __init__(
        self, inner: Connector, policy: RetryPolicy, timeout_s: float | None = None, *, owns_inner: bool = True
    ) -> None:
        self.inner = inner
        self.is_remote = getattr(inner, "is_remote", False)
        self.coalesce_gap = getattr(inner, "coalesce_gap", 2**20)
        self.split_read_size = getattr(inner, "split_read_size", 0)
        self.store = getattr(inner, "store", "")
        self._policy, self._timeout_s, self._owns_inner = policy, timeout_s, owns_inner
        self._retries = Retries(policy)
        self._call_pool = CallPool(self, _NUM_HANDS, "loaderkit-read")

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.inner, self._policy, self._timeout_s, self._owns_inner)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """What `inner` lists; begun again where it failed, without what was given already."""
        listing = _Listing(self.inner, prefix)
        where = f"{self.inner.describe(prefix)}*"
        while found := self._retries(lambda: self._bounded(listing.step, where, _LISTING_PATIENCE)):
            yield from found
            listing.last = _order(found[-1])

    def stat(self, key: str) -> ObjectInfo:
        """What `inner` says."""
        return self._retries(lambda: self._bounded(lambda: self.inner.stat(key), self.inner.describe(key)))

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        self._retries(lambda: self._read(key, start, buffer, etag))

    def _read(self, key: str, start: int, buffer: memoryview, etag: str | None) -> None:
        if self._timeout_s is None:
            self.inner.read_into(key, start, buffer, etag=etag)
            return

        def read() -> memoryview:
            memory = np.empty(len(buffer), np.uint8).data
            self.inner.read_into(key, start, memory, etag=etag)
            return memory

        buffer[:] = self._bounded(read, self.inner.describe(key))

    def _bounded(self, function: Callable[[], T], where: str, patience: int = 1) -> T:
        """What `function` returns, if it does within so many times the timeout."""
        if self._timeout_s is None:
            return function()
        timeout_s = self._timeout_s * patience
        call = self._call_pool.begin(lambda call: function())
        try:
            return call.wait(timeout_s)
        except TimeoutError as error:
            if isinstance(error, TemporaryError):
                raise
            raise RequestTimeoutError(
                f"{where}: nothing came for {timeout_s:g} s, so the read was given up; source.retry.timeout allows more"
            ) from None
        finally:
            call.give_up()  # Ctrl-C: its thread is written off

    def describe(self, key: str) -> str:
        """Its name in the store."""
        return self.inner.describe(key)

    def counters(self) -> dict[str, float]:
        """The store's, and what was tried again."""
        found = dict(getattr(self.inner, "counters", dict)())
        found["num_retries"] = found.get("num_retries", 0) + self._retries.num_retries
        found["num_timeouts"] = found.get("num_timeouts", 0) + self._call_pool.num_timeouts
        return found

    def close(self) -> None:
        """Give up what hangs or waits; close `inner`, if it is this one's."""
        self._retries.stop()
        self._call_pool.close()
        self._retries.resume()
        if self._owns_inner:
            self.inner.close()


class BulkRetryConnector(RetryConnector):
    """The same for a connector that reads many ranges together."""

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        super().read_into(key, start, buffer, etag=etag)

    def read_many(self, ranges: Ranges, offsets: list[int], buffer: memoryview) -> Mapping[int, Exception]:
        """Read every range to its offset; those that failed for the moment are tried again one by one."""
        inner: Any = self.inner
        errors = dict(inner.read_many(ranges, offsets, buffer))
        for number in [number for number, error in errors.items() if isinstance(error, TemporaryError)]:
            part = buffer[offsets[number] : offsets[number] + ranges.lengths[number]]
            try:
                self.read_into(ranges.keys[number], ranges.starts[number], part, etag=ranges.etags[number])
                del errors[number]
            except Exception as error:
                errors[number] = error
        return errors

    def gather_into(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None:
        """Fill `buffer` with the ranges [start, start + length) one behind another, or raise as `read_into` does."""
        inner: Any = self.inner
        self._retries(lambda: inner.gather_into(key, starts, length, buffer, etag=etag))

    def read_direct(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """`read_into` past the page cache, if `inner` can."""
        read: Callable[..., None] = bulk_method(self.inner, "read_direct") or self.inner.read_into
        self._retries(lambda: read(key, start, buffer, etag=etag))

    def read_hashed(
        self, key: str, start: int, buffer: memoryview, *, etag: str | None = None, **how: Any
    ) -> Hashed | None:
        """What `inner` does; None if it has no such method."""
        read: Callable[..., Hashed | None] | None = bulk_method(self.inner, "read_hashed")
        if read is None:
            return None
        if bulk_method(self.inner, "read_direct") is None:
            how.pop("around", None)  # it knows no other way, and may not know the word
        return self._retries(lambda: read(key, start, buffer, etag=etag, **how))


class _Listing:
    """A listing, some at a time; after a failure it is begun again behind what was given, which is `last`."""

    def __init__(self, inner: Connector, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix
        self._infos: Iterator[ObjectInfo] | None = None
        self._number = 0
        self.last: bytes | None = None

    def step(self) -> list[ObjectInfo]:
        """The next ones; none at the end."""
        infos, self._infos = self._infos, None  # gone, should this fail or be given up
        self._number = number = self._number + 1
        if infos is None:
            last = self.last
            infos = (info for info in self._inner.list(self._prefix) if last is None or _order(info) > last)
        found = list(islice(infos, _NUM_LISTED))
        if number == self._number:  # else this one was given up, and another goes on
            self._infos = infos
        return found


def _order(info: ObjectInfo) -> bytes:
    return info.key.encode("utf-8", "surrogateescape")


def with_retries(
    inner: Connector, policy: RetryPolicy, timeout_s: float | None = None, *, owns_inner: bool = True
) -> RetryConnector:
    """`inner` with its temporary failures tried again; its ways to read many ranges together are kept if nothing is timed."""
    is_bulk = timeout_s is None and all(bulk_method(inner, name) for name in ("read_many", "gather_into"))
    kind = BulkRetryConnector if is_bulk else RetryConnector
    return kind(inner, policy, timeout_s, owns_inner=owns_inner)


def _remade(
    kind: type[RetryConnector], inner: Connector, policy: RetryPolicy, timeout_s: float | None, owns_inner: bool
) -> RetryConnector:
    return kind(inner, policy, timeout_s, owns_inner=owns_inner)
