"""Another number of processes while they load: the same batches in the same order, and nothing left of those that have gone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dying import frozen, records
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, is_running, numbers
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.engine.remote.contracts import WorkerSpec
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.engine.remote.process_table import ProcessTable
from loaderkit.engine.remote.remote_process import RemoteProcess
from loaderkit.errors import ClosedError, WorkerDiedError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.engine_factory import make_executor
from loaderkit.sampling.dealing import BatchDealing
from loaderkit.sampling.shard import Shard

pytestmark = pytest.mark.matrix(1)

DEPTH = 6
Found = list[tuple[dict[str, Any], int, int]]


@contextmanager
def opened(pipeline: Pipeline, **overrides: Any) -> Iterator[RemoteEngine]:
    config = to_config(pipeline, {**PROCESS, "prefetch.batches": DEPTH, "prefetch.restarts": 100, **overrides})
    plan = compile_pipeline(config, rank=0, world_size=1)
    engine = make_executor(plan)
    assert isinstance(engine, RemoteEngine)
    try:
        yield engine
    finally:
        engine.close()
        plan.close()


def take(engine: RemoteEngine, num: int) -> Found:
    found = []
    for _ in range(num):
        batch = engine.next()
        assert batch.error is None
        found.append((frozen(batch.result), batch.epoch, batch.end))
    return found


def num_now(engine: RemoteEngine) -> int | None:
    return engine.stats(Tuning(), 0).tuning.processes


def take_until(engine: RemoteEngine, num_processes: int) -> Found:
    """Batches until so many processes have turns."""
    found = []
    while num_now(engine) != num_processes:
        found += take(engine, 1)
    return found


def test_a_process_is_told_its_share_before_it_has_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late a later command comes: until then it would make batches by the share that it has in its spec."""
    told: dict[int | None, list[str]] = {}
    tell = WorkerConnection.tell

    def noted(self: WorkerConnection, name: str, *arguments: Any) -> None:
        told.setdefault(self.pid, []).append(name)
        tell(self, name, *arguments)

    monkeypatch.setattr(WorkerConnection, "tell", noted)
    with opened(numbers(10**6)) as engine:
        take(engine, 1)
        first = set(told)
        engine.set_processes(2, pytest.fail)
        take_until(engine, 2)
    (joined,) = set(told) - first
    assert told[joined][:3] == ["hold", "share", "spec"]


def expected(pipeline: Pipeline, num: int, **overrides: Any) -> Found:
    """What one thread makes of it."""
    found: Found = []
    with loaderkit.build(pipeline, overrides={**overrides, "prefetch.executor": "inline"}) as loader:
        while len(found) < num:
            for batch in loader:
                state = loader.state_dict()
                found.append((frozen(batch), loader.epoch, state["position"] or loader.num_samples))
    return found[:num]


def test_the_same_batches(tmp_path: Path, rng: random.Random) -> None:
    """Wherever the number changes, and although processes die before, at and behind the border."""
    skips = {"errors.on_bad_sample": "skip"}
    pipeline = records(400, tmp_path, {}, shuffle=True)
    found: Found = []
    with opened(pipeline, **skips) as engine:
        for num, num_deaths in [(3, 0), (2, 1), (4, 2), (1, 1)]:
            found += take(engine, rng.randrange(1, 9))
            engine.set_processes(num)
            for _ in range(num_deaths):
                found += take(engine, rng.randrange(2 * DEPTH))
                os.kill(rng.choice([pid for process in engine.processes if (pid := process.pid)]), signal.SIGKILL)
            found += take_until(engine, num)
        found += take(engine, 2 * DEPTH)
        stats = engine.stats(Tuning(), 0)
        assert stats.num_batches == len(found)
        assert stats.stages[0].workers == 2, "and each has had its share of them"
        (pid,) = stats.tuning.pids or ()
        assert is_running(pid)
    assert found == expected(pipeline, len(found), **skips)


def test_seeks_behind_and_before_the_border(rng: random.Random) -> None:
    """A seek ends a change that is under way: there are as many processes as asked for, or as before if none was ready."""
    pipeline = numbers(400)
    whole = expected(pipeline, 50)
    with opened(pipeline) as engine:
        take(engine, 1)
        for num in (2, 1, 3, 2):
            engine.set_processes(num)
            while len(engine.processes) < num:  # until they have turns, behind the border
                take(engine, 1)
            for _ in range(2):
                begin = rng.randrange(20)
                engine.seek(3, 8 * begin)
                found = take(engine, 12)
                assert [batch for batch, _, _ in found] == [batch for batch, _, _ in whole[begin : begin + 12]]
            assert num_now(engine) == num
        wait_for(lambda: sum(process.has_ended for process in engine.processes) == 0)


def test_nothing_is_left_of_those_that_left() -> None:
    """And batches that they made stay as they are."""
    with opened(numbers(100_000)) as engine:
        kept = [engine.next() for _ in range(3)]
        engine.set_processes(2)
        while num_now(engine) != 2:
            kept.append(engine.next())
        kept += [engine.next() for _ in range(4)]
        before = resources()
        engine.set_processes(1)
        while num_now(engine) != 1:
            kept.append(engine.next())
        engine.set_processes(2)
        while num_now(engine) != 2:
            kept.append(engine.next())
        first, second = (process.pid for process in engine.processes)
        engine.set_processes(1)
        while num_now(engine) != 1:
            kept.append(engine.next())
        wait_for(lambda: not is_running(second or 0))
        assert is_running(first or 0)
        stats = engine.stats(Tuning(), 0)
        assert stats.stages[0].num_items >= 8 * stats.num_batches, "what those did that left is counted"
        del kept[10:]
        wait_for(lambda: (engine.next().error, resources() <= before)[1])
    assert [batch.result["x"][0].item() for batch in kept] == list(range(0, 80, 8))
    assert all((batch.result["filling"] == batch.result["x"][:, None]).all() for batch in kept)


def test_all_together_hold_no_more_than_before() -> None:
    """While those that are there still hold what they made when they were fewer, those that join hold nothing."""
    with opened(numbers(100_000)) as engine:
        take(engine, 1)
        wait_for(lambda: num_open(engine) == DEPTH)
        engine.set_processes(3)
        while len(engine.processes) < 3:
            take(engine, 1)
        for _ in range(2 * DEPTH):
            assert max(num_open(engine) for _ in range(20)) <= DEPTH
            take(engine, 1)
        assert num_now(engine) == 3
        wait_for(lambda: num_open(engine) == DEPTH)


def num_open(engine: RemoteEngine) -> int:
    return engine.stats(Tuning(), 0).num_open


def test_those_that_join_know_their_share_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has begun beyond its share would lie behind the next border, and be made twice."""
    told: dict[int, list[tuple[Any, ...]]] = {}
    tell = RemoteProcess.tell

    def noted(process: RemoteProcess, *order: Any) -> None:
        told.setdefault(id(process), []).append(order)
        tell(process, *order)

    monkeypatch.setattr(RemoteProcess, "tell", noted)
    with opened(numbers(400)) as engine:
        take(engine, 1)
        engine.set_processes(3)
        take_until(engine, 3)
        for process in engine.processes[1:]:
            share, begin = told[id(process)][:2]
            assert (share[0], share[1].of, begin[0]) == ("share", 3, "begin")


def test_one_that_is_not_needed_any_more_ends_in_peace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was ready when fewer were wanted; nothing hangs, so nothing is said to."""
    tables: list[ProcessTable] = []
    start_ahead = ProcessTable.start_ahead

    def noted(table: ProcessTable, *arguments: Any) -> None:
        tables.append(table)
        start_ahead(table, *arguments)

    monkeypatch.setattr(ProcessTable, "start_ahead", noted)
    with opened(numbers(400)) as engine:
        take(engine, 1)
        engine.set_processes(2)
        wait_for(lambda: len(tables[0].ready()[0]) == 1)
        (starting,) = tables[0].starting
        engine.set_processes(1)
        take(engine, 1)
        assert not tables[0].starting
        wait_for(lambda: starting.has_ended)
        assert len(take(engine, 10)) == 10
        assert num_now(engine) == 1
    assert "hangs" not in caplog.text


def test_another_batch_than_the_next_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not delivered: here both processes believe that the border is a batch later."""
    redeal = BatchDealing.redeal

    def mistaken(dealing: BatchDealing, num_processes: int, num_ahead: int) -> tuple[int, int]:
        epoch, position = redeal(dealing, num_processes, num_ahead)
        return epoch, position + 8

    with opened(numbers(100_000)) as engine:
        take(engine, 1)
        monkeypatch.setattr(BatchDealing, "redeal", mistaken)
        engine.set_processes(2)
        found: Found = []
        with pytest.raises(RuntimeError, match="was due: an error of loaderkit"):
            while True:
                found += take(engine, 1)
        with pytest.raises(RuntimeError, match="was due"):
            engine.next()
        assert [end for _, _, end in found] == list(range(16, 16 + 8 * len(found), 8))


def test_before_it_starts() -> None:
    with opened(numbers(400)) as engine:
        engine.set_depth(5, None)
        engine.resize("read", 6)
        engine.seek(2, 16)
        engine.set_processes(3)
        found = take(engine, 4)
        wait_for(lambda: engine.stats(Tuning(), 0).stages[0].workers == 6)
        assert num_now(engine) == len(engine.processes) == 3
        wait_for(lambda: (now := engine.stats(Tuning(), 0)).num_ready == now.num_open == 5)
    assert [(epoch, end) for _, epoch, end in found] == [(2, 24), (2, 32), (2, 40), (2, 48)]


class TestCannotStart:
    def test_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(WorkerConnection):
            def __init__(self, *arguments: Any) -> None:
                if len(started) == 2:
                    raise OSError(11, "Resource temporarily unavailable")
                super().__init__(*arguments)
                started.append(self.pid)

        started: list[int] = []
        monkeypatch.setattr("loaderkit.engine.process.worker_process.WorkerConnection", Refusing)
        with opened(numbers(400)) as engine:
            take(engine, 1)
            with pytest.raises(WorkerDiedError, match="could not be started: Resource"):
                engine.set_processes(3)
            assert not is_running(started[1])
            assert len(take(engine, 20)) == 20
            assert num_now(engine) == 1

    def test_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is said, and loading goes on with those that there are."""
        reasons: list[str] = []
        with opened(numbers(400)) as engine:
            take(engine, 1)
            monkeypatch.setattr("loaderkit.engine.process.worker_main.BOOT", "import os; os.kill(os.getpid(), 9)")
            engine.set_processes(2, reasons.append)
            while not reasons:
                take(engine, 1)
            assert "killed by SIGKILL before it was ready" in reasons[0]
            assert len(take(engine, 20)) == 20
            assert num_now(engine) == 1


class DyingUnheard:
    """A process, and its inbox, that ends unheard after one look at it: the end of its socket is news, as a message is."""

    def __init__(self) -> None:
        self._has_ended = False
        self.inbox = self

    def _look(self) -> bool:
        had_ended, self._has_ended = self._has_ended, True
        return had_ended

    @property
    def is_awake(self) -> bool:
        return self._look()

    def take(self, generation: int, timeout_s: float) -> None:
        if self._look():
            raise EOFError

    def start(self, *arguments: Any) -> None:
        pass


def test_one_that_ends_between_two_looks_is_not_ready() -> None:
    running: Any = DyingUnheard()
    spec = WorkerSpec(None, "", [], [], num_batches=1, memory_bytes=0)
    process = RemoteProcess(spec, lambda *_: running, Shard(0, 1))
    process.start((0, 0))
    with pytest.raises(EOFError):
        process.is_ready()


def test_closed_meanwhile() -> None:
    """With processes that start, and with a border ahead."""
    with opened(numbers(400)) as engine:
        take(engine, 1)
        engine.set_processes(3)
        engine.close()
        with pytest.raises(ClosedError):
            engine.set_processes(1)
    with opened(numbers(400), **{"prefetch.processes": 3}) as engine:
        take(engine, 2)
        engine.set_processes(1)
        take(engine, 1)
        assert len(engine.processes) == 3


@pytest.mark.prove
@pytest.mark.parametrize("drop_last", [True, False])
def test_for_many_epochs(drop_last: bool, rng: random.Random) -> None:
    pipeline = numbers(100).shuffle(seed=3)
    found: Found = []
    with opened(pipeline, **{"stages.batch.drop_last": drop_last}) as engine:
        for _ in range(20):
            num = rng.randrange(1, 5)
            engine.set_processes(num)
            found += take(engine, rng.randrange(1, 30))
            if rng.random() < 0.7:
                found += take_until(engine, num)
    whole = expected(pipeline, len(found), **{"stages.batch.drop_last": drop_last})
    assert [one[:2] for one in found] == [one[:2] for one in whole]
