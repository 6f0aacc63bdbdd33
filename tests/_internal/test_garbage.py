"""The collector is off while a thread is inside, and afterwards as it was before."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from thread_switches import race

from loaderkit._internal.garbage import collector_off


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert is_on()
    before = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*before)


def is_on() -> bool:
    return gc.isenabled() and gc.get_threshold()[0] > 0


@collector_off()
def nested(depth: int) -> bool:
    """Whether the collector is on anywhere inside."""
    return is_on() or (depth > 0 and nested(depth - 1)) or is_on()


@collector_off()
def call(function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.parametrize("was_on", [True, False])
def test_off_inside_and_then_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    assert not nested(3)
    assert is_on() is was_on


def test_what_another_thread_sets_meanwhile_holds_afterwards() -> None:
    def in_another_thread(change: Callable[[], None]) -> None:
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()

    before = gc.get_threshold()
    call(lambda: in_another_thread(gc.disable))
    assert not gc.isenabled()
    assert gc.get_threshold() == before
    gc.enable()
    call(lambda: in_another_thread(lambda: gc.set_threshold(1234, 5, 6)))
    assert gc.isenabled()
    assert gc.get_threshold()[0] == 1234


def test_an_error_leaves_it_as_it_was_though_it_is_kept() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        call(fail)
    assert is_on()
    assert caught.tb is not None


def test_a_collection_right_afterwards_may_go_in_itself() -> None:
    """A destructor that does so, at the first object that is made once the collector is on again."""
    seen: list[bool] = []

    class Cyclic:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            seen.append(nested(1))

    for _ in range(5):
        call(lambda: [Cyclic(), [(n, n, n) for n in range(20_000)]])
        kept = [(n,) for n in range(2000)]
        assert len(kept) == 2000
    gc.collect()
    assert seen == [False] * 5
    assert is_on()


def test_threads_come_and_go() -> None:
    race(lambda _: [nested(1) for _ in range(3000)])
    assert is_on()


def in_a_fork(look: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if look() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_it_as_it_was_before_another_thread_went_in() -> None:
    is_in, may_go = threading.Event(), threading.Event()

    def stay() -> None:
        is_in.set()
        may_go.wait(60)

    thread = threading.Thread(target=call, args=(stay,), daemon=True)
    thread.start()
    try:
        assert is_in.wait(60)
        assert not is_on()
        assert in_a_fork(lambda: is_on() and not nested(1) and is_on())
    finally:
        may_go.set()
        thread.join()
    assert is_on()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_by_who_is_inside() -> None:
    def fork() -> bool:
        return in_a_fork(lambda: not nested(1) and is_on())

    assert call(fork)
    assert is_on()
