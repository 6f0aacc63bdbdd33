"""Threads that cannot be begun, because the program ends or for another reason."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from loaderkit._internal.system import program_end
from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit.checkpoint.save.owner import Heartbeat
from loaderkit.connectors.call_pool import Call, CallPool
from loaderkit.ranks.pieces import PieceServer


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be begun."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    event = threading.Event()
    monkeypatch.setattr(program_end, "_ending", event)
    return event


@pytest.mark.usefixtures("refused")
def test_a_system_without_threads_is_no_end(ending: threading.Event) -> None:
    with pytest.raises(RuntimeError, match="can't start") as raised:
        start_thread(threading.Thread())
    assert not isinstance(raised.value, ProgramEndsError)
    ending.set()
    with pytest.raises(ProgramEndsError, match="`close"):
        start_thread(threading.Thread())


def test_the_end_is_known_before_the_threads_of_executors_have_ended() -> None:
    """One of them waits for it."""
    program = """if True:
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from loaderkit._internal.system.program_end import program_ends

        def wait() -> None:
            nap = threading.Event()
            while not program_ends():
                nap.wait(0.01)
            print("ended")

        assert not program_ends()
        ThreadPoolExecutor(1).submit(wait)
    """
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n"


@pytest.mark.usefixtures("refused")
class TestCallPool:
    @pytest.fixture
    def call_pool(self, ending: threading.Event) -> CallPool:
        ending.set()
        return CallPool(self, 2, "test-pool")

    def test_who_waits_for_calls_makes_them(self, call_pool: CallPool) -> None:
        made: list[tuple[int, threading.Thread]] = []

        def note(number: int) -> Callable[[Call[int]], int]:
            def run(call: Call[int]) -> int:
                made.append((number, threading.current_thread()))
                return 10 // number

            return run

        calls = [Call(note(number), call_pool) for number in (5, 2, 1)]
        call_pool.begin_all(calls, 1)
        assert [call.wait(9) for call in calls] == [2, 5, 10]
        assert made == [(number, threading.current_thread()) for number in (5, 2, 1)]
        with pytest.raises(ZeroDivisionError):
            call_pool.begin(note(0)).wait(9)

    def test_one_that_is_cancelled_is_not_made(self, call_pool: CallPool) -> None:
        call = call_pool.begin(lambda call: pytest.fail("made"))
        call_pool.close()
        with pytest.raises(Exception, match="closed"):
            call.wait(9)


@pytest.mark.usefixtures("refused")
def test_what_only_helps_is_left_out(ending: threading.Event) -> None:
    ending.set()
    Heartbeat("attempt", lambda: None).stop()


@pytest.mark.usefixtures("refused")
def test_ranks_that_cannot_send_parts_say_so(ending: threading.Event) -> None:
    ending.set()
    with pytest.raises(ProgramEndsError):
        PieceServer()
