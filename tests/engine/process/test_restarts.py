"""`prefetch.restarts`: a process that was killed is started again, and its batches are made again."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from dying import WAYS, die_always, frozen, records
from iterables import Counting
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, Numbers, build, is_running, numbers, pid_of, pids_of
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.process import worker_main
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.errors import ClosedError, ConfigError, WorkerDiedError

pytestmark = pytest.mark.matrix(1)

DEPTH = 4


def all_of(loader: loaderkit.Loader, num_epochs: int) -> list[tuple[dict[str, Any], int, int]]:
    """Every batch with the epoch and position of the state behind it."""
    found = []
    for _ in range(num_epochs):
        for batch in loader:
            state = loader.state_dict()
            found.append((frozen(batch), state["epoch"], state["position"]))
    return found


def check_equal(num_processes: int, num_deaths: int, size: int, folder: Path, rng: random.Random) -> None:
    """Runs in which processes die at drawn samples give what `inline` gives."""
    skips = {"errors.on_bad_sample": "skip"}
    shuffle = rng.random() < 0.5
    with loaderkit.build(
        records(size, folder, {}, shuffle=shuffle), overrides={**skips, "prefetch.executor": "inline"}
    ) as loader:
        expected = all_of(loader, 2)
    # Two deaths have to be further apart than what is in work at a time, or one batch may be blamed for both.
    apart = 2 * DEPTH + num_processes
    firsts = range(0, len(expected) // 2 - apart, 2 * apart)
    overrides = {**skips, "prefetch.processes": num_processes, "prefetch.batches": DEPTH, "prefetch.restarts": 100}
    for run in range(-(-num_deaths // len(firsts))):
        own = folder / str(run)
        own.mkdir()
        num_now = min(len(firsts), num_deaths - run * len(firsts))
        places = [first + rng.randrange(apart) for first in firsts[:num_now]]
        deaths = {rng.choice(expected[place][0]["__key__"]): rng.choice(WAYS) for place in places}
        with build(records(size, own, deaths, shuffle=shuffle), **overrides) as loader:
            assert all_of(loader, 2) == expected
            assert loader.stats().num_restarts == num_now
            assert loader.stats().num_batches == len(expected)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_the_same_batches(num_processes: int, tmp_path: Path, rng: random.Random) -> None:
    check_equal(num_processes, 2, 400, tmp_path, rng)


@pytest.mark.prove
def test_the_same_batches_after_a_hundred_deaths(tmp_path: Path, rng: random.Random) -> None:
    for num_processes, num_deaths in ((1, 40), (2, 40), (3, 20)):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        check_equal(num_processes, num_deaths, 1600, folder, rng)


def dying(key: str, how: str, **overrides: Any) -> loaderkit.Loader:
    """A loader whose process dies whenever it comes to a sample."""
    pipeline = Pipeline.dataset(Numbers(160)).shuffle("none").read().call(die_always, args={"key": key, "how": how})
    return build(pipeline.batch(8), **overrides)


class TestEnds:
    @pytest.mark.parametrize(("how", "says"), [("SIGSEGV", "C library crashed"), ("leave", "exit code 3")])
    def test_the_second_death_at_a_batch(self, how: str, says: str) -> None:
        """It names the samples of that batch, although others were in work when the first process died."""
        keys: list[str] = []
        with dying("44", how) as loader:
            with pytest.raises(
                WorkerDiedError, match="before it had finished the batch at position 40 of epoch 0"
            ) as caught:
                for batch in loader:
                    keys += batch["__key__"]
            state = loader.state_dict()
        assert keys == [str(number) for number in range(40)]
        assert state["position"] == 40
        assert "(samples '40', '41', '42', '43', '44', '45', '46', '47'), and is the second" in str(caught.value)
        assert says in str(caught.value)
        assert caught.value.samples == tuple(str(number) for number in range(40, 48))
        del caught

    def test_no_restart_is_left(self) -> None:
        with dying("44", "SIGKILL", **{"prefetch.restarts": 1, "prefetch.batches": 1}) as loader:
            stream = iter(loader)
            next(stream)
            os.kill(pid_of(loader), signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=r"All 1 restarts of this run \(prefetch.restarts\)") as caught:
                list(stream)
            assert loader.stats().num_restarts == 1
        assert "before it had finished the batch at position 40 of epoch 0 (samples '40', " in str(caught.value)
        del caught

    def test_an_iterable_cannot_be_made_again(self) -> None:
        pipeline = Pipeline.iterable(Counting(10_000)).read().batch(8)
        with build(pipeline) as loader:
            stream = iter(loader)
            next(stream)
            os.kill(pid_of(loader), signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=r"prefetch\.restarts does not apply: an iterable"):
                list(stream)

    def test_another_one_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(WorkerConnection):
            def __init__(self, *arguments: Any) -> None:
                if started:
                    raise OSError(11, "Resource temporarily unavailable")
                super().__init__(*arguments)
                started.append(self.pid)

        started: list[int] = []
        monkeypatch.setattr("loaderkit.engine.process.worker_process.WorkerConnection", Refusing)
        with build(numbers(800)) as loader:
            stream = iter(loader)
            next(stream)
            os.kill(pid_of(loader), signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match="could not be started: Resource"):
                list(stream)

    def test_killed_while_it_starts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No batch is to blame for that, but it counts."""
        once = f"import os\nif not os.path.exists({str(tmp_path / 'was')!r}):\n"
        once += f"    os.mkdir({str(tmp_path / 'was')!r})\n    os.kill(os.getpid(), 9)\n"
        monkeypatch.setattr(worker_main, "BOOT", once + worker_main.BOOT)
        with build(numbers()) as loader:
            assert [key for batch in loader for key in batch["__key__"]] == [str(n) for n in range(64)]
            assert loader.stats().num_restarts == 1


def test_what_a_loop_sees(caplog: pytest.LogCaptureFixture) -> None:
    """Delivered batches stay as they are, sizes are kept, counters only grow, and the wait is charged to the restart."""
    with build(numbers(100_000), **{"prefetch.processes": 2, "prefetch.memory": "100MiB"}) as loader:
        stream = iter(loader)
        kept = [next(stream) for _ in range(3)]
        loader.resize("read", workers=6)
        loader.resize(batches=6)
        first, second = pids_of(loader)
        before = loader.stats()
        with loader.profile() as report:
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: not is_running(first))
            while loader.stats().num_restarts == 0:
                kept.append(next(stream))
            loader.resize(memory="200MiB")  # while it starts
            while "worker restart" not in loader.stats().waits_s:
                kept.append(next(stream))
            for _ in range(20):
                kept.append(next(stream))  # noqa: PERF401
        after = loader.stats(since=before)
        wait_for(lambda: loader.stats().stages[0].workers == 6)
        wait_for(lambda: (now := loader.stats()).num_ready == now.num_open == 6)
        third, other = pids_of(loader)
        assert other == second
        assert third not in (first, second)
        assert loader.stats().memory["budget_bytes"] == 200 * 2**20
        assert [batch["x"][0].item() for batch in kept] == list(range(0, 8 * len(kept), 8))
        assert all((batch["filling"] == batch["x"][:, None]).all() for batch in kept)
        assert (after.num_restarts, after.num_batches) == (1, len(kept) - 3)
        assert all(row.num_items > 0 and row.busy_s >= 0 and row.blocked_s >= 0 for row in after.stages)
        assert after.host.cpu_s >= 0
        assert sum(after.stall_s.values()) <= after.wall_s * 1.001
        assert after.stall_s["worker restart"] > 0
    told = report.to_dict()
    assert told["stall"]["by_stage"]["worker restart"] > 0
    assert "worker restart" in str(report)
    (warning,) = [record.getMessage() for record in caplog.records if "Another one" in record.getMessage()]
    assert f"pid {first}) was killed by SIGKILL before it had finished the batch at position " in warning
    assert f"Another one (pid {third}) makes its batches again from there on; 2 of 3 restarts" in warning
    assert kept[0]["filling"][7].tolist() == [7] * 1000  # the loader is closed, and so is the process that made it


def test_wherever_the_loop_goes(rng: random.Random) -> None:
    """Breaks, epochs and states between a death and the next batch."""
    with build(numbers(400), **{"prefetch.processes": 2, "prefetch.restarts": 100}) as loader:
        for number in range(4):
            begin = rng.randrange(40)
            loader.load_state_dict({**loader.state_dict(), "epoch": number, "position": begin * 8})
            stream = iter(loader)
            for _ in range(rng.randrange(0 if number else 1, 3)):  # the first batch starts the processes
                next(stream)
            os.kill(rng.choice(pids_of(loader)), signal.SIGKILL)
            begin = rng.randrange(40)
            loader.load_state_dict({**loader.state_dict(), "epoch": number, "position": begin * 8})
            keys = [key for batch in loader for key in batch["__key__"]]
            assert keys == [str(key) for key in range(begin * 8, 400)]


class TestClosing:
    @pytest.mark.parametrize("is_in_this_thread", [True, False])
    def test_while_another_one_is_started(self, is_in_this_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a signal's handler, or by another thread."""

        class Closing(WorkerConnection):
            def __init__(self, *arguments: Any) -> None:
                if started:
                    closing.start()
                    if is_in_this_thread:
                        loader.close()
                super().__init__(*arguments)
                started.append(self.pid)

        started: list[int] = []
        monkeypatch.setattr("loaderkit.engine.process.worker_process.WorkerConnection", Closing)
        loader = build(numbers(800))
        closing = threading.Thread(target=(lambda: None) if is_in_this_thread else loader.close)
        stream = iter(loader)
        next(stream)
        os.kill(pid_of(loader), signal.SIGKILL)
        with pytest.raises(ClosedError):
            list(stream)
        closing.join()
        loader.close()
        assert len(started) == 2
        wait_for(lambda: not any(map(is_running, started)))

    @pytest.mark.parametrize("num_deaths", [2, pytest.param(50, marks=pytest.mark.prove)])
    def test_nothing_is_left_of_the_dead(self, num_deaths: int, rng: random.Random) -> None:
        """Threads, descriptors, mappings, and memory of the batches that the loop has dropped."""
        overrides = {"prefetch.processes": 2, "prefetch.batches": 2, "prefetch.restarts": num_deaths}
        with build(numbers(100_000), **overrides) as loader:
            stream = iter(loader)
            next(stream)
            wait_for(lambda: loader.stats().num_ready == 2)
            before = resources()
            for number in range(num_deaths):
                os.kill(rng.choice(pids_of(loader)), signal.SIGKILL)
                while loader.stats().num_restarts == number:
                    next(stream)
                for _ in range(4):
                    next(stream)
            wait_for(lambda: resources() == before)


def test_what_kills_every_process_that_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_main, "BOOT", "import os; os.kill(os.getpid(), 9)")
    with caplog.at_level(logging.WARNING), build(numbers()) as loader:
        with pytest.raises(
            WorkerDiedError, match="could not start: it was killed by SIGKILL before it was ready"
        ) as caught:
            next(iter(loader))
        assert loader.stats().num_restarts == 3
    assert "All 3 restarts" in str(caught.value)
    assert "before it had finished" not in str(caught.value)
    assert len([record for record in caplog.records if "Another one" in record.getMessage()]) == 3
    del caught


def test_the_number_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"prefetch\.restarts"):
        loaderkit.build(numbers(), overrides={**PROCESS, "prefetch.restarts": -1})
