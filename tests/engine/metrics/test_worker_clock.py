"""Accounts sum to the time there was; waits are charged where the time went."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbers_dataset import wait_for
from worker_clocks import PythonAccount, both, cpu_s, state_s

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.worker_clock import ClockTotals, WorkerClock, WorkerStates
from loaderkit.native import kernels
from loaderkit.stages.base import BatchWork, SampleChunk

INDICES = np.arange(4)


class HandClock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@both
class TestAccount:
    @given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=40))
    def test_sums_to_the_time_there_was(self, account_type: type[WorkerClock], steps: list[tuple[int, float]]) -> None:
        clock = HandClock()
        worker_clock = account_type(WorkerStates(3), clock, first_state=3)
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
    def test_the_timeline_is_what_happened(
        self, account_type: type[WorkerClock], steps: list[tuple[int, float]], data: st.DataObject
    ) -> None:
        clock = HandClock()
        worker_clock = account_type(WorkerStates(3), clock, first_state=3)
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

    def test_a_reader_never_sees_half_an_entry(self, account_type: type[WorkerClock]) -> None:
        """Entries made by one thread, read by another: the sum is always the age of the account."""
        worker_clock = account_type(WorkerStates(2), time.perf_counter, first_state=2)
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

    def test_cpu_time_is_that_of_the_thread(self, account_type: type[WorkerClock]) -> None:
        """Of what takes long, asked; of what takes a moment, taken for granted."""
        worker_clock = account_type(WorkerStates(2), time.perf_counter, first_state=2)
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

    def test_what_it_computes_between_stages_is_no_stages(self, account_type: type[WorkerClock]) -> None:
        """Also where it waits for this and then for that, and the stage comes right behind."""
        worker_clock = account_type(WorkerStates(1), time.perf_counter, first_state=1)
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

    def test_another_thread_may_go_on_with_it(self, account_type: type[WorkerClock]) -> None:
        """Its CPU time has nothing to do with that of the one before, however short the time in between."""
        worker_clock = account_type(WorkerStates(1), time.perf_counter, first_state=1)

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

    def test_a_clock_that_raises_leaves_it_as_it_was(self, account_type: type[WorkerClock]) -> None:
        clock = HandClock()
        worker_clock = account_type(WorkerStates(1), clock, first_state=1)
        del clock.now
        with pytest.raises(AttributeError):
            worker_clock.enter(0)
        assert worker_clock.open_state == 1
        assert state_s(worker_clock, 103.0) == pytest.approx([0, 3, 0, 0])


@pytest.mark.skipif(kernels is None, reason="there is no compiler here")
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
    """All of what was done but the thread's time on a CPU and for one, of which each ledger asks the system itself."""
    return [
        ClockTotals._make(row)._replace(cpu_s=0.0, delayed_s=0.0)
        for row in type(worker_clocks[0]).summed(list(worker_clocks), 0.0)[1]
    ]


@both
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=20), min_size=1, max_size=5))
def test_workers_of_a_pool_are_summed(account_type: type[WorkerClock], lives: list[list[tuple[int, float]]]) -> None:
    clock = HandClock()
    worker_clocks = [account_type(WorkerStates(3), clock, first_state=3, since_s=clock.now) for _ in lives]
    for worker_clock, life in zip(worker_clocks, lives, strict=True):
        for state, seconds in life:
            clock.now += seconds
            worker_clock.enter(state)
            if state < 3:
                worker_clock.served(state, 2, 5)
                worker_clock.failed(state, 1)
    moment = clock.now - 0.3
    alone = [state_s(worker_clock, moment) for worker_clock in worker_clocks]
    assert account_type.summed(worker_clocks, moment)[0] == pytest.approx(
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
def test_both_ledgers_say_the_same(steps: list[tuple[str, int, float]], data: st.DataObject) -> None:
    clock = HandClock()
    worker_clock, other = (kind(WorkerStates(3), clock, first_state=3) for kind in (WorkerClock, PythonAccount))
    worker_clock.trace, other.trace = deque(), deque()
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
            for one in (worker_clock, other):
                chunk.slowest = (float(much), 1) if number else None
                one.served(number, int(much), 7 * number, chunk)
                assert (chunk.slowest is None) == (not number or int(much) > 0), "the next stage is not charged with it"
    moment = data.draw(st.floats(90, clock.now + 10))
    assert state_s(worker_clock, moment) == pytest.approx(state_s(other, moment), abs=1e-9)
    assert worker_clock.timeline(95.0, moment) == other.timeline(95.0, moment)
    assert counted(worker_clock) == counted(other)
    assert [worker_clock.slow_items.kept(n) for n in range(3)] == [other.slow_items.kept(n) for n in range(3)]
    assert worker_clock.trace == other.trace
    assert (worker_clock.open_state, worker_clock.since_s) == (other.open_state, other.since_s)


class TestHistogram:
    @given(st.lists(st.floats(1e-8, 100), min_size=1, max_size=300), st.floats(0.01, 1))
    def test_percentiles_within_ten_percent(self, seconds: list[float], share: float) -> None:
        histogram = Histogram()
        for value in seconds:
            histogram.add(value, 1)
        found = histogram.percentile(share)
        reached = -(-share * len(seconds) // 1)
        exact = sorted(seconds)[max(0, int(reached) - 1)]
        assert found == pytest.approx(exact, rel=0.1)

    def test_nothing_has_no_percentile(self) -> None:
        assert Histogram().percentile(0.5) is None


class TestAttribution:
    @given(
        st.floats(0, 10),
        st.lists(st.tuples(st.floats(0, 3), st.integers(-2, 2)), max_size=12),
        st.floats(0, 3),
        st.floats(-5, 20),
        st.floats(0, 20),
        st.booleans(),
    )
    def test_parts_sum_to_the_wait(
        self, opened: float, gaps: list[tuple[float, int]], tail: float, begin: float, length: float, short: bool
    ) -> None:
        clock = HandClock()
        pools = [
            [WorkerClock(WorkerStates(3), clock, first_state=0)],
            [WorkerClock(WorkerStates(3), clock, first_state=3)],
        ]
        marks = []
        now = opened
        for gap, state in gaps:
            now += gap
            marks.append((now, state))
        facts = stalls.WaitFacts(short, ["a", "b", "c"], pools)
        found = stalls.attribute(
            begin,
            begin + length,
            stalls.ChunkPath(opened, marks, now + tail),
            facts,
        )
        assert sum(found.values()) == pytest.approx(length)
        # Another process traces more than the wait, which it does not know, and the wait is cut out later.
        longer = stalls.segments_of(
            min(begin, 0) - 5,
            begin + length + 50,
            stalls.ChunkPath(opened, marks, now + tail),
            facts,
        )
        assert stalls.charge(longer, begin, begin + length) == pytest.approx(found)
        assert all(seconds >= 0 for seconds in found.values())
        assert set(found) <= {"a", "b", "c", stalls.START, stalls.MEMORY, stalls.WAKEUP}

    def test_time_in_a_queue_is_charged_to_what_the_pool_did(self) -> None:
        clock = HandClock()
        worker_clock = WorkerClock(WorkerStates(2), clock, first_state=0)
        clock.now = 103.0
        worker_clock.enter(1)
        clock.now = 104.0
        worker_clock.enter(0)
        path = stalls.ChunkPath(100.0, [(104.0, 0), (105.0, 1)], 106.0)
        found = stalls.attribute(100.0, 106.5, path, stalls.WaitFacts(False, ["slow", "quick"], [[worker_clock]]))
        assert found == pytest.approx({"slow": 3 + 1, "quick": 1 + 1, "wakeup": 0.5})


class Slow:
    """A data set or function that takes its time where it is told to."""

    def __init__(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.seconds = seconds
        self._sleep = sleep

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._sleep(self.seconds)
        return {"x": index}

    def __call__(self, sample: dict[str, Any]) -> None:
        self._sleep(self.seconds)


class TestVerdicts:
    def slow_in(self, slow: str, seconds: float, sleep: Callable[[float], None]) -> Pipeline:
        """48 samples in 6 batches; the stage `slow` takes `seconds` for each sample, or eight times that for a batch."""
        pause = {name: Slow(seconds if name == slow else 0.0, sleep) for name in ("read", "call", "call-2")}
        pause["call-2"].seconds *= 8
        pipeline = Pipeline.dataset(pause["read"]).shuffle(seed=0).read().call(pause["call"]).batch(8)
        return pipeline.call(pause["call-2"])

    @pytest.mark.parametrize("pools", [{}, {"stages.call.workers": 2, "stages.call-2.workers": 1}])
    @pytest.mark.parametrize("slow", ["read", "call", "call-2"])
    def test_inline_accounts_are_exact(self, slow: str, pools: dict[str, Any]) -> None:
        """Time passes only where it is injected, so it must all be in that stage's account, and none elsewhere."""
        clock = HandClock()

        def pass_time(seconds: float) -> None:
            clock.now += seconds

        overrides = {"prefetch.executor": "inline", **pools}
        with loaderkit.build(self.slow_in(slow, 0.25, pass_time), overrides=overrides, clock=clock) as loader:
            for _ in range(2):
                for _ in loader:
                    pass
            stall = loader.stats().to_dict()["stall"]
        # One sample is read beforehand, to see what a batch looks like: nothing can run until then.
        probe = {} if slow == "call-2" else {"start": 0.25}
        assert stall["by_stage"] == pytest.approx({slow: 2 * 48 * 0.25, **probe})
        assert stall["total_s"] == pytest.approx(clock.now - 100.0)

    @pytest.mark.parametrize("pools", [{}, {"stages.call.workers": 2, "stages.call-2.workers": 1}])
    @pytest.mark.parametrize("slow", ["read", "call", "call-2"])
    def test_threads_blame_the_slow_stage(self, slow: str, pools: dict[str, Any]) -> None:
        with loaderkit.build(self.slow_in(slow, 0.01, time.sleep), overrides=pools) as loader:
            stream = iter(loader)
            next(stream)
            begun = loader.stats()
            for _ in stream:
                pass
            stall = loader.stats(since=begun).to_dict()["stall"]
        assert next(iter(stall["by_stage"])) == slow, stall
        assert stall["by_stage"][slow] > 0.7 * stall["total_s"]

    def test_to_pad_is_the_work_of_batch(self, photos: Path) -> None:
        """Also where `normalize` is done on the slots, so that it comes between landing and padding."""
        arrays = [torch.zeros(1_000_000 - n) for n in range(8)]

        def attach(sample: dict[str, Any]) -> None:
            sample["x"] = arrays[len(sample["__key__"]) % 8]

        pipeline = Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8).call(attach)
        pipeline = pipeline.batch(8, ragged={"x": "pad"}).normalize(mean="imagenet", std="imagenet")
        with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
            list(loader)
            rows = {row.name: row for row in loader.stats().stages}
        assert rows["normalize"].busy_s < 0.2 * rows["batch"].busy_s

    def test_a_slow_consumer_does_not_stall(self) -> None:
        with loaderkit.build(Pipeline.dataset(Slow(0.0)).read().batch(8)) as loader:
            stream = iter(loader)
            next(stream)
            wait_for(lambda: loader.stats().num_ready > 0)  # the consumer is busy until the next batch is ready
            ready = loader.stats()
            for _ in stream:
                wait_for(lambda: loader.stats().num_ready > 0)
            stats = loader.stats(since=ready)
        assert stats.to_dict()["stall"]["percent"] < 50
        assert stats.stages[-1].blocked_s > stats.stages[0].busy_s

    @pytest.mark.parametrize("executor", ["thread", "inline"])
    def test_slots_sum_to_workers_times_wall(self, executor: str) -> None:
        pipeline = Pipeline.dataset(Slow(0.001)).read().call(Slow(0.001)).batch(4)
        overrides = {"prefetch.executor": executor, "stages.call.workers": 3}
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            stream = iter(loader)
            next(stream)
            before = loader.stats()
            for _ in stream:
                pass
            after = loader.stats()
            difference = loader.stats(since=before)
        wall = after.now_s - before.now_s
        num_workers = 1 if executor == "inline" else after.tuning["concurrency"]
        slots = sum(stage.slot_s for stage in after.stages) - sum(stage.slot_s for stage in before.stages)
        assert slots == pytest.approx(num_workers * wall, rel=0.01)
        assert difference.num_batches == 11
        assert difference.num_samples == 44
        assert all(value >= 0 for stage in difference.to_dict()["stages"] for value in list(stage.values())[2:9])

    def test_a_wait_that_is_still_open_counts(self) -> None:
        """With the consumer blocked all the time, the statistics read meanwhile say so, and name the stage."""
        entered, release = threading.Event(), threading.Event()

        def hold(sample: dict[str, Any]) -> None:
            if sample["__key__"] != "0":  # which is also run once beforehand, to see what a batch looks like
                entered.set()
                release.wait(30)

        loader = loaderkit.build(Pipeline.dataset(Slow(0.0)).read().call(hold).batch(4))
        consumer = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
        consumer.start()
        assert entered.wait(30)
        wait_for(lambda: loader.stats().to_dict()["stall"]["by_stage"].get("call", 0.0) >= 0.05)
        assert loader.stats().to_dict()["stall"]["percent"] > 90
        release.set()
        consumer.join(30)
        loader.close()

    def test_statistics_are_json_with_the_promised_keys(self) -> None:
        import json

        with loaderkit.build(Pipeline.dataset(Slow(0.0)).read().batch(4)) as loader:
            assert loader.stats().to_dict()["num_batches"] == 0
            list(loader)
            found = json.loads(json.dumps(loader.stats().to_dict()))
        assert {"stall", "stages", "throughput", "memory", "tuning"} <= set(found)
        assert set(found["stall"]) == {"total_s", "percent", "by_stage"}
        assert set(found["throughput"]) == {"samples_per_s", "bytes_per_s"}
        times = ["busy_s", "cpu_s", "delayed_s", "starved_s", "blocked_s", "idle_s", "slot_s", "p50_s", "p99_s"]
        numbers = ["workers", "num_items", "num_bytes", "num_failed", "num_queued"]
        assert set(found["stages"][0]) == {"name", *numbers, *times}

    def test_a_long_wait_is_reported_with_stage_sample_and_stack(self, caplog: pytest.LogCaptureFixture) -> None:
        release = threading.Event()

        def hang(sample: dict[str, Any]) -> None:
            if sample["__key__"] == "5":
                release.wait(30)

        import logging

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                release.set()

        handler = Handler()
        logging.getLogger("loaderkit").addHandler(handler)
        try:
            pipeline = Pipeline.dataset(Slow(0.0)).shuffle("none").read().call(hang).batch(8)
            with loaderkit.build(pipeline, overrides={"prefetch.timeout": "200ms"}) as loader:
                list(loader)
        finally:
            logging.getLogger("loaderkit").removeHandler(handler)
        report = caplog.records[0].getMessage()
        assert "in call for" in report
        assert "in hang" in report
        assert "'5'" in report


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("loaderkit")]
