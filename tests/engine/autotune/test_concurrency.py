"""Workers take turns where that was measured to be faster, and only there."""

from __future__ import annotations

import heapq
import math
import random
import threading
import time

import pytest
from numbers_dataset import wait_for

import loaderkit
from loaderkit import native
from loaderkit.engine.autotune.concurrency import _PATIENCE, _PATIENCE_S, _WINDOW, _WINDOW_S, ContentionProbe, Ticket
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.engine.threaded import ThreadEngine

STATES = WorkerStates(2)


def takes_turns(machine: Machine) -> bool:
    return machine.probe.one_at_a_time


class Machine:
    """Two workers in one thread's hands: how long a chunk of ten samples takes, how much of that is CPU time, how much
    the worker was ready to run while no CPU was free, and whether it finds Python's lock taken when it wakes up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu = 0.0
        self.delay = 0.0
        self.is_gil_taken = [False]  # over and over
        self.num_asked = 0
        machine = self

        class Asking(ContentionProbe):
            def _finds_gil_taken(self) -> bool:
                machine.num_asked += 1
                return machine.is_gil_taken[machine.num_asked % len(machine.is_gil_taken)]

        self.probe = Asking(["read", "decode"], lambda: self.now, lambda: self.cpu, lambda: self.delay)
        self.worker_clock = WorkerClock(STATES, lambda: self.now, first_state=0)

    def overlapping(self, seconds: float, cpu_share: float, delayed_share: float = 0.0) -> None:
        """Two chunks at the same time, each taking so long; one, where only one worker may."""
        if self.probe.one_at_a_time:
            only = self.probe.begin(self.worker_clock)
            self._pass(seconds, cpu_share, delayed_share)
            self.probe.end(only, 10)
            return
        tickets = [self.probe.begin(self.worker_clock), self.probe.begin(self.worker_clock)]
        self._pass(seconds, cpu_share, delayed_share)
        for ticket in tickets:
            self.probe.end(ticket, 10)

    def work(self, seconds: float) -> None:
        """A chunk of one worker's, which computes."""
        ticket = self.probe.begin(self.worker_clock)
        self._pass(seconds, 1.0)
        self.probe.end(ticket, 10)

    def _pass(self, seconds: float, cpu_share: float, delayed_share: float = 0.0) -> None:
        self.now += seconds
        self.delay += seconds * delayed_share
        self.cpu += seconds * cpu_share

    def until_tried(self, free_s: float, free_share: float) -> None:
        for _ in range(window_of(free_s)):
            if not self.probe.one_at_a_time:
                self.overlapping(free_s, free_share)


def window_of(seconds: float) -> int:
    """How many chunks of so many seconds a way is tried for."""
    return max(_WINDOW, math.ceil(_WINDOW_S / seconds) + 1)


def test_workers_that_compute_are_left_alone() -> None:
    machine = Machine()
    for _ in range(3 * _PATIENCE):
        machine.overlapping(1.0, 0.95)
        assert not takes_turns(machine)


def test_what_is_faster_one_at_a_time_stays_so_and_is_tried_again() -> None:
    machine = Machine()
    machine.until_tried(0.001, 0.5)
    assert takes_turns(machine)
    for _ in range(round(_PATIENCE_S / 0.0004)):
        machine.overlapping(0.0004, 1.0)
        assert takes_turns(machine)
    for _ in range(2 * window_of(0.0004)):
        if takes_turns(machine):
            machine.overlapping(0.0004, 1.0)
    assert not takes_turns(machine), "the other way is looked at again"
    machine.until_tried(0.001, 0.5)
    assert takes_turns(machine)


def test_short_chunks_that_hold_the_gil_are_done_one_at_a_time() -> None:
    """One does a score of them while the other waits for the GIL with one: nearly all chunks have waited for nothing. But
    they take longer than one worker's do that is alone."""
    machine = Machine()
    num_scores = 0
    while not takes_turns(machine):
        waiting, cpu_s = machine.probe.begin(machine.worker_clock), machine.cpu
        for _ in range(16):
            if not takes_turns(machine):
                machine.work(0.0005)
        spent_s, machine.cpu = machine.cpu - cpu_s, cpu_s  # the waiting one's thread has had no CPU
        machine.probe.end(waiting, 10)
        machine.cpu += spent_s
        num_scores += 1
        assert num_scores < _WINDOW
    for _ in range(round(1 / 0.0003)):
        machine.work(0.0003)
        assert takes_turns(machine)


@pytest.mark.parametrize(("every", "stall_s"), [(15, 0.015), (30, 0.03), (400, 0.1)])
@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_short_chunks_that_stall_at_times_are_done_by_all(every: int, stall_s: float, num_workers: int) -> None:
    """One chunk in a score has to wait for a disk: that is no reason to let one worker wait where all could."""
    machine, now = Machine(), 0.0
    ends: list[tuple[float, int]] = []  # of the chunks that workers are at
    tickets: list[Ticket | None] = [None] * num_workers
    chance, alone_s = random.Random(0), 0.0

    def begin(worker: int) -> None:
        tickets[worker] = machine.probe.begin(machine.worker_clock)
        heapq.heappush(ends, (now + (stall_s if chance.randrange(every) == 0 else 1e-4), worker))

    for worker in range(num_workers):
        begin(worker)
    waiting: list[int] = []
    while now < 30:
        before, (now, worker) = now, heapq.heappop(ends)
        machine.now = now
        machine.cpu = 0.5 * now  # whoever it is: not busy enough to be left alone
        alone_s += (now - before) * takes_turns(machine)
        machine.probe.end(tickets[worker], 10)
        waiting.append(worker)
        while waiting and not (takes_turns(machine) and ends):
            begin(waiting.pop())
    assert alone_s < 0.3 * now, "a stroke of luck in one trial costs five seconds"


def test_every_window_of_short_chunks_is_long_enough() -> None:
    """What is left over from the time before does not shorten it."""
    machine = Machine()
    for _ in range(5 * _PATIENCE):
        machine.overlapping(0.0005, 0.95)
        assert not takes_turns(machine)
    num_short = 0
    while not takes_turns(machine):  # now they wait for one another
        machine.overlapping(0.0005, 0.5)
        num_short += machine.probe._num_left <= _WINDOW
    assert num_short * 0.0005 >= 0.9 * _WINDOW_S


def test_one_alone_whose_work_turns_slow_is_not_left_alone() -> None:
    """It would take a thousand chunks of a second each until the next look."""
    machine = Machine()
    machine.until_tried(0.001, 0.5)
    for _ in range(window_of(0.0004)):
        machine.overlapping(0.0004, 1.0)
    assert takes_turns(machine)
    num_slow = 0
    while takes_turns(machine):
        machine.overlapping(1.0, 0.1)
        num_slow += 1
    assert num_slow <= 6


def test_waiting_for_a_store_is_tried_once_and_given_up() -> None:
    machine = Machine()
    machine.until_tried(1.0, 0.1)
    assert takes_turns(machine)
    for _ in range(_WINDOW):
        machine.overlapping(0.5, 0.2)
    assert not takes_turns(machine)
    for _ in range(_PATIENCE // 2 - 1):
        machine.overlapping(1.0, 0.1)
        assert not takes_turns(machine)


def test_how_many_there_were_side_by_side() -> None:
    machine = Machine()
    machine.until_tried(1.0, 0.1)
    for _ in range(_WINDOW):
        machine.overlapping(1.0, 0.2)
    assert machine.probe.trial.num_inside == pytest.approx(2)
    assert machine.probe.trial.alone_share == pytest.approx(0.5)


def test_a_process_that_stood_still_is_not_taken_for_slow() -> None:
    """Ctrl-Z and fg, or a laptop that slept: some chunks took an hour and no CPU time."""
    machine = Machine()
    for number in range(2 * _PATIENCE):
        stood = number % (_WINDOW - 2) in (3, 7)
        machine.overlapping(3600.0 if stood else 1.0, 0.0 if stood else 0.95)
        assert not takes_turns(machine)


def test_a_worker_alone_says_nothing() -> None:
    machine = Machine()
    for _ in range(3 * _WINDOW):
        ticket = machine.probe.begin(machine.worker_clock)
        machine.now += 1.0
        machine.probe.end(ticket, 10)
    assert not takes_turns(machine)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_one_at_a_time_means_one(num_threads: int) -> None:
    machine = Machine()
    machine.probe.one_at_a_time = True
    machine.probe._num_left = 10**9
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        worker_clock = WorkerClock(STATES, lambda: 0.0, first_state=STATES.starved)
        machine.probe.wait(worker_clock, STATES.idle)
        if machine.probe._is_closed:
            return
        for _ in range(200):
            machine.probe.wait(worker_clock, STATES.idle)
            inside.append(1)
            most.append(len(inside))
            inside.pop()
        machine.probe.close()

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 200


class Numbers:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        return index


def test_the_engine_counts_chunks_also_while_nobody_measures() -> None:
    """Else what the first chunks decided would stand for ever."""
    pipeline = loaderkit.Pipeline.dataset(Numbers()).read().batch(8)
    with loaderkit.build(pipeline, overrides={"prefetch.concurrency": 2}) as loader:
        batches = iter(loader)
        next(batches)
        assert isinstance(loader._executors.executor, ThreadEngine)
        probe = loader._executors.executor.pools[0].probe
        assert probe is not None
        probe._num_left = 500
        for _ in range(400):
            next(batches)
        assert probe._num_left <= 110


def test_a_trial_that_plainly_loses_is_short_and_comes_more_seldom() -> None:
    machine = Machine()
    lengths = []
    for _ in range(3):
        while not takes_turns(machine):
            machine.overlapping(1.0, 0.1)
        lengths.append(0)
        while takes_turns(machine):
            machine.overlapping(1.0, 0.1)
            lengths[-1] += 1
    assert lengths == [3, 3, 3]
    assert machine.probe._patience == 8 * _PATIENCE


def test_what_each_does_for_itself_one_alone_does_half_of() -> None:
    machine = Machine()
    machine.until_tried(1.0, 0.1)
    while takes_turns(machine):
        machine.overlapping(1.0, 0.1)
    assert machine.probe.trial.alone_share == pytest.approx(0.5)
    assert machine.probe.trial.slowdowns == {"read": pytest.approx(1.0)}


def test_which_stage_only_one_can_be_in_is_told() -> None:
    """A second of reading under a lock, then one of decoding: side by side every other chunk waits for a second first."""
    machine = Machine()
    ahead, behind = (WorkerClock(STATES, lambda: machine.now, first_state=0) for _ in range(2))
    while not takes_turns(machine):
        first, second = machine.probe.begin(ahead), machine.probe.begin(behind)
        machine._pass(1.0, 0.1)
        ahead.enter(1)
        machine._pass(1.0, 0.1)
        machine.probe.end(first, 10)
        ahead.enter(0)
        behind.enter(1)
        machine._pass(1.0, 0.1)
        machine.probe.end(second, 10)
        behind.enter(0)
    while takes_turns(machine):
        only = machine.probe.begin(ahead)
        machine._pass(1.0, 0.1)
        ahead.enter(1)
        machine._pass(1.0, 0.1)
        machine.probe.end(only, 10)
        ahead.enter(0)
    assert machine.probe.trial.slowdowns == {"read": pytest.approx(1.5, abs=0.1), "decode": pytest.approx(1.0)}


@pytest.mark.parametrize("every", [2, 12, 30])
def test_what_only_one_can_do_at_a_time_one_alone_does_as_fast(every: int) -> None:
    """A chunk takes a second under a lock. Unfair: one has the lock again and again while the other waits for it, if it is
    for long until after what is looked at."""
    machine = Machine()
    ticket, other = machine.probe.begin(machine.worker_clock), machine.probe.begin(machine.worker_clock)
    number = 0
    while not takes_turns(machine):
        machine._pass(1.0, 0.1)
        number += 1
        if number % every == 0:
            machine.probe.end(other, 10)
            other = machine.probe.begin(machine.worker_clock)
        else:
            machine.probe.end(ticket, 10)
            ticket = machine.probe.begin(machine.worker_clock)
    for left in (ticket, other):
        machine._pass(1.0, 0.1)
        machine.probe.end(left, 10)
    while takes_turns(machine):
        machine.overlapping(1.0, 0.1)
    assert machine.probe.trial.alone_share is not None
    assert machine.probe.trial.alone_share == pytest.approx(1.0, abs=0.2)
    assert machine.probe.trial.slowdowns["read"] == pytest.approx(2.0 if every <= _WINDOW else 1.0, abs=0.2)


def test_workers_kept_from_their_cpus_by_other_programs_are_left_alone() -> None:
    """They are off the CPU for most of the time, but one alone would be no better off."""
    machine = Machine()
    for _ in range(3 * _PATIENCE):
        machine.overlapping(1.0, 0.4, 0.55)
        assert not takes_turns(machine)
    assert machine.probe.trial.waiting_share == pytest.approx(1 - 0.4 / 0.45)


def test_that_the_lock_is_held_is_told_by_how_often_it_is_taken() -> None:
    """On a busy machine not every time shows it; and who holds it for a moment, as a decoder does, has it now and then."""
    machine = Machine()
    machine.is_gil_taken = [True, True, False, True, True, True, False, True]
    for _ in range(_PATIENCE // 2):
        machine.overlapping(0.01, 0.95)
    assert machine.probe.trial.gil_taken == pytest.approx(0.75, abs=0.05)
    assert machine.probe.trial.holds_gil
    machine.is_gil_taken = [True, False]
    for _ in range(3 * _PATIENCE):
        machine.overlapping(0.01, 0.95)
    assert machine.probe.trial.holds_gil is False


@pytest.mark.parametrize(("taken", "tries"), [([True, False, False, False], False), ([True, False], True)])
def test_a_lock_that_is_taken_is_reason_enough_to_try_one_alone(taken: list[bool], tries: bool) -> None:
    machine = Machine()
    machine.is_gil_taken = taken
    machine.until_tried(0.01, 0.95)
    assert takes_turns(machine) is tries


def test_the_lock_is_asked_for_also_where_chunks_are_short() -> None:
    machine = Machine()
    machine.is_gil_taken = [True]
    for _ in range(window_of(0.001)):
        machine.overlapping(0.001, 0.95)
    assert machine.probe.trial.holds_gil


@pytest.mark.parametrize("seconds", [0.03, 0.01, 0.001, 0.0003])
def test_the_lock_is_asked_for_seldom(seconds: float) -> None:
    """Ten times a second, but for the first second."""
    machine = Machine()
    for _ in range(round(10 / seconds)):
        machine.overlapping(seconds, 0.95)
    assert 10 <= machine.num_asked <= 110 + 2 * _WINDOW
    assert machine.probe._num_at_work == 0


@pytest.mark.parametrize("has_c", [True, False])
@pytest.mark.parametrize("holds", [True, False])
def test_whether_they_hold_the_gil_is_asked(holds: bool, has_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in Python, or in a wait that lets go of the GIL. On a busy machine not every time that is asked shows it."""
    if not has_c:
        monkeypatch.setattr(native, "HAS_KERNELS", False)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            if not holds:
                is_over.wait(0.05)

    other = threading.Thread(target=work)
    other.start()
    try:
        probe = ContentionProbe(["read", "decode"], time.perf_counter)
        wait_for(lambda: probe._finds_gil_taken() == holds)
    finally:
        is_over.set()
        other.join()
