"""Worker clocks: states sum to the time there was, and CPU time is the thread's."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_clocks import HandClock, PlainClock, cpu_s, state_s

from loaderkit.engine.metrics.worker_clock import ClockTotals, WorkerClock, WorkerStates
from loaderkit.samples.chunk import BatchWork, SampleChunk

INDICES = np.arange(4)


class TestClock:
    @given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=40))
    def test_sums_to_the_time_there_was(self, steps: list[tuple[int, float]]) -> None:
        clock = HandClock()
        worker_clock = WorkerClock(WorkerStates(3), clock, first_state=3)
        expected = [0.0] * 6
        state = 3
        for following, seconds in steps:
            clock.now += seconds
            expected[state] += seconds
            worker_clock.enter(following)
            state = following
        clock.now += 1.5
        expected[state] += 1.5
        assert state_s(worker_clock, clock.now) == pytest.approx(expected)

    @given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 10)), min_size=1, max_size=40), st.data())
    def test_the_timeline_is_what_happened(self, steps: list[tuple[int, float]], data: st.DataObject) -> None:
        clock = HandClock()
        worker_clock = WorkerClock(WorkerStates(3), clock, first_state=3)
        timeline = [(100.0, 3)]
        for state, seconds in steps:
            clock.now += seconds
            worker_clock.enter(state)
            timeline.append((clock.now, state))
        begin = data.draw(st.floats(100, clock.now))
        end = data.draw(st.floats(begin, clock.now + 5))
        expected: dict[int, float] = {}
        for (since, state), until in zip(timeline, [t for t, _ in timeline[1:]] + [end], strict=True):
            overlap = min(until, end) - max(since, begin)
            if overlap > 0:
                expected[state] = expected.get(state, 0.0) + overlap
        found: dict[int, float] = {}
        for state, since, until in worker_clock.timeline(begin, end):
            assert begin <= since < until <= end
            found[state] = found.get(state, 0.0) + until - since
        assert found == pytest.approx(expected)

    def test_a_reader_never_sees_half_an_entry(self) -> None:
        """Entries made by one thread, read by another: the sum is always the age of the clock."""
        worker_clock = WorkerClock(WorkerStates(2), time.perf_counter, first_state=2)
        begun = worker_clock.since_s
        stop = threading.Event()

        def work() -> None:
            state = 0
            while not stop.is_set():
                worker_clock.enter(state)
                state = (state + 1) % 5

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(3000):
                now = time.perf_counter()
                assert sum(state_s(worker_clock, now)) >= (now - begun) * (1 - 1e-9)
                assert sum(state_s(worker_clock, now)) <= time.perf_counter() - begun + 1e-9
        finally:
            stop.set()
            thread.join()

    def test_cpu_time_is_that_of_the_thread(self) -> None:
        """Of what takes long, asked; of what takes a moment, taken for granted."""
        worker_clock = WorkerClock(WorkerStates(2), time.perf_counter, first_state=2)
        begun_s, sum_s = time.thread_time(), 0.0
        for number in range(50):
            worker_clock.enter(number % 2)
            until_s = time.thread_time() + (2e-3 if number % 10 == 0 else 0.0)
            while time.thread_time() < until_s:
                pass
            if number % 10 == 5:
                worker_clock.enter(4)
        sum_s = sum(cpu_s(worker_clock))
        assert sum_s == pytest.approx(time.thread_time() - begun_s, rel=0.2)
        assert sum_s >= 5 * 2e-3 * 0.99

    def test_what_it_computes_between_stages_is_no_stages(self) -> None:
        """Also where it waits for this and then for that, and the stage comes right behind."""
        worker_clock = WorkerClock(WorkerStates(1), time.perf_counter, first_state=1)
        for state in (0, 1, 2, 1, 0):
            worker_clock.enter(state)
            until_s = time.thread_time() + (0.02 if state else 0.002)
            while time.thread_time() < until_s:
                pass
            if state == 1:
                worker_clock.enter(2)  # for a moment
        open_s = cpu_s(worker_clock)[0]
        worker_clock.enter(1)
        assert 0.004 * 0.99 <= open_s <= cpu_s(worker_clock)[0] < 0.01

    def test_another_thread_may_go_on_with_it(self) -> None:
        """Its CPU time has nothing to do with that of the one before, however short the time in between."""
        worker_clock = WorkerClock(WorkerStates(1), time.perf_counter, first_state=1)

        def work(seconds: float) -> None:
            until_s = time.thread_time() + seconds
            while time.thread_time() < until_s:
                pass
            worker_clock.enter(0)
            until_s = time.thread_time() + 2e-3
            while time.thread_time() < until_s:
                pass
            worker_clock.enter(1)

        for seconds in (0.05, 0.0, 0.03, 0.0):
            thread = threading.Thread(target=work, args=(seconds,))
            thread.start()
            thread.join()
        assert 8e-3 * 0.99 <= cpu_s(worker_clock)[0] < 12e-3

    def test_a_clock_that_raises_leaves_it_as_it_was(self) -> None:
        clock = HandClock()
        worker_clock = WorkerClock(WorkerStates(1), clock, first_state=1)
        del clock.now
        with pytest.raises(AttributeError):
            worker_clock.enter(0)
        assert worker_clock.open_state == 1
        assert state_s(worker_clock, 103.0) == pytest.approx([0, 3, 0, 0])


def test_nothing_is_written_where_there_is_no_such_state() -> None:
    worker_clock: Any = WorkerClock(WorkerStates(2), time.perf_counter, first_state=2)
    summed: Any = WorkerClock.summed
    wrong: list[Callable[[], object]] = [
        lambda: worker_clock.enter(5),
        lambda: worker_clock.enter(-1),
        lambda: worker_clock.enter(2**80),
        lambda: worker_clock.enter("read"),
        lambda: worker_clock.served(2, 1, 1),
        lambda: worker_clock.served(0, 1),
        lambda: worker_clock.served(0, 2**80, 1),
        lambda: worker_clock.failed(2, 1),
        lambda: summed([], 0.0),
        lambda: summed((worker_clock,), 0.0),
        lambda: summed([worker_clock, WorkerStates(2)], 0.0),
        lambda: summed([worker_clock, WorkerClock(WorkerStates(3), time.perf_counter, first_state=3)], 0.0),
        lambda: summed([WorkerClock.__new__(WorkerClock)], 0.0),
        lambda: worker_clock.__init__(WorkerStates(2), time.perf_counter, first_state=2),
    ]
    for step in wrong:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            step()
    assert worker_clock.open_state == 2
    assert WorkerClock.summed([worker_clock], 0.0)[1] == 2 * [(0, 0, 0, 0.0, 0.0, {})]


def counted(*worker_clocks: WorkerClock) -> list[ClockTotals]:
    """All of what was done but the thread's time on a CPU and for one, of which each clock asks the system itself."""
    return [
        ClockTotals._make(row)._replace(cpu_s=0.0, delayed_s=0.0)
        for row in type(worker_clocks[0]).summed(list(worker_clocks), 0.0)[1]
    ]


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=20), min_size=1, max_size=5))
def test_workers_of_a_pool_are_summed(lives: list[list[tuple[int, float]]]) -> None:
    clock = HandClock()
    worker_clocks = [WorkerClock(WorkerStates(3), clock, first_state=3, since_s=clock.now) for _ in lives]
    for worker_clock, life in zip(worker_clocks, lives, strict=True):
        for state, seconds in life:
            clock.now += seconds
            worker_clock.enter(state)
            if state < 3:
                worker_clock.served(state, 2, 5)
                worker_clock.failed(state, 1)
    moment = clock.now - 0.3
    alone = [state_s(worker_clock, moment) for worker_clock in worker_clocks]
    assert WorkerClock.summed(worker_clocks, moment)[0] == pytest.approx(
        [sum(column) for column in zip(*alone, strict=True)]
    )
    for number, row in enumerate(counted(*worker_clocks)):
        each = [counted(worker_clock)[number] for worker_clock in worker_clocks]
        assert row[:3] == tuple(sum(values) for values in zip(*(one[:3] for one in each), strict=True))
        expected: Counter[int] = Counter()
        for one in each:
            expected.update(one.services)
        assert row.services == expected


STEPS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 5), st.floats(0, 10)),
    st.tuples(st.just("served"), st.integers(0, 2), st.integers(0, 100)),
    st.tuples(st.just("failed"), st.integers(0, 2), st.integers(0, 100)),
)


@given(st.lists(STEPS, max_size=600), st.data())
def test_the_same_as_accounts_kept_plainly(steps: list[tuple[str, int, float]], data: st.DataObject) -> None:
    clock = HandClock()
    worker_clock = WorkerClock(WorkerStates(3), clock, first_state=3)
    other = PlainClock(WorkerStates(3), clock, first_state=3)
    worker_clock.trace = deque()
    for step, number, much in steps:
        if step == "enter":
            clock.now += much
            worker_clock.item = other.item = (0, number, 1, 2)
            assert worker_clock.enter(number) == other.enter(number)
        elif step == "failed":
            worker_clock.failed(number, int(much))
            other.failed(number, int(much))
        else:
            chunk = SampleChunk(BatchWork(epoch=0, step=0, positions=INDICES, indices=INDICES), 0, 4, INDICES)
            both: tuple[WorkerClock, PlainClock] = (worker_clock, other)
            for one in both:
                chunk.slowest = (float(much), 1) if number else None
                one.served(number, int(much), 7 * number, chunk)
                assert (chunk.slowest is None) == (not number or int(much) > 0), "the next stage is not charged with it"
    moment = data.draw(st.floats(90, clock.now + 10))
    assert state_s(worker_clock, moment) == pytest.approx(other.state_s(moment), abs=1e-9)
    assert worker_clock.timeline(95.0, moment) == other.timeline(95.0, moment)
    assert counted(worker_clock) == other.counted()
    for n in range(3):
        np.testing.assert_array_equal(worker_clock.slow_items.kept(n), other.slow_items.kept(n))
    assert worker_clock.trace == other.trace
    assert (worker_clock.open_state, worker_clock.since_s) == (other.open_state, other.since_s)
