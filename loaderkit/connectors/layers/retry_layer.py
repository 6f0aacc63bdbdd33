"""Retries another connector: files on a network disk (EIO, ESTALE), filesystems of fsspec, a user's connector.

With a timeout each read runs in a pool thread and fills separate memory: a read that hangs is abandoned and never writes to
the caller's buffer, which may hold other bytes by then. Without a timeout there is no thread and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from loaderkit.connectors.base import (
    BulkReads,
    Connector,
    ConnectorLayer,
    ObjectInfo,
    ObjectWriter,
    Ranges,
    ReadMany,
    Writes,
    bulk_of,
    local_path_of,
    modified_s_of,
)
from loaderkit.connectors.call_pool import CallPool
from loaderkit.connectors.retries import Retries, RetryPolicy
from loaderkit.connectors.writing import WriterLayer, WritesLayer
from loaderkit.errors import RequestTimeoutError, TemporaryError

T = TypeVar("T")
_Offsets = list[int]  # in a class with a method `list` that name means the method
_NUM_THREADS = 64
_NUM_LISTED = 1000
_LISTING_PATIENCE = 30  # timeouts; fsspec lists all pages in one call


class RetryConnector(ConnectorLayer):
    """`inner`, retried after each `TemporaryError`.

    `timeout_s` bounds one attempt; None means no bound. With a bound there are no faster reads, as each read needs a
    thread. Faster reads do not pass through `read_into`, so a subclass that overrides it overrides `bulk`, too.
    """

    def __init__(
        self, inner: Connector, policy: RetryPolicy, timeout_s: float | None = None, *, owns_inner: bool = True
    ) -> None:
        super().__init__(inner)
        self._policy, self._timeout_s, self._owns_inner = policy, timeout_s, owns_inner
        self._retries = Retries(policy)
        self._call_pool = None if timeout_s is None else CallPool(self, _NUM_THREADS, "loaderkit-read")

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), owns_inner=self._owns_inner)
        return make, (self.inner, self._policy, self._timeout_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The listing of `inner`; after a failure it is restarted, and skips what was yielded already."""
        listing = _Listing(self.inner, prefix)
        where = f"{self.inner.describe(prefix)}*"
        while infos := self._retries(lambda: self._bounded(listing.step, where, _LISTING_PATIENCE)):
            yield from infos
            listing.last = _sort_key(infos[-1])

    def stat(self, key: str) -> ObjectInfo:
        """The answer of `inner`."""
        return self._retries(lambda: self._bounded(lambda: self.inner.stat(key), self.inner.describe(key)))

    def modified_s(self, key: str) -> float | None:
        """The time that `inner` gives."""
        return self._retries(lambda: self._bounded(lambda: modified_s_of(self.inner, key), self.inner.describe(key)))

    def local_path(self) -> str | None:
        """That of `inner`, whose listing this is."""
        return local_path_of(self.inner)

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
        """The result of `function`. Raises RequestTimeoutError after `patience` timeouts."""
        if self._timeout_s is None or self._call_pool is None:
            return function()
        timeout_s = self._timeout_s * patience
        call = self._call_pool.begin(lambda call: function())
        try:
            return call.wait(timeout_s)
        except TimeoutError as error:
            if isinstance(error, TemporaryError):
                raise
            raise RequestTimeoutError(
                f"{where}: no answer within {timeout_s:g} s, so the read was cancelled; source.retry.timeout allows more"
            ) from None
        finally:
            call.cancel()  # after Ctrl-C this abandons its thread

    def bulk(self) -> BulkReads:
        """The faster reads of `inner`, retried; none with a timeout."""
        if self._timeout_s is not None:
            return BulkReads()
        inner = bulk_of(self.inner)
        return BulkReads(
            read_many=inner.read_many and partial(self._read_many, inner.read_many),
            gather_into=inner.gather_into and self._retried(inner.gather_into),
            read_direct=inner.read_direct and self._retried(inner.read_direct),
            read_hashed=inner.read_hashed and self._retried(inner.read_hashed),
            scatter_into=inner.scatter_into and self._retried(inner.scatter_into),
            map_object=inner.map_object and self._retried(inner.map_object),
        )

    def _retried(self, read: Callable[..., T]) -> Callable[..., T]:
        return lambda *arguments, **options: self._retries(lambda: read(*arguments, **options))

    def _read_many(
        self, read_many: ReadMany, ranges: Ranges, offsets: _Offsets, buffer: memoryview
    ) -> Mapping[int, Exception]:
        """`read_many`; ranges that failed with a TemporaryError are retried one by one."""
        errors = dict(read_many(ranges, offsets, buffer))
        for number in [number for number, error in errors.items() if isinstance(error, TemporaryError)]:
            part = buffer[offsets[number] : offsets[number] + ranges.lengths[number]]
            try:
                self.read_into(ranges.keys[number], ranges.starts[number], part, etag=ranges.etags[number])
                del errors[number]
            except Exception as error:
                errors[number] = error
        return errors

    def writes(self) -> Writes | None:
        """The writing side of `inner`, retried; each call is atomic or can be repeated. `timeout_s` does not bound it:
        an abandoned write would continue to read the caller's memory."""
        inner = super().writes()
        return inner and _RetryWrites(inner, self._retries)

    def counters(self) -> dict[str, float]:
        """The counters of `inner`, with retries and timeouts added."""
        counts = super().counters()
        counts["num_retries"] = counts.get("num_retries", 0) + self._retries.num_retries
        num_timeouts = 0 if self._call_pool is None else self._call_pool.num_timeouts
        counts["num_timeouts"] = counts.get("num_timeouts", 0) + num_timeouts
        return counts

    def close(self) -> None:
        """Cancel calls that hang or wait; close `inner` if this connector owns it."""
        self._retries.stop()
        if self._call_pool is not None:
            self._call_pool.close()
        self._retries.resume()
        if self._owns_inner:
            self.inner.close()


class _RetryWrites(WritesLayer):
    """`inner`, retried after each `TemporaryError`."""

    def __init__(self, inner: Writes, retries: Retries) -> None:
        super().__init__(inner)
        self._retries = retries

    def create(self, key: str, size: int) -> ObjectWriter:
        return _RetryWriter(self._retries(lambda: self.inner.create(key, size)), self._retries)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        return self._retries(lambda: self.inner.put(key, data))

    def delete(self, key: str) -> None:
        self._retries(lambda: self.inner.delete(key))

    def rename(self, prefix: str, new_prefix: str) -> bool:
        return self._retries(lambda: self.inner.rename(prefix, new_prefix))

    def sync(self, prefix: str) -> None:
        self._retries(lambda: self.inner.sync(prefix))

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        self._retries(lambda: self.inner.clear(prefix, deep=deep))


class _RetryWriter(WriterLayer):
    """`inner`, retried after each `TemporaryError`."""

    def __init__(self, inner: ObjectWriter, retries: Retries) -> None:
        super().__init__(inner)
        self._retries = retries

    def write(self, start: int, data: memoryview) -> None:
        self._retries(lambda: self.inner.write(start, data))

    def commit(self) -> ObjectInfo:
        return self._retries(self.inner.commit)

    def abort(self) -> None:
        self._retries(self.inner.abort)


class _Listing:
    """A listing in batches; after a failure it is restarted and skips keys up to `last`."""

    def __init__(self, inner: Connector, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix
        self._infos: Iterator[ObjectInfo] | None = None
        self._number = 0
        self.last: bytes | None = None

    def step(self) -> list[ObjectInfo]:
        """The next objects; none at the end."""
        infos, self._infos = self._infos, None  # dropped, in case this step fails or is cancelled
        self._number = number = self._number + 1
        if infos is None:
            last = self.last
            infos = (info for info in self._inner.list(self._prefix) if last is None or _sort_key(info) > last)
        batch = list(islice(infos, _NUM_LISTED))
        if number == self._number:  # else this step was cancelled, and another continues
            self._infos = infos
        return batch


def _sort_key(info: ObjectInfo) -> bytes:
    return info.key.encode("utf-8", "surrogateescape")
