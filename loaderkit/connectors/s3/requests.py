"""Single requests to a bucket, each made by a thread that can be abandoned, and tried again while that may help."""

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

from loaderkit.connectors.backoff import Retries, RetryPolicy
from loaderkit.connectors.call_pool import Call, CallPool
from loaderkit.connectors.s3.client import Client
from loaderkit.connectors.s3.config import Reach, S3Location
from loaderkit.connectors.s3.errors import translate
from loaderkit.errors import ExpiredCredentialsError, RequestTimeoutError

T = TypeVar("T")
_MOST_RENEWALS = 3  # of one request, also if expired credentials are written again and again


class _RenewedError(ExpiredCredentialsError):
    """They have expired, and there are newer ones."""


def _credentials() -> tuple[int, int, int] | None:
    """Which credentials lie on disk: the file's number, and when and how long it was written. No clock is compared with
    another; a file that is moved into place is another one, too."""
    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    with suppress(OSError):
        about = os.stat(os.path.expanduser(path))
        return about.st_ino, about.st_mtime_ns, about.st_size
    return None


class Requests:
    """The requests to one bucket. The client is made when it is first needed, once in every process."""

    def __init__(
        self, place: S3Location, reach: Reach, *, connections: int, policy: RetryPolicy, timeout_s: float
    ) -> None:
        self._place = place
        self._reach = reach
        self._timeout_s = timeout_s
        self.retries = Retries(policy)
        self.store = reach.endpoint or f"S3 in {reach.region}"
        self.num_requests = 0
        self.fetched_bytes = 0
        self.answer_s = float("inf")  # of a request that asks for no bytes, at the least: how far away the store is
        self.first_byte_s = self.body_s = 0.0  # of reads, all together: until the first bytes came, and from then on
        self.by_key: dict[str, list[float]] | None = None  # key -> the same two, while a report wants to know
        self._lock = threading.Lock()
        self._call_pool = CallPool(self, connections, f"loaderkit-s3-{place.bucket}"[:40])
        self._client: Client | None = None
        self._pid = os.getpid()
        self._credentials: tuple[int, int, int] | None = None  # what there was on disk when the client was made

    def ask(
        self,
        request: Callable[[Client, Call[T]], T],
        where: str,
        *,
        begin_s: float | None = None,
        patience: float = 1.0,
    ) -> T:
        """The answer to a request about `where`, tried again as need be. Raises ConnectorError.

        `begin_s`: when what it is part of was begun; `patience`: times the usual timeout.
        """
        return self.renewing(lambda: self.retries(lambda: self.finish(self.begin(request), where, patience), begin_s))

    def once(self, request: Callable[[Client, Call[T]], T], where: str) -> T:
        """The same, tried once; again only with newer credentials."""
        return self.renewing(lambda: self.finish(self.begin(request), where))

    def renewing(self, function: Callable[[], T]) -> T:
        """What `function` returns, which waits for requests; called again where newer credentials are there."""
        num_left = _MOST_RENEWALS
        while True:
            try:
                return function()
            except _RenewedError as error:
                if not num_left:
                    raise ExpiredCredentialsError(str(error)) from None
                num_left -= 1

    def gets(self, key: str, targets: Iterable[tuple[int, memoryview]]) -> list[Call[int]]:
        """Requests for [start, start + len(target)) for each (start, target), to be written to the targets, not begun yet; the
        results are how many bytes came."""
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
        """Have them made, `at_once` of them at a time. One that fails, or brings too little, keeps its turn until `pass_on`.

        If this raises, or is interrupted, some may have begun: cancel them all.
        """
        self._call_pool.begin_all(calls, at_once)

    def pass_on(self, call: Call[int]) -> None:
        """What was asked for with `call` has come after all: another one may have its turn."""
        self._call_pool.pass_on(call)

    def _get(
        self, client: Client, key: str, start: int, memory: NDArray[np.uint8], call: Call[int], *, is_part: bool
    ) -> int:
        """`memory` is an array, as that is copied to without the GIL, unlike a memoryview."""
        self._count()
        num_read = 0
        begin_s = first_s = time.perf_counter()
        for piece in client.stream(key, start, start + len(memory), is_part=is_part):
            if num_read == 0:
                first_s = time.perf_counter()
            num_here = min(len(piece), len(memory) - num_read)
            call.write(memory[num_read : num_read + num_here], np.frombuffer(piece, np.uint8, num_here))
            num_read += num_here
            if num_read == len(memory):
                break  # that the answer is over comes a while later
        call.keeps_turn = num_read < len(memory)
        self._note(key, first_s - begin_s, time.perf_counter() - first_s)
        return num_read

    def _note(self, key: str, first_byte_s: float, body_s: float) -> None:
        """A read has come to its end."""
        with self._lock:
            self.first_byte_s += first_byte_s
            self.body_s += body_s
            if self.by_key is not None:
                known = self.by_key.setdefault(key, [0.0, 0.0])
                known[0] += first_byte_s
                known[1] += body_s

    def finish_get(self, call: Call[int], where: str) -> int:
        """Wait for one of `gets`; the number of bytes. Raises ConnectorError."""
        num_read = self.finish(call, where)
        with self._lock:
            self.fetched_bytes += num_read
        return num_read

    def begin(self, request: Callable[[Client, Call[T]], T]) -> Call[T]:
        """Have a request made; it is waited for with `finish`."""
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
                f"{where}: {self.store} said nothing for {timeout_s:g} s: it is overloaded, or the network loses packets; "
                f"source.retry.timeout allows more{f' ({error})' if str(error) else ''}"
            ) from None
        except BaseException as error:
            call.cancel()  # Ctrl-C: what the thread still gets must not be written any more
            if type(error).__name__ != "S3Exception":
                raise
            told = translate(str(error), where, self.store)
            if isinstance(told, ExpiredCredentialsError):
                if self._renew(call.origin):
                    raise _RenewedError(str(told)) from None
                # The client takes up to 3 s to say so of a request, and of those in other threads it would say the same.
                self._call_pool.fail(partial(type(error), str(error)), call.origin)
            raise told from None

    @property
    def num_timeouts(self) -> int:
        """Requests that were given up because they took too long."""
        return self._call_pool.num_timeouts

    def _client_here(self) -> Client:
        """The client, made in this process."""
        self._look_where()
        with self._lock:
            return self._client or self._make_client()

    def _make_client(self) -> Client:
        self._credentials = _credentials()
        self._client = Client(self._place, self._reach)
        return self._client

    def _look_where(self) -> None:
        """In a fork's child another thread may have held the lock when the fork was made, and the client is not to be used."""
        if self._pid != os.getpid():
            self._lock, self._client, self._pid = threading.Lock(), None, os.getpid()

    def _renew(self, client: object) -> bool:
        """Whether there are newer credentials than those of `client`: then there is a client that has them."""
        with self._lock:
            if client is self._client and _credentials() not in (None, self._credentials):
                self._make_client()
            return self._client is not None and client is not self._client  # None: it is being closed

    def close(self) -> None:
        """Give up what is under way and let client and threads go; both are made again when they are needed."""
        self._look_where()
        with self._lock:
            self._client = None
        self.retries.stop()
        self._call_pool.close()
        self.retries.resume()
