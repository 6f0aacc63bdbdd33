"""`prefetch.processes: N`: batches dealt out to several processes, and one loader as seen from outside."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from num_examples import num_examples
from numbers_dataset import TWO_PROCESSES, Numbers, build, is_running, numbers, pids_of
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.host import HostStats
from loaderkit.engine.metrics.snapshot import StageStats, merged
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.engine.remote.remote_process import RemoteProcess
from loaderkit.errors import ConfigError, StageError, WorkerDiedError
from loaderkit.pipeline.batches.plan import BatchPlan
from loaderkit.pipeline.execution_plan import ExecutionPlan, compile_pipeline
from loaderkit.pipeline.executors.thread_engine import make_batch_plan
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import WHOLE, Shard

pytestmark = pytest.mark.matrix(1)


def plan_of(execution: ExecutionPlan, shard: Shard = WHOLE) -> BatchPlan:
    plan = make_batch_plan(replace(execution, shard=shard))
    plan.prepare()
    return plan


def execution_plan(
    size: int, batch: int, drop_last: bool, epochs: int | None, rank: int, world_size: int
) -> ExecutionPlan:
    pipeline = Pipeline.dataset(Numbers(size)).shuffle(seed=3).epochs(epochs).read().batch(batch, drop_last=drop_last)
    return compile_pipeline(pipeline.config, rank=rank, world_size=world_size)


def opened(plan: BatchPlan) -> Any:
    work_item = plan.open(100)
    if work_item is None:
        return None
    place = (work_item.epoch, work_item.step, work_item.begin, work_item.end)
    return place, work_item.positions.tolist(), work_item.indices.tolist()


class TestDealing:
    @settings(max_examples=num_examples(150))
    @given(
        size=st.integers(1, 40),
        batch=st.integers(1, 9),
        drop_last=st.booleans(),
        epochs=st.one_of(st.none(), st.integers(1, 4)),
        world_size=st.integers(1, 3),
        num_processes=st.integers(1, 5),
        seeks=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 12)), max_size=4),
    )
    def test_in_turns_they_make_what_one_would(
        self,
        size: int,
        batch: int,
        drop_last: bool,
        epochs: int | None,
        world_size: int,
        num_processes: int,
        seeks: list[tuple[int, int, int]],
    ) -> None:
        rank = world_size - 1
        if BatchSampler(size, rank, world_size, batch, drop_last).num_batches() == 0:
            return
        execution = execution_plan(size, batch, drop_last, epochs, rank, world_size)
        whole = plan_of(execution)
        shards = [plan_of(execution, Shard(number, num_processes)) for number in range(num_processes)]
        for epoch, position, num_batches in [(0, 0, 9), *seeks]:
            where = (epoch, min(position, size))
            for plan in (whole, *shards):
                begins_at = plan.begins_at(*where)
                plan.seek(*where)
                assert plan.next_position == begins_at
            for number in range(num_batches):
                assert opened(shards[number % num_processes]) == opened(whole)

    @given(
        size=st.integers(1, 60),
        batch=st.integers(1, 9),
        world_size=st.integers(1, 3),
        drop_last=st.booleans(),
        start=st.integers(0, 60),
        count=st.integers(0, 30),
    )
    def test_places_are_counted_over_epochs(
        self, size: int, batch: int, world_size: int, drop_last: bool, start: int, count: int
    ) -> None:
        schedule = BatchSampler(size, 0, world_size, batch, drop_last)
        if schedule.num_batches() == 0:
            return
        epoch, position = 4, min(start, size)
        expected = schedule.next_position_after(epoch, position, count)
        for _ in range(count):
            epoch, position = schedule.next_position_after(epoch, position, 0)
            position = schedule.position_after(position, 1)
        assert schedule.next_position_after(epoch, position, 0) == expected

    @given(total=st.integers(1, 50), num_processes=st.integers(1, 9))
    def test_shards_make_up_the_whole(self, total: int, num_processes: int) -> None:
        shards = [Shard(number, num_processes) for number in range(num_processes)]
        assert sum(shard.num_batches(total) for shard in shards) == max(total, num_processes)
        assert total - num_processes < sum(shard.num_bytes(total) for shard in shards) <= total
        assert len({shard.num_workers(total) for shard in shards}) == 1
        assert total <= sum(shard.num_workers(total) for shard in shards) < total + num_processes


def where(sample: dict[str, Any]) -> None:
    sample["pid"] = os.getpid()


def hang_at_8(sample: dict[str, Any]) -> None:
    if sample["__key__"] == "8":
        threading.Event().wait(600)


def fail_at_20(sample: dict[str, Any]) -> None:
    if sample["__key__"] == "20":
        raise ValueError("twenty")


def compute(sample: dict[str, Any]) -> None:
    sample["y"] = sum(range(20_000))


def hold_at_28(sample: dict[str, Any], gate: Path) -> None:
    """Holds sample 28, in the fourth batch, until a file is there."""
    if sample["__key__"] == "28":
        wait_for(gate.exists)


def two(pipeline: Pipeline, **overrides: Any) -> loaderkit.Loader:
    return build(pipeline, **{**TWO_PROCESSES, **overrides})


def num_open(loader: loaderkit.Loader) -> int:
    memory = loader.stats().memory
    return memory["open_bytes"] // max(1, memory["slab_bytes"])  # texts count as well, a few bytes


def rss_bytes_of(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestLiving:
    def test_each_makes_every_other_batch(self) -> None:
        with two(Pipeline.dataset(Numbers(56)).shuffle("none").read().call(where).batch(8)) as loader:
            made_by = [int(batch["pid"][0]) for _ in range(2) for batch in loader]
            first, second = pids_of(loader)
            assert made_by == [first, second] * 7  # over the end of the epoch, too
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 24})
            assert [int(batch["pid"][0]) for batch in loader] == [first, second, first, second]

    def test_breaks_resumes_and_epochs(self, rng: random.Random) -> None:
        with loaderkit.build(numbers(100), overrides={"prefetch.executor": "inline"}) as plain:
            expected = [batch["x"].tolist() for batch in plain]
        with two(numbers(100)) as loader:
            for _ in range(40):
                begin, length = rng.randrange(13), rng.randrange(1, 8)
                loader.load_state_dict({**loader.state_dict(), "epoch": rng.randrange(3), "position": begin * 8})
                seen = []
                for batch in loader:
                    seen.append(batch["x"].tolist())
                    if len(seen) == length:
                        break
                assert seen == expected[begin : begin + length]
            memory = loader.stats().memory
            assert num_open(loader) <= 4
            assert memory["allocated_bytes"] <= (4 + 2 * 2) * memory["slab_bytes"]

    def test_behind_a_seek_all_go_on_at_once(self) -> None:
        """What was read ahead for nothing leaves the budget of those, too, whose turn it is not."""
        with two(numbers(800), **{"prefetch.batches": 2}) as loader:
            next(iter(loader))
            num_items = 3 * 8  # of the first batch, and of those read ahead behind it
            wait_for(lambda: loader.stats().stages[0].num_items == num_items)
            wait_for(lambda: loader.stats().num_ready == 2)
            loader.set_epoch(3)
            loader.start()
            wait_for(lambda: loader.stats().stages[0].num_items == num_items + 2 * 8)

    def test_too_few_batches_or_too_little_memory_say_how_much(self) -> None:
        with pytest.raises(ConfigError, match=r"prefetch.batches: 2 cannot be shared out to prefetch.processes: 3"):
            two(numbers(), **{"prefetch.batches": 2, "prefetch.processes": 3})
        with (
            pytest.raises(ConfigError, match=r"65 KiB for each of 2 processes, but one .* 2 times that much"),
            two(numbers(160, 80), **{"prefetch.memory": 130 * 1024}) as loader,
        ):
            next(iter(loader))

    @pytest.mark.parametrize("executor", ["thread", "inline"])
    def test_of_another_executor_say_that_they_are_none(self, executor: str, caplog: pytest.LogCaptureFixture) -> None:
        with two(numbers(), **{"prefetch.executor": executor}) as loader:
            assert len(list(loader)) == 8
        assert f"prefetch.processes: 2 is of no effect with prefetch.executor: {executor}" in caplog.text

    def test_an_error_in_its_place(self) -> None:
        with two(Pipeline.dataset(Numbers()).shuffle("none").read().call(fail_at_20).batch(8)) as loader:
            keys: list[str] = []
            with pytest.raises(StageError, match=r"'20'.*twenty"):
                for batch in loader:
                    keys += batch["__key__"]
            assert keys == [str(n) for n in range(16)]


class TestSizes:
    def test_workers_are_those_of_all(self) -> None:
        with two(numbers(800)) as loader:
            assert loader.stats().stages[0].workers == 2
            batches = iter(loader)
            next(batches)
            loader.resize("read", workers=3)  # each of them has as many, so four it is
            assert loader.stats().tuning.concurrency == 4
            wait_for(lambda: loader.stats().stages[0].workers == 4)
            loader.resize("read", workers=1)
            wait_for(lambda: loader.stats().stages[0].workers == 2)
            loader.resize(batches=2, memory="100MiB")
            with pytest.raises(ConfigError, match="batches: expected a whole number from 2 on, not 1"):
                loader.resize(batches=1)
            with pytest.raises(ConfigError, match="one batch of 8 takes"):
                loader.resize(memory="1KiB")
            assert [batch["__key__"][0] for batch in batches] == [str(n) for n in range(8, 800, 8)]
            assert loader.stats().memory["budget_bytes"] == 100 * 2**20

    def test_left_to_the_tuner(self) -> None:
        auto = {"prefetch.concurrency": "auto", "prefetch.batches": "auto", "prefetch.processes": 5}
        with two(numbers(800), **auto) as loader:
            tuning = loader.stats().tuning
            assert tuning.auto == ("workers of read+batch", "batches")
            assert tuning.batches == 5
            assert tuning.concurrency % 5 == 0

    def test_before_it_starts(self) -> None:
        """And no more is read ahead than asked for."""
        with two(numbers(800)) as loader:
            loader.resize("read", workers=4)
            loader.resize(batches=5)
            next(iter(loader))
            wait_for(lambda: loader.stats().stages[0].workers == 4)
            wait_for(lambda: num_open(loader) == 5)
            assert loader.stats().stages[0].num_items <= 8 * 6 + 2


class TestAccounts:
    def test_of_several_are_those_of_one(self) -> None:
        with two(numbers(800)) as loader:
            batches = iter(loader)
            for _ in range(10):
                next(batches)
            seen = loader.stats()
            assert seen.host.rss_bytes > 1.5 * min(rss_bytes_of(pid) for pid in pids_of(loader))
            assert set(seen.trials) == {"read"}
            assert seen.memory["batch_bytes"] < 2 * seen.memory["slab_bytes"]
            wait_for(lambda: (now := loader.stats()).num_ready == now.num_open == 4)
            assert loader.stats().stages[0].kind == "read"
            assert loader.stats().verdict().kind

    @given(st.lists(st.lists(st.tuples(st.floats(1e-6, 10), st.integers(1, 9)), max_size=5), min_size=2, max_size=4))
    def test_everything_is_merged(self, durations: list[list[tuple[float, int]]]) -> None:
        parts = []
        everything = Histogram()
        for number, mine in enumerate(durations, 1):
            histogram = Histogram()
            for seconds, count in mine:
                histogram.add(seconds, count)
                everything.add(seconds, count)
            taken_in = Histogram()
            taken_in.merge(histogram)
            row = StageStats("read", number, number, num_queued=number, services=taken_in, kind="read")
            parts.append(
                replace(
                    Stats.empty([row], 100 * number),
                    num_ready=number,
                    num_open=2 * number,
                    lateness=taken_in,
                    host=HostStats(number, number, float(number), float(number), number, None),
                    trials={"read": ContentionResult(None, number, None, slowdowns={"read": number})},
                    store={"num_requests": number} if number > 1 else {},  # the first one is still starting, say
                    memory={"budget_bytes": 100 * number, "slab_bytes": 7, "batch_bytes": 9, "live_bytes": number},
                )
            )
        found, total = merged(parts), sum(range(1, len(parts) + 1))
        row = found.stages[0]
        assert (row.name, row.kind, row.workers, row.num_items, row.num_queued) == ("read", "read", total, total, total)
        assert row.services.counts == found.lateness.counts == everything.counts
        assert (found.num_ready, found.num_open) == (total, 2 * total)
        assert found.host == HostStats(total, total, total, len(parts), total, None)
        assert found.store == {"num_requests": total - 1}
        mean = total / len(parts)
        assert found.trials == {"read": ContentionResult(None, mean, None, slowdowns={"read": mean})}
        assert found.memory == {"budget_bytes": 100 * total, "slab_bytes": 7, "batch_bytes": 9, "live_bytes": total}

    def test_slot_time_is_that_of_all_workers(self) -> None:
        with two(numbers(800).call(compute)) as loader:
            batches = iter(loader)
            for _ in range(10):
                next(batches)
            for _ in range(20):  # short ones: an answer that takes a while must not count
                before = loader.stats()
                for _ in range(3):
                    next(batches)
                since = loader.stats(since=before)
                assert sum(stage.slot_s for stage in since.stages) == pytest.approx(2 * since.wall_s, rel=0.01)
                assert (since.num_batches, since.num_samples) == (3, 24)

    def test_stalls_are_charged_to_the_stage(self, tmp_path: Path) -> None:
        """While the second process holds a batch up, and when that wait is over."""
        gate = tmp_path / "gate"
        pipeline = Pipeline.dataset(Numbers(64)).shuffle("none").read().call(partial(hold_at_28, gate=gate)).batch(8)
        with two(pipeline) as loader, ThreadPoolExecutor(1) as loop:
            batches = iter(loader)
            next(batches)
            first = loader.stats()
            remaining = loop.submit(lambda: len(list(batches)))
            try:
                wait_for(lambda: is_for_call(loader.stats(since=first)))
                waiting = loader.stats(since=first)
            finally:
                gate.touch()
            assert remaining.result() == 7
            ended = loader.stats(since=first)
        assert ended.waits_s["call"] >= 0.99 * waiting.waits_s["call"]
        assert sum(ended.stall_s.values()) <= ended.wall_s * 1.001


def is_for_call(stats: Stats) -> bool:
    """True if `call` has more than nine tenths of the stall, and that is long enough to be no hand-off."""
    return stats.stall_s.get("call", 0.0) > max(0.1, 0.9 * sum(stats.stall_s.values()))


class TestDeaths:
    @pytest.mark.parametrize("number", [0, 1])
    def test_of_either(self, number: int) -> None:
        with two(numbers(100_000), **{"prefetch.restarts": 0}) as loader:
            stream = iter(loader)
            kept = [next(stream) for _ in range(4)]
            pids = pids_of(loader)
            os.kill(pids[number], signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=rf"pid {pids[number]}\) was killed by SIGKILL") as caught:
                for _ in stream:
                    pass
            assert caught.value.exit_code == -9
            del caught
            assert not any(map(is_running, pids))
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert next(iter(loader))["__key__"][0] == str(state["position"])
        assert kept[3]["filling"][0].tolist() == [24] * 1000

    def test_of_the_one_that_is_not_awaited(self) -> None:
        hanging = Pipeline.dataset(Numbers()).shuffle("none").read().call(hang_at_8, thread_safe=True).batch(8)
        with two(hanging, **{"prefetch.restarts": 0}) as loader:
            stream = iter(loader)
            next(stream)
            first, second = pids_of(loader)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=rf"pid {first}\) was killed by SIGKILL"):
                next(stream)  # the batch that hangs in the second
            gc.collect()
            assert not is_running(second)

    def test_one_that_cannot_be_started_ends_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(WorkerConnection):
            def __init__(self, *arguments: Any) -> None:
                if started:
                    raise OSError(11, "Resource temporarily unavailable")
                super().__init__(*arguments)
                started.append(self.pid)

        started: list[int] = []
        monkeypatch.setattr("loaderkit.engine.process.worker_process.WorkerConnection", Refusing)
        with two(numbers()) as loader, pytest.raises(WorkerDiedError, match="could not be started: Resource"):
            next(iter(loader))
        assert not is_running(started[0])


def test_ctrl_c_while_the_processes_are_told_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is told, and the other is not: the same place asked for again is reached by both."""
    tell = RemoteProcess.tell

    def interrupted(process: RemoteProcess, *order: Any) -> None:
        if order[0] == "seek" and process.number == 1:
            monkeypatch.undo()
            raise KeyboardInterrupt
        tell(process, *order)

    given = {**TWO_PROCESSES, "prefetch.timeout": 20, "prefetch.on_timeout": "raise"}
    with loaderkit.build(numbers(), overrides=given) as loader:
        batches = iter(loader)
        first = next(batches)
        state = loader.state_dict()
        for _ in range(3):
            next(batches)
        loader.load_state_dict(state)
        monkeypatch.setattr(RemoteProcess, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        loader.load_state_dict(state)
        found = [first, *loader]
    assert [batch["x"][0].item() for batch in found] == list(range(0, 64, 8))
