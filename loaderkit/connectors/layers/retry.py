"""Another connector's reads tried again: files on a network disk (EIO, ESTALE), filesystems of fsspec, a connector of yours.

With a timeout a thread of its own makes each read, into memory of its own: a read that hangs is abandoned and never writes
to the caller's buffer, which may hold other bytes by then. Without a timeout there is no thread and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from loaderkit.connectors.backoff import Retries, RetryPolicy
from loaderkit.connectors.base import BulkReads, Connector, ObjectInfo, Ranges, ReadMany, bulk_of
from loaderkit.connectors.call_pool import CallPool
from loaderkit.connectors.layers.layer import ConnectorLayer
from loaderkit.errors import RequestTimeoutError, TemporaryError

T = TypeVar("T")
_Offsets = list[int]  # in a class with a method `list` that name means the method
_NUM_THREADS = 64
_NUM_LISTED = 1000
_LISTING_PATIENCE = 30  # fsspec lists in one call, however many pages that takes


class RetryConnector(ConnectorLayer):
    """`inner`, whose `TemporaryError`s are tried again.

    `timeout_s` bounds one attempt; None: no bound. With a bound there are no faster reads, as each read needs a thread.
    """

    def __init__(
        self, inner: Connector, policy: RetryPolicy, timeout_s: float | None = None, *, owns_inner: bool = True
    ) -> None:
        super().__init__(inner)
        self._policy, self._timeout_s, self._owns_inner = policy, timeout_s, owns_inner
        self._retries = Retries(policy)
        self._call_pool = CallPool(self, _NUM_THREADS, "loaderkit-read")

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), owns_inner=self._owns_inner)
        return make, (self.inner, self._policy, self._timeout_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """What `inner` lists; begun again where it failed, without what was given already."""
        listing = _Listing(self.inner, prefix)
        where = f"{self.inner.describe(prefix)}*"
        while infos := self._retries(lambda: self._bounded(listing.step, where, _LISTING_PATIENCE)):
            yield from infos
            listing.last = _order(infos[-1])

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
        """What `function` returns, if it does within `patience` timeouts."""
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
            call.cancel()  # after Ctrl-C its thread is abandoned

    def bulk(self) -> BulkReads:
        """Those of `inner`, tried again."""
        if self._timeout_s is not None:
            return BulkReads()
        inner = bulk_of(self.inner)
        return BulkReads(
            read_many=inner.read_many and partial(self._read_many, inner.read_many),
            gather_into=inner.gather_into and self._retried(inner.gather_into),
            read_direct=inner.read_direct and self._retried(inner.read_direct),
            read_hashed=inner.read_hashed and self._retried(inner.read_hashed),
        )

    def _retried(self, read: Callable[..., T]) -> Callable[..., T]:
        return lambda *arguments, **options: self._retries(lambda: read(*arguments, **options))

    def _read_many(
        self, read_many: ReadMany, ranges: Ranges, offsets: _Offsets, buffer: memoryview
    ) -> Mapping[int, Exception]:
        """`read_many`; the ranges that failed for the moment are tried again one by one."""
        errors = dict(read_many(ranges, offsets, buffer))
        for number in [number for number, error in errors.items() if isinstance(error, TemporaryError)]:
            part = buffer[offsets[number] : offsets[number] + ranges.lengths[number]]
            try:
                self.read_into(ranges.keys[number], ranges.starts[number], part, etag=ranges.etags[number])
                del errors[number]
            except Exception as error:
                errors[number] = error
        return errors

    def counters(self) -> dict[str, float]:
        """What `inner` counts, and what was tried again."""
        counts = super().counters()
        counts["num_retries"] = counts.get("num_retries", 0) + self._retries.num_retries
        counts["num_timeouts"] = counts.get("num_timeouts", 0) + self._call_pool.num_timeouts
        return counts

    def close(self) -> None:
        """Give up what hangs or waits; close `inner`, if it is this one's."""
        self._retries.stop()
        self._call_pool.close()
        self._retries.resume()
        if self._owns_inner:
            self.inner.close()


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
        batch = list(islice(infos, _NUM_LISTED))
        if number == self._number:  # else this step was cancelled, and another continues
            self._infos = infos
        return batch


def _order(info: ObjectInfo) -> bytes:
    return info.key.encode("utf-8", "surrogateescape")
