"""Calls that hang are cancelled, and what they bring later is written nowhere."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from waiting import join_threads

from loaderkit.connectors.call_pool import Call, CallPool
from loaderkit.errors import (
    ClosedError,
)


def begun(call_pool: CallPool, functions: list[Callable[[Call[Any]], Any]], at_once: int) -> list[Call[Any]]:
    calls = [Call(function, call_pool) for function in functions]
    call_pool.begin_all(calls, at_once)
    return calls


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


class TestCallPool:
    @pytest.fixture
    def call_pool(self) -> Iterator[CallPool]:
        call_pool = CallPool(self, 2, "test-pool")
        yield call_pool
        call_pool.close()
        join_threads("test-pool")

    def test_results_and_errors(self, call_pool: CallPool) -> None:
        calls = [call_pool.begin(lambda call, number=number: 10 // number) for number in (5, 2, 0, 1)]  # type: ignore[misc]
        assert [calls[0].wait(9), calls[1].wait(9), calls[3].wait(9)] == [2, 5, 10]
        with pytest.raises(ZeroDivisionError):
            calls[2].wait(9)
        assert len(threads_named("test-pool")) <= 2

    def test_what_hangs_is_cancelled_and_writes_nothing(self, call_pool: CallPool) -> None:
        release, ended = threading.Event(), threading.Event()
        memory = bytearray(3)

        def hang(call: Call[None]) -> None:
            release.wait()
            try:
                call.write(memoryview(memory), b"bad")
            finally:
                ended.set()

        stuck = [call_pool.begin(hang) for _ in range(2)]
        waiting = call_pool.begin(lambda call: "done")
        for call in stuck:
            with pytest.raises(TimeoutError):
                call.wait(0.02)
        assert call_pool.num_abandoned == 2
        assert waiting.wait(0.5) == "done"  # by a thread in the place of one that is stuck
        release.set()
        ended.wait()
        assert memory == bytearray(3)

    def test_what_one_is_told_may_end_all(self, call_pool: CallPool) -> None:
        release, memory = threading.Event(), bytearray(3)

        def hang(call: Call[None]) -> None:
            release.wait()
            call.write(memoryview(memory), b"bad")

        under_way = [call_pool.begin(hang, "old") for _ in range(3)]  # two threads have begun with theirs
        newer = call_pool.begin(lambda call: "new", "new")
        call_pool.fail(lambda: ValueError("expired"), "old")
        errors = []
        for call in under_way:
            with pytest.raises(ValueError, match="expired") as caught:
                call.wait(60)
            errors.append(caught.value)
        assert len({*map(id, errors)}) == 3, "one that several threads raise would collect their stacks"
        release.set()
        assert newer.wait(60) == "new"
        assert memory == bytearray(3)

    def test_what_goes_on_has_all_the_time(self) -> None:
        now_s = 0.0
        call_pool = CallPool(self, 1, "test-pool", clock=lambda: now_s)

        def slow(call: Call[str]) -> str:
            nonlocal now_s
            for _ in range(5):
                now_s += 0.9
                call.check_cancelled()
            return "done"

        assert call_pool.begin(slow).wait(1.0) == "done"
        call_pool.close()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("can't start new thread")])
    def test_a_thread_that_does_not_start_takes_no_place(
        self, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | BaseException
    ) -> None:
        def refuse(thread: threading.Thread) -> None:
            raise error

        call_pool, done = CallPool(self, 1, "test-pool"), []
        with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, RuntimeError)):
            patched.setattr(threading.Thread, "start", refuse)
            call_pool.begin(lambda call: done.append(1))
        assert call_pool.begin(lambda call: "done").wait(60) == "done"
        call_pool.close()
        assert not done

    def test_closing_tells_who_waits(self) -> None:
        call_pool = CallPool(self, 1, "test-pool", join_s=0.01)
        release = threading.Event()
        calls = [call_pool.begin(lambda call: release.wait()) for _ in range(3)]
        call_pool.close()
        for call in calls:
            with pytest.raises(ClosedError):
                call.wait(60)
        release.set()

    def test_several_a_few_at_a_time(self) -> None:
        call_pool, lock, num_now, most = CallPool(self, 9, "test-pool"), threading.Lock(), 0, 0

        def work(number: int, call: Call[int]) -> int:
            nonlocal num_now, most
            with lock:
                num_now += 1
                most = max(most, num_now)
            gate.wait(60)
            with lock:
                num_now -= 1
            return 10 // (number - 4)

        gate = threading.Barrier(3)  # none continues before three are there
        calls = begun(call_pool, [partial(work, number) for number in range(12)], at_once=3)
        found = []
        for call in calls:
            try:
                found.append(call.wait(60))
            except ZeroDivisionError:
                call_pool.pass_on(call)
                call_pool.pass_on(call)  # once is enough
                found.append(0)
        assert found == [0 if number == 4 else 10 // (number - 4) for number in range(12)]
        assert most == 3
        call_pool.close()

    def test_the_first_does_not_delay_the_others(self, call_pool: CallPool) -> None:
        """The caller waits for them in order, but those behind one that takes long are made meanwhile."""
        release = threading.Event()

        def end(call: Call[bool]) -> bool:
            release.set()
            return True

        calls = begun(call_pool, [lambda call: release.wait(60), *[lambda call: True] * 8, end], at_once=2)
        assert all(call.wait(60) for call in calls)

    @pytest.mark.parametrize("how", ["fails", "hangs", "brings too little"])
    def test_one_that_fails_keeps_its_turn(self, call_pool: CallPool, how: str) -> None:
        """The caller says when its turn is over: a store that is away is not asked for all the others as well."""
        release, done = threading.Event(), []

        def fail(call: Call[object]) -> object:
            call.keeps_turn = how == "brings too little"
            return "" if call.keeps_turn else release.wait() if how == "hangs" else 1 // 0

        calls = begun(call_pool, [*[fail] * 2, *[lambda call: done.append(1)] * 3], at_once=2)
        for call in calls[:2]:
            with nullcontext() if how == "brings too little" else pytest.raises((TimeoutError, ZeroDivisionError)):
                call.wait(0.5)
        assert call_pool.begin(lambda call: True).wait(60)  # all that had a turn have been looked at
        assert not done
        call_pool.pass_on(calls[0])
        assert [call.wait(60) for call in calls[2:]] == [None] * 3
        release.set()

    @pytest.mark.parametrize("fails", [True, False])
    def test_those_that_have_no_turn_yet_end_with_the_others(self, fails: bool) -> None:
        call_pool = CallPool(self, 1, "test-pool", join_s=0.01)
        release = threading.Event()
        calls = begun(call_pool, [lambda call: release.wait()] * 5, at_once=2)
        if fails:
            call_pool.fail(lambda: ValueError("expired"))
        else:
            call_pool.close()
        for call in calls:
            with pytest.raises(ValueError if fails else ClosedError):
                call.wait(60)
        release.set()
        call_pool.close()

    def test_what_hangs_and_is_not_waited_for_yet_delays_no_call(self, call_pool: CallPool) -> None:
        """As the parts of a read that are ahead of the one that is tried again."""
        release = threading.Event()
        stuck = [Call(lambda call: release.wait(), call_pool) for _ in range(2)]
        for call in stuck:
            call.timeout_s = 0.02
        call_pool.begin_all(stuck, at_once=2)
        assert (
            call_pool.begin(lambda call: "done").wait(2) == "done"
        )  # counted from when it begins; stuck threads are replaced
        for call in stuck:
            with pytest.raises(TimeoutError):
                call.wait(60)
        assert call_pool.num_timeouts == 2
        release.set()

    def test_a_turn_after_the_end(self) -> None:
        """The one that had it has failed, and closing does not know of the others."""
        call_pool = CallPool(self, 1, "test-pool")
        calls = begun(call_pool, [lambda call: 1 // 0, *[lambda call: 1] * 3], at_once=1)
        with pytest.raises(ZeroDivisionError):
            calls[0].wait(60)
        call_pool.close()
        call_pool.pass_on(calls[0])
        for call in calls[1:]:
            with pytest.raises(ClosedError):
                call.wait(60)

    def test_what_was_begun_when_another_could_not_be_may_be_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call_pool, release, memory = CallPool(self, 9, "test-pool"), threading.Event(), bytearray(3)
        start = threading.Thread.start
        started: list[threading.Thread] = []

        def refuse_the_second(thread: threading.Thread) -> None:
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        def hang(call: Call[None]) -> None:
            release.wait()
            call.write(memoryview(memory), b"bad")

        calls = [Call(hang, call_pool) for _ in range(5)]
        with monkeypatch.context() as patched, pytest.raises(RuntimeError):
            patched.setattr(threading.Thread, "start", refuse_the_second)
            call_pool.begin_all(calls, at_once=3)
        for call in calls:
            call.cancel()
        release.set()
        assert call_pool.begin(lambda call: "done").wait(60) == "done"
        call_pool.close()
        assert memory == bytearray(3)

    def test_what_is_not_waited_for_any_more_is_not_made(self) -> None:
        """Also where the wait ends because too many threads hang."""
        call_pool, release, done = CallPool(self, 1, "test-pool", most_abandoned=0), threading.Event(), []
        stuck = call_pool.begin(lambda call: release.wait())
        with pytest.raises(TimeoutError):
            stuck.wait(0.02)
        waiting = call_pool.begin(lambda call: done.append(1))
        with pytest.raises(TimeoutError, match="hang in calls"):
            waiting.wait(0.02)
        release.set()
        assert call_pool.begin(lambda call: "done").wait(60) == "done"
        call_pool.close()
        assert not done

    def test_they_go_with_their_owner(self) -> None:
        class Owner:
            pass

        owner = Owner()
        call_pool = CallPool(owner, 1, "test-pool")
        assert call_pool.begin(lambda call: "done").wait(60) == "done"
        del owner
        gc.collect()
        join_threads("test-pool")

    @pytest.mark.prove
    def test_a_child_has_its_own(self) -> None:
        """Also where the lock was held when the child was made, and when the child ends as programs do."""
        program = (
            "import os, signal, sys, threading\n"
            "from loaderkit.connectors.call_pool import CallPool\n"
            "class Owner: pass\n"
            "owner = Owner()\n"
            "call_pool = CallPool(owner, 2, 'test-pool')\n"
            "held, done, release = threading.Event(), threading.Event(), threading.Event()\n"
            "busy = call_pool.begin(lambda call: release.wait())\n"
            "start = threading.Thread.start\n"
            "def hold(thread):\n"  # the pool holds its lock while it starts a thread
            "    if thread.name.startswith('test-pool'):\n"
            "        held.set()\n"
            "        done.wait()\n"
            "    start(thread)\n"
            "threading.Thread.start = hold\n"
            "thread = threading.Thread(target=lambda: call_pool.begin(lambda call: 1))\n"
            "thread.start()\n"
            "held.wait()\n"
            "pid = os.fork()\n"
            "if not pid: signal.alarm(60)\n"
            "done.set()\n"
            "release.set()\n"
            "if pid: print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
            "elif {more}: assert call_pool.begin(lambda call: 2).wait(60) == 2\n"
        )
        for more in (True, False):
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program.format(more=more)],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            assert ran.stdout.split() == ["0"]

    @pytest.mark.prove
    def test_an_owner_that_ends_in_a_forked_child_waits_for_no_lock(self) -> None:
        """Threads that are not there in the child are dropped before anything else runs there, and with them what they hold."""
        program = (
            "import os, signal, sys, threading\n"
            "pools = []\n"
            "def close_first():\n"
            "    signal.alarm(60)\n"
            "    for pool in pools: pool.close()\n"
            "os.register_at_fork(after_in_child=close_first)\n"
            "from loaderkit.connectors.call_pool import Call, CallPool\n"
            "is_read, may_go_on, begun = threading.Event(), threading.Event(), threading.Event()\n"
            "def clock():\n"
            "    if threading.current_thread() is reader: is_read.set(); may_go_on.wait()\n"
            "    return 0.0\n"
            "pools.append(CallPool(Call, 2, 'pool', clock))\n"
            "call = Call(lambda call: (begun.set(), may_go_on.wait()), pools[0]); call.timeout_s = 1.0\n"
            "reader = threading.Thread(target=lambda: pools[0].replace_stuck_threads())\n"
            "pools[0].begin_all([call], 1); begun.wait(); reader.start(); is_read.wait()\n"
            "pid = os.fork()\n"
            "if not pid: os._exit(0)\n"
            "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
            "may_go_on.set(); reader.join()\n"
            "sys.exit(code != 0)\n"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0
