"""The collector is off while somebody is inside, and afterwards as it was before."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from loaderkit.garbage import collected_later


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@collected_later
def nested(depth: int) -> bool:
    """Whether the collector is on anywhere inside."""
    return gc.isenabled() or (depth > 0 and nested(depth - 1)) or gc.isenabled()


@pytest.mark.parametrize("was_on", [True, False])
def test_off_inside_and_then_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    assert not nested(3)
    assert gc.isenabled() is was_on


def test_an_error_leaves_it_as_it_was() -> None:
    @collected_later
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert gc.isenabled()


def test_threads_come_and_go() -> None:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    was_on: list[bool] = []
    try:
        threads = [threading.Thread(target=lambda: was_on.extend(nested(1) for _ in range(3000))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert len(was_on) == 12_000
    assert not any(was_on)
    assert gc.isenabled()


def test_a_fork_has_it_as_it_was_before_another_thread_went_in() -> None:
    is_in, may_go = threading.Event(), threading.Event()

    @collected_later
    def stay() -> None:
        is_in.set()
        may_go.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    is_in.wait(60)
    assert not gc.isenabled()
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() and not nested(1) and gc.isenabled() else 1)
    may_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()
