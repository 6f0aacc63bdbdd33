"""One worker works alone where that was measured to be faster, and only there."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque

import pytest

from loaderkit.engine.autotune.chunk_window import LEAST_S, NUM_CHUNKS
from loaderkit.engine.autotune.contention_probe import PATIENCE, PATIENCE_S, ContentionProbe, ProbedChunk, SoloGate
from loaderkit.engine.base import WorkerPool
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.engine.pools import PoolPlan
from loaderkit.engine.work import Stage

STATES = WorkerStates(2)


def is_solo(machine: Machine) -> bool:
    return machine.gate.is_solo


class Machine:
    """Two simulated workers: how long a chunk of ten samples takes, how much of that is CPU time, how much of it the worker
    was ready to run while no CPU was free, and whether it finds the GIL taken when it wakes up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu = 0.0
        self.delay = 0.0
        self.is_gil_taken = [False]  # the answers, repeated
        self.num_asked = 0
        self.gate = SoloGate()
        self.probe = ContentionProbe(
            ["read", "decode"],
            self.gate,
            lambda: self.now,
            cpu_clock=lambda: self.cpu,
            delay_clock=lambda: self.delay,
            is_gil_taken=self._ask,
        )
        self.worker_clock = WorkerClock(STATES, lambda: self.now, first_state=0)

    def _ask(self) -> bool:
        self.num_asked += 1
        return self.is_gil_taken[self.num_asked % len(self.is_gil_taken)]

    def overlapping(self, seconds: float, cpu_share: float, delayed_share: float = 0.0) -> None:
        """Two chunks at the same time, each of `seconds`; one, where only one worker may."""
        if self.gate.is_solo:
            only = self.probe.begin(self.worker_clock)
            self.advance(seconds, cpu_share, delayed_share)
            self.probe.end(only, 10)
            return
        all_probed = [self.probe.begin(self.worker_clock), self.probe.begin(self.worker_clock)]
        self.advance(seconds, cpu_share, delayed_share)
        for probed in all_probed:
            self.probe.end(probed, 10)

    def work(self, seconds: float) -> None:
        """A chunk of one worker's, which computes."""
        probed = self.probe.begin(self.worker_clock)
        self.advance(seconds, 1.0)
        self.probe.end(probed, 10)

    def advance(self, seconds: float, cpu_share: float, delayed_share: float = 0.0) -> None:
        self.now += seconds
        self.delay += seconds * delayed_share
        self.cpu += seconds * cpu_share

    def until_tried(self, free_s: float, free_share: float) -> None:
        for _ in range(window_of(free_s)):
            if not self.gate.is_solo:
                self.overlapping(free_s, free_share)


def window_of(seconds: float) -> int:
    """How many chunks of `seconds` a window has."""
    return max(NUM_CHUNKS, math.ceil(LEAST_S / seconds) + 1)


def test_workers_that_compute_are_left_alone() -> None:
    machine = Machine()
    for _ in range(3 * PATIENCE):
        machine.overlapping(1.0, 0.95)
        assert not is_solo(machine)


def test_what_is_faster_one_at_a_time_stays_so_and_is_tried_again() -> None:
    machine = Machine()
    machine.is_gil_taken = [True]
    machine.until_tried(0.001, 0.5)
    assert is_solo(machine)
    for _ in range(round(PATIENCE_S / 0.0004)):
        machine.overlapping(0.0004, 1.0)
        assert is_solo(machine)
    for _ in range(2 * window_of(0.0004)):
        if is_solo(machine):
            machine.overlapping(0.0004, 1.0)
    assert not is_solo(machine), "the other way is looked at again"
    machine.until_tried(0.001, 0.5)
    assert is_solo(machine)


def test_chunks_that_began_before_a_window_are_none_of_it() -> None:
    """Thirty-two workers wait for a server: when a window begins, all are in chunks that are not measured."""
    machine = Machine()
    machine.until_tried(0.08, 0.01)
    while is_solo(machine):
        machine.overlapping(0.08, 0.01)
    all_probed: deque[ProbedChunk | None] = deque(machine.probe.begin(machine.worker_clock) for _ in range(32))
    num_ended = 0
    while not is_solo(machine):
        machine.advance(0.08 / 32, 0.0)  # one of them ends, and begins with the next
        machine.probe.end(all_probed.popleft(), 10)
        all_probed.append(machine.probe.begin(machine.worker_clock))
        num_ended += 1
    assert num_ended >= PATIENCE
    for probed in all_probed:
        machine.probe.end(probed, 10)
    while is_solo(machine):
        machine.overlapping(0.08, 0.01)
    assert machine.probe.trial.alone_share == pytest.approx(1 / 12, rel=0.4), "12 chunks of 32 are seen"


def test_one_alone_that_is_faster_by_chance_does_not_stay_so() -> None:
    """The slow samples of a burst fell to all workers; the GIL was free all the time."""
    machine = Machine()
    machine.until_tried(0.05, 0.02)
    assert is_solo(machine)
    for _ in range(window_of(0.001)):
        if is_solo(machine):
            machine.overlapping(0.001, 0.02)
    assert not is_solo(machine)
    assert machine.probe.trial.alone_share is not None, "the verdict reads it all the same"


def test_short_chunks_that_hold_the_gil_are_done_one_at_a_time() -> None:
    """One worker does a score of them while the other waits for the GIL with one: nearly all chunks have waited for nothing,
    but take longer than those of a worker alone."""
    machine = Machine()
    machine.is_gil_taken = [True]
    num_scores = 0
    while not is_solo(machine):
        waiting, cpu_s = machine.probe.begin(machine.worker_clock), machine.cpu
        for _ in range(16):
            if not is_solo(machine):
                machine.work(0.0005)
        spent_s, machine.cpu = machine.cpu - cpu_s, cpu_s  # the waiting one's thread has had no CPU
        machine.probe.end(waiting, 10)
        machine.cpu += spent_s
        num_scores += 1
        assert num_scores < NUM_CHUNKS
    for _ in range(round(1 / 0.0003)):
        machine.work(0.0003)
        assert is_solo(machine)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("every", "stall_s"), [(15, 0.015), (30, 0.03), (400, 0.1)])
@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_short_chunks_that_stall_at_times_are_done_by_all(every: int, stall_s: float, num_workers: int) -> None:
    """One chunk in a score has to wait for a disk: that is no reason to let one worker wait where all could."""
    machine, now = Machine(), 0.0
    ends: list[tuple[float, int]] = []  # of the chunks that workers are at
    all_probed: list[ProbedChunk | None] = [None] * num_workers
    chance, alone_s = random.Random(0), 0.0

    def begin(worker: int) -> None:
        all_probed[worker] = machine.probe.begin(machine.worker_clock)
        heapq.heappush(ends, (now + (stall_s if chance.randrange(every) == 0 else 1e-4), worker))

    for worker in range(num_workers):
        begin(worker)
    waiting: list[int] = []
    while now < 30:
        before, (now, worker) = now, heapq.heappop(ends)
        machine.now = now
        machine.cpu = 0.5 * now  # by any thread: not busy enough to be left alone
        alone_s += (now - before) * is_solo(machine)
        machine.probe.end(all_probed[worker], 10)
        waiting.append(worker)
        while waiting and not (is_solo(machine) and ends):
            begin(waiting.pop())
    assert alone_s < 0.3 * now, "a stroke of luck in one trial costs five seconds"


def test_every_window_of_short_chunks_is_long_enough() -> None:
    """What is left over from the time before does not shorten it."""
    machine = Machine()
    for _ in range(5 * PATIENCE):
        machine.overlapping(0.0005, 0.95)
        assert not is_solo(machine)
    num_measured = 0
    while not is_solo(machine):  # now they wait for one another
        probed = machine.probe.begin(machine.worker_clock)
        machine.probe.end(probed, 10)  # a chunk that takes no time
        num_measured += probed is not None
        machine.overlapping(0.0005, 0.5)
    assert num_measured * 0.0005 >= 0.9 * LEAST_S


def test_one_alone_whose_work_turns_slow_is_not_left_alone() -> None:
    """It would take a thousand chunks of a second each until the next look."""
    machine = Machine()
    machine.is_gil_taken = [True]
    machine.until_tried(0.001, 0.5)
    for _ in range(window_of(0.0004)):
        machine.overlapping(0.0004, 1.0)
    assert is_solo(machine)
    num_slow = 0
    while is_solo(machine):
        machine.overlapping(1.0, 0.1)
        num_slow += 1
    assert num_slow <= 6


def test_waiting_for_a_store_is_tried_once_and_given_up() -> None:
    machine = Machine()
    machine.until_tried(1.0, 0.1)
    assert is_solo(machine)
    for _ in range(NUM_CHUNKS):
        machine.overlapping(0.5, 0.2)
    assert not is_solo(machine)
    for _ in range(PATIENCE // 2 - 1):
        machine.overlapping(1.0, 0.1)
        assert not is_solo(machine)


def test_the_result_tells_how_many_workers_overlapped() -> None:
    machine = Machine()
    machine.until_tried(1.0, 0.1)
    for _ in range(NUM_CHUNKS):
        machine.overlapping(1.0, 0.2)
    assert machine.probe.trial.num_inside == pytest.approx(2)
    assert machine.probe.trial.alone_share == pytest.approx(0.5)


def test_a_process_that_stood_still_is_not_taken_for_slow() -> None:
    """Ctrl-Z and fg, or a laptop that slept: some chunks took an hour and no CPU time."""
    machine = Machine()
    for number in range(2 * PATIENCE):
        stood = number % (NUM_CHUNKS - 2) in (3, 7)
        machine.overlapping(3600.0 if stood else 1.0, 0.0 if stood else 0.95)
        assert not is_solo(machine)


def test_a_worker_alone_says_nothing() -> None:
    machine = Machine()
    for _ in range(3 * NUM_CHUNKS):
        probed = machine.probe.begin(machine.worker_clock)
        machine.now += 1.0
        machine.probe.end(probed, 10)
    assert not is_solo(machine)


def test_a_pool_counts_chunks_also_without_a_trial() -> None:
    """Else what the first chunks decided would stand for ever."""
    now = 0.0
    plan = PoolPlan(sample_stages=(0,), batch_stages=(), num_workers=2, lands=True)
    pool = WorkerPool(0, plan, [Stage("read", "read", "sample", print)], WorkerStates(1), lambda: now)
    clocks = [WorkerClock(WorkerStates(1), lambda: now, first_state=0) for _ in range(2)]

    def chunks() -> int:
        """A chunk of each worker that may work; they wait for something all the time."""
        nonlocal now
        assert pool.probe is not None
        all_probed = [pool.probe.begin(clock) for clock in clocks[: 1 if pool.one_works() else 2]]
        now += 0.001
        for probed in all_probed:
            pool.probe.end(probed, 10)
        return len(all_probed)

    while not pool.one_works():
        chunks()
    while pool.one_works():
        chunks()
    num_chunks = 0
    while not pool.one_works():
        num_chunks += chunks()
    assert PATIENCE <= num_chunks <= PATIENCE + 2 * window_of(0.001)


def test_a_trial_that_plainly_loses_is_short_and_comes_more_seldom() -> None:
    machine = Machine()
    lengths, pauses = [], []
    for _ in range(4):
        pauses.append(0)
        while not is_solo(machine):
            machine.overlapping(1.0, 0.1)
            pauses[-1] += 2
        lengths.append(0)
        while is_solo(machine):
            machine.overlapping(1.0, 0.1)
            lengths[-1] += 1
    assert lengths == [3, 3, 3, 3]
    assert pauses[1:] == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE]


def test_two_workers_at_their_own_pace_do_twice_as_much_as_one() -> None:
    machine = Machine()
    machine.until_tried(1.0, 0.1)
    while is_solo(machine):
        machine.overlapping(1.0, 0.1)
    assert machine.probe.trial.alone_share == pytest.approx(0.5)
    assert machine.probe.trial.slowdowns == {"read": pytest.approx(1.0)}


def test_which_stage_only_one_can_be_in_is_told() -> None:
    """A second of reading under a lock, then one of decoding: side by side every other chunk waits for a second first."""
    machine = Machine()
    ahead, behind = (WorkerClock(STATES, lambda: machine.now, first_state=0) for _ in range(2))
    while not is_solo(machine):
        first, second = machine.probe.begin(ahead), machine.probe.begin(behind)
        machine.advance(1.0, 0.1)
        ahead.enter(1)
        machine.advance(1.0, 0.1)
        machine.probe.end(first, 10)
        ahead.enter(0)
        behind.enter(1)
        machine.advance(1.0, 0.1)
        machine.probe.end(second, 10)
        behind.enter(0)
    while is_solo(machine):
        only = machine.probe.begin(ahead)
        machine.advance(1.0, 0.1)
        ahead.enter(1)
        machine.advance(1.0, 0.1)
        machine.probe.end(only, 10)
        ahead.enter(0)
    assert machine.probe.trial.slowdowns == {"read": pytest.approx(1.5, abs=0.1), "decode": pytest.approx(1.0)}


@pytest.mark.parametrize("every", [2, 12, 30])
def test_what_only_one_can_do_at_a_time_one_alone_does_as_fast(every: int) -> None:
    """A chunk takes a second under a lock. Unfair: one has the lock again and again while the other waits for it, if it is
    for long until after what is looked at."""
    machine = Machine()
    probed, other = machine.probe.begin(machine.worker_clock), machine.probe.begin(machine.worker_clock)
    number = 0
    while not is_solo(machine):
        machine.advance(1.0, 0.1)
        number += 1
        if number % every == 0:
            machine.probe.end(other, 10)
            other = machine.probe.begin(machine.worker_clock)
        else:
            machine.probe.end(probed, 10)
            probed = machine.probe.begin(machine.worker_clock)
    for left in (probed, other):
        machine.advance(1.0, 0.1)
        machine.probe.end(left, 10)
    while is_solo(machine):
        machine.overlapping(1.0, 0.1)
    assert machine.probe.trial.alone_share is not None
    assert machine.probe.trial.alone_share == pytest.approx(1.0, abs=0.2)
    assert machine.probe.trial.slowdowns["read"] == pytest.approx(2.0 if every <= NUM_CHUNKS else 1.0, abs=0.2)


def test_workers_kept_from_their_cpus_by_other_programs_are_left_alone() -> None:
    """They are off the CPU for most of the time, but one alone would not be faster."""
    machine = Machine()
    for _ in range(3 * PATIENCE):
        machine.overlapping(1.0, 0.4, 0.55)
        assert not is_solo(machine)
    assert machine.probe.trial.waiting_share == pytest.approx(1 - 0.4 / 0.45)


def test_how_often_the_gil_is_taken_tells_that_it_is_held() -> None:
    """On a busy machine not every answer shows it, and a decoder, which holds the GIL for moments, has it now and then."""
    machine = Machine()
    machine.is_gil_taken = [True, True, False, True, True, True, False, True]
    for _ in range(PATIENCE // 2):
        machine.overlapping(0.01, 0.95)
    assert machine.probe.trial.gil_taken == pytest.approx(0.75, abs=0.05)
    assert machine.probe.trial.holds_gil
    machine.is_gil_taken = [True, False]
    for _ in range(3 * PATIENCE):
        machine.overlapping(0.01, 0.95)
    assert machine.probe.trial.holds_gil is False


@pytest.mark.parametrize(("taken", "tries"), [([True, False, False, False], False), ([True, False], True)])
def test_a_gil_that_is_taken_is_reason_enough_to_try_one_alone(taken: list[bool], tries: bool) -> None:
    machine = Machine()
    machine.is_gil_taken = taken
    machine.until_tried(0.01, 0.95)
    assert is_solo(machine) is tries


def test_the_gil_is_asked_for_also_where_chunks_are_short() -> None:
    machine = Machine()
    machine.is_gil_taken = [True]
    for _ in range(window_of(0.001)):
        machine.overlapping(0.001, 0.95)
    assert machine.probe.trial.holds_gil


@pytest.mark.parametrize("seconds", [0.03, 0.01, 0.001, 0.0003])
def test_the_gil_is_asked_for_seldom(seconds: float) -> None:
    """Ten times a second, but for the first second."""
    machine = Machine()
    for _ in range(round(10 / seconds)):
        machine.overlapping(seconds, 0.95)
    assert 10 <= machine.num_asked <= 110 + 2 * NUM_CHUNKS
    num_asked = machine.num_asked
    for _ in range(math.ceil(0.5 / seconds)):
        machine.work(seconds)
    assert machine.num_asked == num_asked, "a worker alone waits for no other"


class LateDelays:
    """The clock of a worker, on which more delay than time has come to the second stage."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def summed(self, clocks: object, now: float) -> tuple[list[float], list[tuple[float, ...]]]:
        delayed_s = 0.0 if self._machine.gate.is_solo else 0.2 * now
        return [now, 0.1 * now], [(0, 0, 0, 0.0, 0.0, 0), (0, 0, 0, 0.0, delayed_s, 0)]


def test_a_stage_without_a_time_of_its_own_is_not_compared() -> None:
    """Its delays were counted, and the time that they were part of not yet: a slowdown would be below 0."""
    machine = Machine()
    machine.worker_clock = LateDelays(machine)  # type: ignore[assignment]
    machine.until_tried(1.0, 0.1)
    while is_solo(machine):
        machine.overlapping(1.0, 0.1)
    assert machine.probe.trial.slowdowns == {"read": pytest.approx(1.0)}
