"""Waits are charged to the stage that caused them: on paths made by hand, and by loaders."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executors import executor_of
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S, join_threads, messages_with, wait_for
from worker_clocks import HandClock

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates


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
        return {"x": torch.tensor(index)}  # it says its type, so that one sample shows what a batch holds

    def __call__(self, sample: dict[str, Any]) -> None:
        self._sleep(self.seconds)


class TestLoaders:
    def slow_in(self, slow: str, seconds: float, sleep: Callable[[float], None]) -> Pipeline:
        """48 samples in 6 batches; the stage `slow` takes `seconds` for each sample, or eight times that for a batch."""
        pause = {name: Slow(seconds if name == slow else 0.0, sleep) for name in ("read", "call", "call-2")}
        pause["call-2"].seconds *= 8
        # Else `read` waits while `call` runs, for code that is not declared runs in one thread at a time.
        pipeline = Pipeline.dataset(pause["read"], thread_safe=True).shuffle(seed=0).read()
        return pipeline.call(pause["call"], thread_safe=True).batch(8).call(pause["call-2"], thread_safe=True)

    @pytest.mark.parametrize("pools", [{}, {"stages.call.workers": 2, "stages.call-2.workers": 1}])
    @pytest.mark.parametrize("slow", ["read", "call", "call-2"])
    def test_inline_stalls_are_exact(self, slow: str, pools: dict[str, Any]) -> None:
        """Time passes only where it is injected, so all of it must be charged to that stage."""
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

    @pytest.mark.prove
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
        assert rows["normalize"].cpu_s < 0.2 * rows["batch"].cpu_s

    def test_a_slow_consumer_does_not_stall(self) -> None:
        """It asks only for batches that are ready: its waits are charged to no stage, and the workers are blocked."""
        overrides = {"prefetch.batches": 2, "prefetch.concurrency": 2}
        with loaderkit.build(Pipeline.dataset(Slow(0.0)).read().batch(8), overrides=overrides) as loader:
            stream = iter(loader)
            next(stream)
            begun = loader.stats()

            def is_full() -> bool:
                now = loader.stats(since=begun)
                return now.num_ready == now.num_open > 0 and now.stages[-1].blocked_s > 2 * now.stages[0].busy_s

            for _ in range(5):
                wait_for(is_full)
                next(stream)
            stats = loader.stats(since=begun)
        assert {cause for cause, seconds in stats.stall_s.items() if seconds > 0} == {stalls.WAKEUP}
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
        num_workers = 1 if executor == "inline" else after.tuning.concurrency
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

        # Of two workers the other one could wait in `read`, which is user code as well, and runs when `call` does not.
        loader = loaderkit.build(Pipeline.dataset(Slow(0.0)).read().call(hold).batch(4).prefetch(concurrency=1))
        consumer = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
        consumer.start()
        assert entered.wait(30)

        def is_named() -> bool:
            stall = loader.stats().to_dict()["stall"]
            return bool(stall["percent"] > 90 and stall["by_stage"].get("call", 0.0) > 0.9 * stall["total_s"])

        wait_for(is_named)  # the longer it waits, the less its start counts
        release.set()
        consumer.join(30)
        loader.close()

    def test_an_open_wait_is_that_of_the_chunk_that_is_farthest_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One chunk is in `call` already, another still in `read`, and one has landed."""
        queued, reading = (0.0, stalls.QUEUED), (1.0, 0)
        chunks = [
            SimpleNamespace(
                has_landed=has_landed, marks=[queued, reading, *[(1.5, stalls.QUEUED - 1), (2.0, 1)][:num_more]]
            )
            for has_landed, num_more in ((False, 2), (False, 0), (True, 0))
        ]
        head = SimpleNamespace(is_done=False, opened_s=0.0, chunks=chunks)
        pipeline = Pipeline.dataset(Slow(0.0)).read().call(lambda sample: None, workers=1).batch(4)
        with executor_of(pipeline, **{"prefetch.executor": "thread"}) as engine:
            monkeypatch.setattr(engine, "head", lambda: head)
            assert engine.open_wait(4.0, 9.0) == {"read": 5.0}

    def test_statistics_are_json_with_the_promised_keys(self) -> None:
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

    def test_a_long_wait_is_reported_with_stage_sample_and_stack(self) -> None:
        release = threading.Event()

        def hang(sample: dict[str, Any]) -> None:
            if sample["__key__"] == "5":
                release.wait(30)

        pipeline = Pipeline.dataset(Slow(0.0)).shuffle("none").read().call(hang, thread_safe=True).batch(8)
        with executor_of(pipeline, **{"prefetch.timeout": "200ms"}) as engine, messages_with("in hang") as said:
            consumer = threading.Thread(target=engine.next)
            consumer.start()
            report = said.get(timeout=LIMIT_S)
            release.set()
            consumer.join()
        assert "in call for" in report
        assert "'5'" in report


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    join_threads("loaderkit")
