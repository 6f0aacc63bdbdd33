"""One thread at a time runs user code that is not declared; those that wait get it in the order they came."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
from functools import partial
from typing import Any

import pytest

from loaderkit.engine import user_code
from loaderkit.engine.user_code import FairLock, UserLock, owner_of

_interrupt = ctypes.PyDLL(None).PyErr_SetInterrupt  # called as trace functions are, with what it does not look at
_interrupt.argtypes = [ctypes.py_object] * 3
_interrupt.restype = None


class Meter:
    """Counts the threads that are in it at once."""

    def __init__(self) -> None:
        self.num_inside = self.most = self.calls = 0

    def __call__(self, turns: int) -> None:
        self.num_inside += 1
        self.most = max(self.most, self.num_inside)
        sum(range(turns))
        self.num_inside -= 1
        self.calls += 1


@pytest.fixture
def switching() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_one_at_a_time_whoever_asks(rng: random.Random, switching: None) -> None:
    """Of one loader all objects, of all loaders one object."""
    meters, shared = [Meter() for _ in range(2)], Meter()
    together = Meter()
    of_loaders = [FairLock() for _ in range(2)]

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            number = draw.randrange(2)
            meter = draw.choice([meters[number], shared])
            lock = UserLock(of_loaders[number], meter)
            turns = [draw.randrange(200) for _ in range(2)]

            def both(lock: UserLock = lock, meter: Meter = meter, number: int = number, turns: Any = turns) -> None:
                lock.held(meter)(turns[0])
                if number == 0:
                    together(turns[1])

            if draw.random() < 0.5:  # as the engine does, which then runs what takes it itself
                lock.run(both, lambda: None)
            else:
                lock.held(meter)(turns[0])

    run_all([threading.Thread(target=work, args=(rng.randrange(2**32),)) for _ in range(4)])
    assert {meter.most for meter in (*meters, shared, together)} == {1}
    assert shared.calls + sum(meter.calls for meter in meters) == 4 * 300


def test_who_let_go_comes_last() -> None:
    lock = FairLock()
    order: list[int] = []
    came = [threading.Event() for _ in range(3)]
    threads = [
        threading.Thread(target=lock.run, args=(partial(order.append, number), came[number].set)) for number in range(3)
    ]

    def hold() -> None:
        for number, thread in enumerate(threads):
            thread.start()
            came[number].wait(60)  # it is in the queue
        lock.run(partial(order.append, -2))  # again, by its holder: others wait, and it does not

    lock.run(hold)
    lock.run(partial(order.append, -1))
    for thread in threads:
        thread.join(60)
    assert order == [-2, 0, 1, 2, -1]


class GaveUpError(Exception):
    pass


def test_who_stops_waiting_leaves_the_queue(rng: random.Random) -> None:
    """Those behind it wait on for the one that has the lock."""
    lock, meter = FairLock(), Meter()
    inside, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        meter.num_inside += 1
        inside.set()
        may_end.wait(60)
        meter.num_inside -= 1

    def give_up() -> None:
        raise GaveUpError

    holder = threading.Thread(target=lock.run, args=(hold,))
    holder.start()
    inside.wait(60)
    waiting: list[threading.Thread] = []
    for gives_up in [rng.random() < 0.6 for _ in range(8)]:
        if gives_up:
            with pytest.raises(GaveUpError):
                lock.run(lambda: meter(1), give_up)
            continue
        came = threading.Event()
        waiting.append(threading.Thread(target=lock.run, args=(partial(meter, 1000), came.set)))
        waiting[-1].start()
        came.wait(60)
    may_end.set()
    for thread in [holder, *waiting]:
        thread.join(60)
        assert not thread.is_alive()
    assert (meter.calls, meter.most) == (len(waiting), min(len(waiting), 1))


@pytest.mark.parametrize("is_contended", [False, True])
def test_interrupted_anywhere_it_is_free_and_alone(is_contended: bool) -> None:
    """By Ctrl-C, which Python raises in the main thread; others wait before and behind it."""
    for number in range(1000):
        lock, meter = UserLock(FairLock(), object()), Meter()
        may_end, inside = threading.Event(), threading.Event()
        holder = threading.Thread(target=lock.run, args=(lambda go=may_end, here=inside: (here.set(), go.wait(60)),))
        if is_contended:
            holder.start()
            inside.wait(60)
        was_interrupted = run_to(number, partial(lock.run, partial(meter, 1), may_end.set))
        may_end.set()
        others = [threading.Thread(target=lock.run, args=(partial(meter, 300),)) for _ in range(2)]
        run_all(others)
        assert meter.most == 1
        if is_contended:
            holder.join(60)
            assert not holder.is_alive()
        if not was_interrupted:
            assert number > 10
            return


def run_to(number: int, act: Any) -> bool:
    """Whether it was interrupted where the interpreter next looks after that instruction of the module, counted as they run."""
    left, was_interrupted = number, False

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != user_code.__file__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left >= 0:
            return trace
        while frame is not None:  # or Python would look in here, on the way back
            frame.f_trace, frame = _interrupt, frame.f_back
        return _interrupt

    def handle(number: int, frame: Any) -> None:
        nonlocal was_interrupted
        sys.settrace(None)
        if not was_interrupted:
            was_interrupted = True
            raise KeyboardInterrupt

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, handle)
    try:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has opcodes traced only if a frame asks for it beforehand
        sys.settrace(trace)
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return was_interrupted


def test_only_the_first_call_of_what_is_declared_is_alone() -> None:
    of_loader = FairLock()
    lock, inside, both = UserLock(of_loader), threading.Barrier(2), []

    def call(number: int) -> None:
        assert of_loader.is_held() == (number == 0)
        if number > 1:
            inside.wait(60)  # two are in it at once, or this breaks
        both.append(number)

    run = lock.first_held(call)
    run(0)
    run_all([threading.Thread(target=run, args=(number,)) for number in (2, 3)])
    assert sorted(both) == [0, 2, 3]


def test_whose_code_runs() -> None:
    meter = Meter()
    assert owner_of(partial(partial(meter.__call__), 3)) is meter
    assert owner_of(meter) is meter
    assert owner_of(Meter.__call__) is Meter.__call__
    assert owner_of(os.path.join) is os.path.join
    assert owner_of(len) is len


def test_a_holder_that_asks_again_waits_like_any_other(rng: random.Random) -> None:
    """Wherever those behind it are stopped between two lines: they have its lock, or are about to."""
    lock, is_over, never = FairLock(), False, threading.Event()
    inside: list[int] = []
    most = 0

    def act() -> None:
        nonlocal most
        inside.append(threading.get_ident())
        never.wait(0.006)  # longer than they stop for
        most = max(most, len(inside))
        inside.pop()

    def work(seed: int) -> None:
        draw = random.Random(seed)

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != user_code.__file__:
                return None
            if event == "line" and draw.random() < 0.3:
                never.wait(0.003)  # the others go on
            return trace

        sys.settrace(trace)
        while not is_over:
            lock.run(act, lambda: None)

    others = [threading.Thread(target=work, args=(rng.randrange(2**32),)) for _ in range(2)]
    for thread in others:
        thread.start()
    for _ in range(50):
        lock.run(act, lambda: None)
        never.wait(0.001)  # the next one takes its lock
    is_over = True
    for thread in others:
        thread.join(60)
    assert most == 1


@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_forks_child_waits_for_no_thread_of_its_parent(is_used_before: bool) -> None:
    meter, has_lock, may_end = Meter(), threading.Event(), threading.Event()
    of_loader = FairLock()
    of_parent = UserLock(of_loader, meter)  # of a loader that was built and has not begun
    if is_used_before:
        of_parent.run(partial(meter, 1))

    def hold() -> None:
        has_lock.set()
        may_end.wait(60)

    threads = [threading.Thread(target=UserLock(FairLock(), meter).held(hold))]
    threads += [threading.Thread(target=UserLock(of_loader).held(hold))] if is_used_before else []
    for thread in threads:
        has_lock.clear()
        thread.start()
        has_lock.wait(60)
    pid = os.fork()
    if pid == 0:
        new = UserLock(FairLock(), meter)
        new.run(lambda: of_parent.run(lambda: os._exit(0), lambda: os._exit(2)), lambda: os._exit(1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    may_end.set()
    for thread in threads:
        thread.join(60)
