"""Single requests to a bucket, each made in a thread that can be abandoned, with retries."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.call_pool import Call, CallPool
from loaderkit.connectors.retries import Retries, RetryPolicy
from loaderkit.connectors.s3.client import Client
from loaderkit.connectors.s3.config import ClientSettings, S3Location
from loaderkit.connectors.s3.errors import translate
from loaderkit.errors import ExpiredCredentialsError, RequestTimeoutError

T = TypeVar("T")
_MOST_RENEWALS = 3  # of one request, even if the credentials written are expired again


class _RenewedError(ExpiredCredentialsError):
    """The credentials have expired, and newer ones are on disk."""


def _credentials() -> tuple[int, int, int] | None:
    """Identifies the credentials on disk by the file's inode number, mtime and size: an edited or replaced file differs, and
    no clocks are compared."""
    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    with suppress(OSError):
        status = os.stat(os.path.expanduser(path))
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


class Requests:
    """The requests to one bucket. Each process creates its client on first use."""

    def __init__(
        self, location: S3Location, settings: ClientSettings, *, connections: int, policy: RetryPolicy, timeout_s: float
    ) -> None:
        self._location = location
        self._settings = settings
        self._timeout_s = timeout_s
        self.retries = Retries(policy)
        self.store = settings.endpoint or f"S3 in {settings.region}"
        self.num_requests = 0
        self.fetched_bytes = 0
        self.answer_s = float("inf")  # shortest time of a request without a body: the distance to the store
        self.first_byte_s = self.body_s = 0.0  # summed over all reads: time to the first byte, and of the body
        self.by_key: dict[str, list[float]] | None = None  # the same two by key, while objects are timed
        self._lock = threading.Lock()
        self._call_pool = CallPool(self, connections, f"loaderkit-s3-{location.bucket}"[:40])
        self._client: Client | None = None
        self._pid = os.getpid()
        self._credentials: tuple[int, int, int] | None = None  # those on disk when the client was created

    def ask(
        self,
        request: Callable[[Client, Call[T]], T],
        where: str,
        *,
        begin_s: float | None = None,
        patience: float = 1.0,
    ) -> T:
        """The answer to a request about `where`, with retries. Raises ConnectorError.

        `begin_s` is when the read it is part of began; `patience` multiplies the timeout.
        """
        return self.renewing(lambda: self.retries(lambda: self.finish(self.begin(request), where, patience), begin_s))

    def once(self, request: Callable[[Client, Call[T]], T], where: str) -> T:
        """`ask` without retries, except with newer credentials."""
        return self.renewing(lambda: self.finish(self.begin(request), where))

    def renewing(self, function: Callable[[], T]) -> T:
        """The result of `function`, which waits for requests; it is called again after a renewal of the credentials."""
        num_left = _MOST_RENEWALS
        while True:
            try:
                return function()
            except _RenewedError as error:
                if not num_left:
                    raise ExpiredCredentialsError(str(error)) from None
                num_left -= 1

    def gets(self, key: str, targets: Iterable[tuple[int, memoryview]]) -> list[Call[int]]:
        """One unstarted request for [start, start + len(target)) for each (start, target); each writes to its target and
        returns the number of bytes received."""
        client = self._client_here()
        targets = list(targets)
        is_part = len(targets) > 1
        gets = [
            partial(self._get, client, key, start, np.frombuffer(target, np.uint8), is_part=is_part)
            for start, target in targets
        ]
        calls = [Call(get, self._call_pool, client) for get in gets]
        for call in calls:
            call.timeout_s = self._timeout_s
        return calls

    def begin_gets(self, calls: Sequence[Call[int]], at_once: int) -> None:
        """Start the requests, `at_once` of them at a time. One that fails or is short keeps its slot until `pass_on`.

        If this raises or is interrupted, some may have begun: cancel them all.
        """
        self._call_pool.begin_all(calls, at_once)

    def pass_on(self, call: Call[int]) -> None:
        """Release the slot of `call`, whose bytes have come after retries."""
        self._call_pool.pass_on(call)

    def _get(
        self, client: Client, key: str, start: int, memory: NDArray[np.uint8], call: Call[int], *, is_part: bool
    ) -> int:
        """`memory` is an array because NumPy copies without the GIL, unlike a memoryview."""
        self._count()
        num_read = 0
        begin_s = first_s = time.perf_counter()
        for chunk in client.stream(key, start, start + len(memory), is_part=is_part):
            if num_read == 0:
                first_s = time.perf_counter()
            num_copied = min(len(chunk), len(memory) - num_read)
            call.write(memory[num_read : num_read + num_copied], np.frombuffer(chunk, np.uint8, num_copied))
            num_read += num_copied
            if num_read == len(memory):
                break  # the end of the answer would arrive later
        call.keeps_turn = num_read < len(memory)
        self._note(key, first_s - begin_s, time.perf_counter() - first_s)
        return num_read

    def _note(self, key: str, first_byte_s: float, body_s: float) -> None:
        """Add a read's times to the totals."""
        with self._lock:
            self.first_byte_s += first_byte_s
            self.body_s += body_s
            if self.by_key is not None:
                times = self.by_key.setdefault(key, [0.0, 0.0])
                times[0] += first_byte_s
                times[1] += body_s

    def finish_get(self, call: Call[int], where: str) -> int:
        """Wait for one of `gets`; returns its number of bytes. Raises ConnectorError."""
        num_read = self.finish(call, where)
        with self._lock:
            self.fetched_bytes += num_read
        return num_read

    def begin(self, request: Callable[[Client, Call[T]], T]) -> Call[T]:
        """Start a request; `finish` waits for it."""
        client = self._client_here()

        def ask(call: Call[T]) -> T:
            self._count()
            begin_s = time.perf_counter()
            answer = request(client, call)
            self.answer_s = min(self.answer_s, time.perf_counter() - begin_s)
            return answer

        return self._call_pool.begin(ask, origin=client)

    def _count(self) -> None:
        with self._lock:
            self.num_requests += 1

    def finish(self, call: Call[T], where: str, patience: float = 1.0) -> T:
        """The answer. Raises ConnectorError, as this is where the client's errors are translated."""
        timeout_s = self._timeout_s * patience
        try:
            return call.wait(timeout_s)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{where}: no answer from {self.store} for {timeout_s:g} s: it is overloaded, or the network loses packets; "
                f"source.retry.timeout allows more{f' ({error})' if str(error) else ''}"
            ) from None
        except BaseException as error:
            call.cancel()  # after Ctrl-C the thread must not write any more
            if type(error).__name__ != "S3Exception":
                raise
            translated = translate(str(error), where, self.store)
            if isinstance(translated, ExpiredCredentialsError):
                if self._renew(call.origin):
                    raise _RenewedError(str(translated)) from None
                # The client takes up to 3 s to fail a request, and the requests of other threads would fail alike.
                self._call_pool.fail(partial(type(error), str(error)), call.origin)
            raise translated from None

    @property
    def num_timeouts(self) -> int:
        """Requests cancelled after a timeout."""
        return self._call_pool.num_timeouts

    def _client_here(self) -> Client:
        """The client of this process."""
        self._reset_after_fork()
        with self._lock:
            return self._client or self._make_client()

    def _make_client(self) -> Client:
        self._credentials = _credentials()
        self._client = Client(self._location, self._settings)
        return self._client

    def _reset_after_fork(self) -> None:
        """In a forked child drop the client, which must not cross a fork, and the lock, which a thread may have held."""
        if self._pid != os.getpid():
            self._lock, self._client, self._pid = threading.Lock(), None, os.getpid()

    def _renew(self, client: object) -> bool:
        """True if there are newer credentials than `client` has; the current client then uses them."""
        with self._lock:
            if client is self._client and _credentials() not in (None, self._credentials):
                self._make_client()
            return self._client is not None and client is not self._client  # None while closing

    def close(self) -> None:
        """Cancel requests in progress and drop client and threads; the next request creates new ones."""
        self._reset_after_fork()
        with self._lock:
            self._client = None
        self.retries.stop()
        self._call_pool.close()
        self.retries.resume()
