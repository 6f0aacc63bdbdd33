"""One thread at a time runs user code that is not declared; those that wait get it in the order they came."""

from __future__ import annotations

import os
import random
import sys
import threading
from functools import partial
from typing import Any

import pytest

from loaderkit._internal.user_code import FairLock, UserLock, owner_of


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
            if draw.random() < 0.5:  # as the engine does, which then runs what takes it itself
                assert lock.acquire(0) or lock.acquire()
                lock.held(meter)(draw.randrange(200))
                if number == 0:
                    together(draw.randrange(200))
                lock.release()
            else:
                lock.held(meter)(draw.randrange(200))

    run_all([threading.Thread(target=work, args=(rng.randrange(2**32),)) for _ in range(4)])
    assert {meter.most for meter in (*meters, shared, together)} == {1}
    assert shared.calls + sum(meter.calls for meter in meters) == 4 * 300


def test_who_let_go_comes_last() -> None:
    lock, came, order = FairLock(), [threading.Event() for _ in range(3)], []
    lock.acquire()

    def wait(number: int) -> None:
        came[number].set()
        lock.acquire()
        order.append(number)
        lock.release()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        came[number].wait(60)
        while len(lock._queue) <= number:
            pass
    lock.acquire()  # again, by its holder: others wait, and it does not
    lock.release()
    lock.release()
    lock.acquire()
    order.append(-1)
    lock.release()
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, -1]


def test_who_stops_waiting_leaves_the_queue(rng: random.Random) -> None:
    lock = FairLock()
    lock.acquire()
    given_up = [threading.Thread(target=lock.acquire, args=(1e-3,)) for _ in range(rng.randrange(2, 9))]
    run_all(given_up)
    taken: list[bool] = []
    waiting = threading.Thread(target=lambda: taken.append(lock.acquire(60)))
    waiting.start()
    lock.release()
    waiting.join(60)
    assert taken == [True]


def test_only_the_first_call_of_what_is_declared_is_alone() -> None:
    lock, inside, both = UserLock(FairLock()), threading.Barrier(2), []
    first = threading.Event()

    def call(number: int) -> None:
        if number == 0:
            first.set()
            assert not lock.acquire(0) or number == 0
        elif number > 1:
            inside.wait(60)  # two are in it at once, or this breaks
        both.append(number)

    run = lock.first_held(call)
    run(0)
    assert first.is_set()
    run_all([threading.Thread(target=run, args=(number,)) for number in (2, 3)])
    assert sorted(both) == [0, 2, 3]


def test_whose_code_runs() -> None:
    meter = Meter()
    assert owner_of(partial(partial(meter.__call__), 3)) is meter
    assert owner_of(meter) is meter
    assert owner_of(Meter.__call__) is Meter.__call__
    assert owner_of(os.path.join) is os.path.join
    assert owner_of(len) is len


def test_a_forks_child_waits_for_no_thread_of_its_parent() -> None:
    meter, has_lock, may_end = Meter(), threading.Event(), threading.Event()

    def hold() -> None:
        has_lock.set()
        may_end.wait(60)

    thread = threading.Thread(target=UserLock(FairLock(), meter).held(hold))
    thread.start()
    has_lock.wait(60)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if UserLock(FairLock(), meter).acquire(0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    may_end.set()
    thread.join(60)
