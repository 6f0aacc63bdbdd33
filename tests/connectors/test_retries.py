"""Trying again with growing waits, by a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_for

from loaderkit.connectors.retries import Retries, RetryPolicy
from loaderkit.errors import (
    ChecksumError,
    ClosedError,
    ConnectorError,
    ObjectNotFoundError,
    TemporaryError,
)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


def failing(num_failures: int, error: Callable[[], Exception] = lambda: TemporaryError("away")) -> Callable[[], str]:
    left = iter(range(num_failures))

    def function() -> str:
        if next(left, None) is not None:
            raise error()
        return "found"

    return function


class TestRetries:
    def test_until_it_works(self) -> None:
        time = Time()
        retries = Retries(RetryPolicy(), sleep=time.sleep, clock=time)
        assert retries(failing(4)) == "found"
        assert retries.num_retries == 4
        for number, seconds in enumerate(time.slept_s):
            assert 0.05 * 2**number <= seconds <= 0.1 * 2**number

    def test_only_so_often(self) -> None:
        time = Time()
        retries = Retries(RetryPolicy(max_attempts=3), sleep=time.sleep, clock=time)
        with pytest.raises(TemporaryError, match=r"^away \(tried 3 times in 0\.\d s\)$"):
            retries(failing(9))
        assert len(time.slept_s) == 2

    @given(st.floats(0.01, 100), st.integers(1, 30))
    def test_never_longer_than_allowed(self, total_s: float, max_attempts: int) -> None:
        time = Time()
        retries = Retries(RetryPolicy(total_s, max_attempts), sleep=time.sleep, clock=time)
        with pytest.raises(TemporaryError):
            retries(failing(1000))
        assert time.now_s <= total_s
        assert len(time.slept_s) < max_attempts
        assert all(seconds <= 5.0 for seconds in time.slept_s)

    def test_several_calls_bounded_together(self) -> None:
        time = Time()
        retries = Retries(RetryPolicy(total_s=10, max_attempts=99), sleep=time.sleep, clock=time)
        begin_s = retries.now_s()
        time.now_s = 9.99
        with pytest.raises(TemporaryError):
            retries(failing(9), begin_s)
        assert time.now_s <= 10

    def test_other_errors_at_once(self) -> None:
        retries = Retries(RetryPolicy(), sleep=lambda seconds: pytest.fail("it slept"))
        for error in (ObjectNotFoundError("x"), ConnectorError("x"), ValueError("x")):
            with pytest.raises(type(error)):
                retries(failing(1, lambda error=error: error))  # type: ignore[misc]

    def test_bytes_that_are_wrong_are_not_asked_for_often(self) -> None:
        time = Time()
        retries = Retries(RetryPolicy(), sleep=time.sleep, clock=time)
        with pytest.raises(ChecksumError, match="tried 3 times"):
            retries(failing(99, lambda: ChecksumError("wrong")))

    def test_stopped_it_gives_up(self) -> None:
        retries = Retries(RetryPolicy(total_s=1000, max_attempts=1000, first_wait_s=500))

        def stop() -> None:
            wait_for(lambda: retries.num_retries == 1)  # it rests, for 5 s unless it is woken
            retries.stop()
            retries.resume()

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(ClosedError):
            retries(failing(99))
        thread.join()
        retries.stop()
        with pytest.raises(TemporaryError, match="tried 1 times"):
            retries(failing(99))

    def test_closed_while_it_was_tried_first(self) -> None:
        retries, num_tries = Retries(RetryPolicy()), []

        def fail() -> None:
            num_tries.append(1)
            retries.stop()
            retries.resume()
            raise TemporaryError("away")

        with pytest.raises(ClosedError):
            retries(fail)
        assert len(num_tries) == 1
