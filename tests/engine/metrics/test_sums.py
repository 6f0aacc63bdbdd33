"""Over any interval slot time sums to workers x wall time, and stalls sum to the waits, whatever is open at its ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from executors import executor_of
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numbers_dataset import Numbers, hang
from waiting import join_threads, messages_with
from worker_clocks import state_s

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.diagnose import diagnose
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.consumer_account import ConsumerAccount
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.errors import ClosedError, StageError

Wait = tuple[float, float]


def check_sums(earlier: Stats, later: Stats, waits: list[Wait], workers: int, slack_s: float) -> None:
    """`waits` are all there were, also after `later`; what is open at a moment counts up to it."""
    found = later.since(earlier)
    wall_s = later.now_s - earlier.now_s
    assert sum(stage.slot_s for stage in found.stages) == pytest.approx(workers * wall_s, rel=0.01, abs=1e-6)
    waited_s = sum(
        max(0.0, min(end, later.now_s) - max(begin, earlier.now_s)) for begin, end in waits if begin < later.now_s
    )
    assert sum(found.stall_s.values()) == pytest.approx(waited_s, rel=0.01, abs=slack_s)
    for stage in found.stages:
        assert min(stage.busy_s, stage.starved_s, stage.blocked_s, stage.idle_s) >= -1e-9
    assert min(found.stall_s.values(), default=0.0) >= 0.0


class ByHand:
    """A clock that goes when told to, by the next of some steps; at some of them, half-way, somebody looks."""

    def __init__(self, steps: list[float], looks: set[int]) -> None:
        self.now = 50.0
        self.look: Callable[[], None] = lambda: None
        self._steps = steps
        self._looks = looks
        self._number = 0

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        seconds = self._steps[self._number % len(self._steps)]
        self._number += 1
        self.now += seconds / 2
        if self._number in self._looks:
            self.look()
        self.now += seconds / 2


class Steps:
    """A data set, or a function, that takes a step of the clock."""

    def __init__(self, clock: ByHand) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._clock.step()
        return {"x": index}

    def __call__(self, sample: dict[str, Any]) -> None:
        self._clock.step()


@settings(max_examples=num_examples(60))
@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=9).filter(any),
    st.sets(st.integers(1, 70), min_size=2, max_size=6),
    st.sampled_from([{}, {"stages.call.workers": 1}, {"stages.batch.workers": 1, "stages.call-2.workers": 1}]),
)
def test_inline_with_time_by_hand(steps: list[float], looks: set[int], pools: dict[str, Any]) -> None:
    """Looks fall into the middle of every kind of work, also of the consumer's own."""
    clock = ByHand(steps, looks)
    pipeline = Pipeline.dataset(Steps(clock)).shuffle(seed=2).read().call(Steps(clock)).batch(3).call(Steps(clock))
    waits: list[Wait] = []
    moments: list[Stats] = []
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline", **pools}, clock=clock) as loader:
        clock.look = lambda: moments.append(loader.stats())
        for _ in range(2):
            batches = iter(loader)
            while True:
                begin = clock.now
                waits.append((begin, float("inf")))
                if next(batches, None) is None:
                    waits.pop()
                    break
                waits[-1] = (begin, clock.now)
                clock.step()
        moments.append(loader.stats())
    for earlier, later in combinations(moments, 2):
        check_sums(earlier, later, waits, 1, 1e-6)
    whole = moments[-1]
    assert sum(whole.stall_s.values()) == pytest.approx(sum(end - begin for begin, end in waits))
    assert sum(stage.slot_s for stage in whole.stages) == pytest.approx(whole.wall_s)


class Readings:
    """The real clock, which notes what the consumer's thread reads from it: its first and last reading in a `next()` are
    where the wait begins and ends."""

    def __init__(self) -> None:
        self.thread = 0
        self.consumers: list[float] = []

    def __call__(self) -> float:
        now = time.perf_counter()
        if threading.get_ident() == self.thread:
            self.consumers.append(now)
        return now


def pause(sample: dict[str, Any]) -> None:
    """A wait whose length depends on the sample."""
    time.sleep(1e-4 * (int(sample["__key__"]) % 7))


PAUSES = Pipeline.dataset(Numbers(600)).shuffle("none").read().call(pause).batch(6)


@pytest.mark.parametrize(
    "overrides",
    [
        {"prefetch.concurrency": 1},
        {"prefetch.concurrency": 3},
        {"stages.call.workers": 3, "stages.batch.workers": 2, "prefetch.concurrency": 6},
        {"prefetch.concurrency": 4, "prefetch.batches": 1},
    ],
)
def test_threads_looked_at_from_another_one(overrides: dict[str, Any]) -> None:
    clock = Readings()
    check_looked_at(loaderkit.build(PAUSES, overrides=overrides, clock=clock), clock)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_processes_looked_at_from_another_thread(num_processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments are the trainer's, also those at which the processes give their accounts."""
    clock = Readings()
    monkeypatch.setattr("loaderkit.engine.remote.executor.time", SimpleNamespace(perf_counter=clock))
    sizes = {"prefetch.executor": "process", "prefetch.processes": num_processes, "prefetch.concurrency": 4}
    check_looked_at(loaderkit.build(PAUSES, overrides=sizes), clock)


def check_looked_at(loader: loaderkit.Loader, clock: Readings) -> None:
    """Over any interval between two of many looks from another thread, slots and stalls sum to what they should."""
    moments: list[Stats] = []
    waits: list[Wait] = []
    with loader:
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(0.003):
                moments.append(loader.stats())

        batches = iter(loader)
        next(batches)
        watcher = threading.Thread(target=look)
        watcher.start()
        clock.thread = threading.get_ident()
        try:
            for number in range(80):
                clock.consumers.clear()
                next(batches)
                waits.append((clock.consumers[0], clock.consumers[-1]))
                if number % 8 == 0:
                    time.sleep(0.004)  # the consumer is busy: then nothing is waited for
        finally:
            clock.thread = 0
            is_over.set()
            watcher.join()
        workers = loader.stats().tuning.concurrency
    moments = [moment for moment in moments if waits[0][1] <= moment.now_s <= waits[-1][1]]
    assert len(moments) > 4
    for earlier, later in combinations(moments[:: max(1, len(moments) // 12)], 2):
        check_sums(earlier, later, waits, workers, slack_s=0.02)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_blocked_for_the_whole_interval(executor: str) -> None:
    """The consumer waits before, during and after: all of it is stall, and the verdict names what hangs."""
    go_on = threading.Event()

    def hold(sample: dict[str, Any]) -> None:
        if sample["__key__"] == "20":
            go_on.wait(60)

    function = hang if executor == "process" else hold  # the other process ends with what hangs in it
    pipeline = Pipeline.dataset(Numbers(64)).shuffle("none").read().call(function, thread_safe=True).batch(8)
    sizes = {"prefetch.executor": executor, "prefetch.concurrency": 2, "prefetch.timeout": "500ms"}
    with executor_of(pipeline, **sizes) as engine, messages_with("in call for") as said:

        def consume() -> None:
            with pytest.raises(ClosedError):
                while True:
                    engine.next()

        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            said.get(timeout=120)
            before = engine.stats(Tuning(), 0)
            said.get(timeout=120)
            found = engine.stats(Tuning(), 0).since(before)
        finally:
            engine.close(0.0)
            go_on.set()
            consumer.join(30)
    assert found.num_batches == 0
    assert found.to_dict()["stall"]["percent"] > 99
    verdict = diagnose(found)
    assert (verdict.stage, verdict.kind) == ("call", "waiting")
    assert verdict.percent > 99


def risen(earlier: dict[str, float], later: dict[str, float]) -> dict[str, float]:
    nothing = Stats.empty([], 1)
    return replace(nothing, waits_s=later).since(replace(nothing, waits_s=earlier)).stall_s


def test_what_an_open_wait_was_charged_to_may_change() -> None:
    """The chunk that was the least far was not the one that came last: what moves to another cause lies before."""
    assert risen({"read": 5.0, "wakeup": 1.0}, {"decode": 6.0, "wakeup": 1.0}) == {
        "read": 0.0,
        "decode": 1.0,
        "wakeup": 0.0,
    }


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0, 9)), st.dictionaries(st.sampled_from("abcd"), st.floats(0, 9))
)
def test_a_rise_sums_and_is_never_negative(earlier: dict[str, float], later: dict[str, float]) -> None:
    found = risen(earlier, later)
    assert sum(found.values()) == pytest.approx(max(0.0, sum(later.values()) - sum(earlier.values())), abs=1e-9)
    assert min(found.values(), default=0.0) >= 0.0


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 10)), min_size=1, max_size=40), st.floats(0, 1))
def test_a_clock_read_late_is_that_of_the_moment(steps: list[tuple[int, float]], share: float) -> None:
    """The reader looked at the clock, waited for the GIL, and then read: what came in between does not count."""
    now = 100.0
    worker_clock = WorkerClock(WorkerStates(3), lambda: now, first_state=3)
    for state, seconds in steps:
        now += seconds
        worker_clock.enter(state)
    moment = 100.0 + share * (now - 100.0)
    expected = [0.0] * 6
    for state, since, until in worker_clock.timeline(100.0, moment):
        expected[state] += until - since
    assert state_s(worker_clock, moment) == pytest.approx(expected, abs=1e-9)


def test_a_wait_is_never_found_twice_nor_lost() -> None:
    """Ten thousand waits of one second by a clock of their own, read by another thread meanwhile."""
    time_s, is_over = [0.0], threading.Event()
    account = ConsumerAccount(lambda: time_s[0])
    wrong: list[tuple[float, float]] = []

    def look() -> None:
        while not is_over.is_set():
            read = account.read()
            found = sum(read.waits_s.values())
            if read.waiting_since_s is not None:
                found += read.now_s - read.waiting_since_s
            if found != read.now_s:
                wrong.append((found, read.now_s))

    reader = threading.Thread(target=look)
    reader.start()
    for second in range(10_000):
        account.begin(float(second))
        time_s[0] = second + 1.0
        account.end({"read": 0.5, "decode": 0.5})
    is_over.set()
    reader.join()
    assert not wrong


def test_cpu_time_of_work_that_is_not_over() -> None:
    """A worker that has been computing for long computes, and does not wait, also before it is done."""
    seen: list[tuple[float, float]] = []

    def compute(sample: dict[str, Any]) -> None:
        if sample["__key__"] == "3" and not seen:
            begin = time.thread_time()
            while time.thread_time() < begin + 0.2:
                pass
            reader = threading.Thread(target=look)
            reader.start()
            reader.join()

    def look() -> None:
        row = next(row for row in loader.stats().stages if row.name == "call")
        seen.append((row.cpu_s, row.busy_s))

    with loaderkit.build(Pipeline.dataset(Numbers(16)).shuffle("none").read().call(compute).batch(8)) as loader:
        list(loader)
    assert 0.2 <= seen[0][0] <= seen[0][1]


class TestAnyThreadAnyTime:
    def test_before_during_and_after(self) -> None:
        pipeline = Pipeline.dataset(Numbers(200)).read().call(fail_seldom).batch(4)
        overrides = {"prefetch.concurrency": 3, "stages.call.workers": 2}
        loader = loaderkit.build(pipeline, overrides=overrides)
        is_over = threading.Event()
        raised: list[BaseException] = []

        def look() -> None:
            is_last = False
            try:
                while not is_last:
                    is_last = is_over.is_set()  # one more look, at a loader that is closed
                    before = loader.stats()
                    now = loader.stats()
                    if before.run == now.run:
                        assert now.since(before).verdict().confidence <= 1
                    assert 0 <= now.to_dict()["stall"]["percent"] <= 100
            except BaseException as error:
                raised.append(error)

        watchers = [
            threading.Thread(
                target=look,
            )
            for _ in range(3)
        ]
        for watcher in watchers:
            watcher.start()
        try:
            loader.start()
            for epoch in range(6):
                loader.set_epoch(epoch)
                try:
                    for step, _ in enumerate(loader):
                        if step == 20:
                            loader.resize("read", workers=1 + epoch % 3)
                except StageError:
                    pass
            loader.close()
        finally:
            is_over.set()
            for watcher in watchers:
                watcher.join()
            loader.close()
        if raised:
            raise raised[0]


def fail_seldom(sample: dict[str, Any]) -> None:
    if sample["__key__"] == "150":
        raise ValueError("bad")


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    join_threads("loaderkit")
