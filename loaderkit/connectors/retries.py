"""Retries failed calls, with growing waits, for a bounded time, and counts the retries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from loaderkit.errors import ChecksumError, ClosedError, TemporaryError

T = TypeVar("T")
_MOST_CHECKSUM_ATTEMPTS = 3


@dataclass(frozen=True)
class RetryPolicy:
    """How often and for how long one call is retried. The n-th wait is between half of and all of first_wait_s * 2^n."""

    total_s: float = 60.0
    max_attempts: int = 10
    first_wait_s: float = 0.1
    most_wait_s: float = 5.0


class Retries:
    """Calls functions until they stop raising `TemporaryError`, as far as a policy allows. Any number of threads at once.

    `sleep` waits for a number of seconds and may return early; `clock` gives the time in seconds. Both are for tests.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.num_retries = 0
        self._lock = threading.Lock()
        self._num_stops = 0
        self._closing = threading.Event()
        self._sleep = sleep or self._closing.wait
        self._clock = clock

    def now_s(self) -> float:
        """The current time, as the common `begin_s` of several calls that share one bound."""
        return self._clock()

    def __call__(self, function: Callable[[], T], begin_s: float | None = None) -> T:
        """The result of `function`. Raises its last TemporaryError, with the number of attempts, when the policy's limits are
        reached; any other error at once. Without an error the overhead is 0.5 us."""
        begin_s = self._clock() if begin_s is None else begin_s
        num_stops = self._num_stops
        try:
            return function()
        except TemporaryError as error:
            if self.policy.max_attempts == 1:
                raise
            return self._again(function, error, begin_s, num_stops)

    def stop(self) -> None:
        """End all calls in progress; those that wait raise ClosedError. Until `resume`, new calls try once."""
        self._num_stops += 1
        self._closing.set()

    def resume(self) -> None:
        """Undo `stop`."""
        self._closing.clear()

    def _again(self, function: Callable[[], T], error: TemporaryError, begin_s: float, num_stops: int) -> T:
        num_attempts = 1
        while True:
            wait_s, took_s = self._wait_s(num_attempts), self._clock() - begin_s
            # Data that is damaged in the store stays damaged.
            most = _MOST_CHECKSUM_ATTEMPTS if isinstance(error, ChecksumError) else num_attempts + 1
            is_late = took_s + wait_s > self.policy.total_s
            if is_late or num_attempts >= min(most, self.policy.max_attempts) or self._closing.is_set():
                error.args = (f"{error} (tried {num_attempts} times in {took_s:.1f} s)", *error.args[1:])
                raise error
            with self._lock:
                self.num_retries += 1
            self._sleep(wait_s)
            if self._num_stops != num_stops:  # `function` would reopen what is being closed
                raise ClosedError("the connector was closed during a retry")
            num_attempts += 1
            try:
                return function()
            except TemporaryError as again:
                error = again

    def _wait_s(self, number: int) -> float:
        longest_s = min(self.policy.most_wait_s, self.policy.first_wait_s * 2.0 ** (number - 1))
        # Jitter, so that ranks do not retry together; not from the generator that the user's functions share.
        return longest_s * (0.5 + 0.5 * random.SystemRandom().random())
