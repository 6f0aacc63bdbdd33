"""Workers, batches and memory changed while it runs: as many work as are wanted, and the batches stay the same."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from num_examples import num_examples
from numbers_dataset import PROCESS, Numbers, numbers
from waiting import messages_with, wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError


class Crowd:
    """Items that can be held up, to see how many threads are inside, and which have been there."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.is_open = threading.Event()
        self.num_inside = 0
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        with self._changed:
            self.num_inside += 1
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
        self.is_open.wait(60)
        with self._changed:
            self.num_inside -= 1
        return index

    def await_inside(self, num_threads: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_inside == num_threads, 60)


@pytest.fixture
def crowd() -> Any:
    found = Crowd()
    yield found
    found.is_open.set()


def crowded(crowd: Crowd, workers: int) -> loaderkit.Loader:
    pipeline = Pipeline.dataset(crowd, thread_safe=True).shuffle("none").read().batch(1)
    overrides = {"prefetch.concurrency": workers, "prefetch.batches": 8}
    crowd.is_open.set()  # for the sample that shows what a batch looks like
    loader = loaderkit.build(pipeline, overrides=overrides)
    next(iter(loader))
    crowd.is_open.clear()
    return loader


class TestWorkers:
    def test_more(self, crowd: Crowd) -> None:
        with crowded(crowd, 1) as loader:
            loader.resize(batches=100)
            crowd.await_inside(1)
            loader.resize("read", workers=4)
            crowd.await_inside(4)
            assert loader.stats().stages[0].workers == 4
            assert loader.stats().tuning.concurrency == 4
            crowd.is_open.set()

    def test_fewer_rest_and_come_back(self, crowd: Crowd) -> None:
        with crowded(crowd, 4) as loader:
            loader.resize(batches=100)
            crowd.await_inside(4)
            loader.resize("batch", workers=1)  # a stage of the same pool
            crowd.is_open.set()
            batches = iter(loader)
            for _ in range(300):  # behind all that was read ahead by four
                next(batches)
            crowd.threads.clear()
            for _ in range(200):
                next(batches)
            assert len(crowd.threads) == 1
            crowd.is_open.clear()
            crowd.threads.clear()
            loader.resize("read", workers=2)
            for _ in range(loader.stats().num_ready):  # so that there is room
                next(batches)
            crowd.await_inside(2)
            assert loader.stats().stages[0].workers == 2
            crowd.is_open.set()
            for _ in range(100):
                next(batches)
            assert len(crowd.threads) == 2

    def test_the_batches_stay_the_same(self, rng: random.Random) -> None:
        pipeline = Pipeline.dataset(Numbers(200)).read().call(noop).batch(8)
        with (
            loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as inline,
            loaderkit.build(pipeline, overrides={"prefetch.concurrency": 2, "stages.call.workers": 2}) as loader,
        ):
            for _ in range(8):
                for mine, theirs in zip(loader, inline, strict=True):
                    assert mine["__key__"] == theirs["__key__"]
                    loader.resize(rng.choice(["read", "call", "batch"]), workers=rng.randint(1, 5))
                    loader.resize(batches=rng.randint(1, 6))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]

    def test_sizes_outlive_an_error(self) -> None:
        pipeline = Pipeline.dataset(Numbers(64)).shuffle("none").read().call(fail_once).batch(8)
        with loaderkit.build(pipeline, overrides={"prefetch.concurrency": 1}) as loader:
            loader.resize("read", workers=3)
            loader.resize(batches=2)
            with pytest.raises(loaderkit.errors.StageError):
                list(loader)
            loader.set_epoch(5)
            next(iter(loader))
            assert loader.stats().stages[0].workers == 3
            assert loader.stats().tuning.batches == 2


def noop(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def fail_once(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] == 40 and not failed:
        failed.append(1)
        raise ValueError("once")
    return sample


failed: list[int] = []


class Counted(Numbers):
    """Numbers that tell how far they have been read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._last = -1
        self._changed = threading.Condition()

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._changed:
            self._last = max(self._last, index)
            self._changed.notify_all()
        return super().__getitem__(index)

    def await_last_of(self, num_batches: int) -> None:
        """Wait for the last item of the first `num_batches` batches of 8."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._last >= 8 * num_batches - 1, 60)


class TestDepth:
    def test_less_is_read_ahead_from_then_on(self) -> None:
        counted = Counted(800)
        pipeline = Pipeline.dataset(counted).shuffle("none").read().batch(8)
        with loaderkit.build(pipeline, overrides={"prefetch.batches": 8}) as loader:
            loader.start()
            counted.await_last_of(8)
            assert loader.stats().num_open == 8
            batches = iter(loader)
            loader.resize(batches=2)
            for _ in range(8):
                next(batches)
            assert loader.stats().num_open <= 2, "quick batches: workers may wait until all of the room is free"
            loader.resize(batches=6)
            counted.await_last_of(8 + 6)
            batch_bytes = loader.stats().memory["batch_bytes"]
            loader.resize(memory=batch_bytes * 3)
            for _ in range(6):
                next(batches)
            assert loader.stats().num_open <= 3
            assert loader.stats().memory["budget_bytes"] == batch_bytes * 3

    @pytest.mark.parametrize("executor", ["thread", "process"])
    def test_memory_that_holds_no_batch_is_refused(self, executor: str) -> None:
        with loaderkit.build(numbers(), overrides={"prefetch.executor": executor}) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(ConfigError, match="one batch of 8 takes"):
                loader.resize(memory="1KiB")
            next(batches)


class TestProcess:
    def test_threads_of_another_process(self) -> None:
        with loaderkit.build(numbers(800), overrides=PROCESS) as loader:
            loader.resize("read", workers=3)
            batches = iter(loader)
            next(batches)
            wait_for(lambda: loader.stats().stages[0].workers == 3)
            loader.resize("read", workers=1)
            loader.resize(batches=2, memory="100MiB")
            wait_for(lambda: loader.stats().stages[0].workers == 1)
            assert [batch["__key__"][0] for batch in batches] == [str(n) for n in range(8, 800, 8)]


@contextmanager
def no_more_threads() -> Iterator[None]:
    """The system refuses to start a thread, as at a limit of the user or the cgroup: none can have so large a stack."""
    before = threading.stack_size(2**46)
    try:
        yield
    finally:
        threading.stack_size(before)


class SlowNumbers(Numbers):
    """As a store that answers late: more workers pay."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.02)
        return super().__getitem__(index)


class RefusingNumbers(Numbers):
    """Uses up the threads of the process that loads."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        threading.stack_size(2**46)
        return super().__getitem__(index)


class OftenRefusingNumbers(Numbers):
    """Uses them up in the second of two processes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index // 8 % 2:
            threading.stack_size(2**46)
        return super().__getitem__(index)


class TestNoMoreThreads:
    def test_a_user_is_told_and_it_goes_on(self) -> None:
        with loaderkit.build(numbers(800), overrides={"prefetch.concurrency": 2}) as loader:
            batches = iter(loader)
            next(batches)
            num_threads = threading.active_count()
            with no_more_threads(), pytest.raises(ConfigError, match=r"can't start new thread.*the stage keeps 2"):
                loader.resize("read", workers=5)
            assert threading.active_count() == num_threads
            assert loader.stats().stages[0].workers == 2
            assert loader.stats().tuning.concurrency == 2
            assert len(list(batches)) == 99
            loader.resize("read", workers=5)
            assert threading.active_count() == num_threads + 3

    def test_in_another_process(self) -> None:
        pipeline = Pipeline.dataset(RefusingNumbers(800)).shuffle("none").read().batch(8)
        with loaderkit.build(pipeline, overrides=PROCESS) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(ConfigError, match=r"can't start new thread"):
                loader.resize("read", workers=5)
            assert len(list(batches)) == 99

    def test_in_one_of_several_processes(self) -> None:
        """What the first has done by then is undone, so that all are alike."""
        pipeline = Pipeline.dataset(OftenRefusingNumbers(800)).shuffle("none").read().batch(8)
        sizes = {**PROCESS, "prefetch.processes": 2, "prefetch.concurrency": 4}
        with loaderkit.build(pipeline, overrides=sizes) as loader:
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            with pytest.raises(ConfigError, match=r"can't start new thread.*the stage keeps 2"):
                loader.resize("batch", workers=9)
            assert [row.workers for row in loader.stats().stages] == [4, 4]
            assert loader.stats().tuning.concurrency == 4
            loader.resize("read", workers=2)
            assert [row.workers for row in loader.stats().stages] == [2, 2]
            assert len(list(batches)) == 98

    def test_the_tuner_tries_less(self) -> None:
        pipeline = Pipeline.dataset(SlowNumbers(10**6), thread_safe=True).shuffle("none").read().batch(1)
        with loaderkit.build(pipeline) as loader:
            batches = iter(loader)
            next(batches)
            with no_more_threads(), messages_with("the tuner could not set workers of read+batch") as said:
                while not loader.stats().tuning.decisions:
                    next(batches)
                said.get(timeout=60)
            decision = loader.stats().tuning.decisions[0]
            assert decision["kept"] is False
            assert "refused: resize: " in decision["effect"]
            assert loader.stats().stages[0].workers == decision["before"]
            next(batches)

    def test_without_a_monitor(self, caplog: pytest.LogCaptureFixture) -> None:
        with loaderkit.build(numbers()) as loader:
            with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
                next(iter(loader))
            assert "without a tuner" in caplog.text
            assert len(list(loader)) == 8


class Tripping(Numbers):
    """Fails once after `trips` is set."""

    trips = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.trips:
            self.trips = False
            raise ValueError("once")
        return super().__getitem__(index)


class TestRaces:
    @pytest.mark.parametrize("overrides", [{"prefetch.concurrency": 2}, PROCESS], ids=["thread", "process"])
    def test_a_close_while_a_batch_is_awaited(self, overrides: dict[str, Any]) -> None:
        for _ in range(20 if "prefetch.executor" not in overrides else 2):
            loader = loaderkit.build(numbers(8000), overrides=overrides)
            closer = threading.Thread(target=loader.close)
            batches = iter(loader)
            next(batches)
            closer.start()
            with pytest.raises(loaderkit.errors.ClosedError):
                for _ in range(2):
                    list(batches)
            closer.join()

    def test_settings_changed_by_three_threads_while_it_starts_ends_and_starts_again(self, rng: random.Random) -> None:
        for _ in range(num_examples(8)):
            numbers = Tripping(64)
            with loaderkit.build(Pipeline.dataset(numbers).read().batch(8)) as loader:
                is_over = threading.Event()
                failures: list[BaseException] = []
                changers = [
                    threading.Thread(target=change, args=(loader, is_over, failures, rng.random())) for _ in range(3)
                ]
                for thread in changers:
                    thread.start()
                for _ in range(20):
                    with suppress(StageError):
                        for batch in loader:
                            if rng.random() < 0.1:
                                loader.load_state_dict(loader.state_dict())
                                break
                            assert len(batch["x"]) == 8
                    numbers.trips = rng.random() < 0.3
                numbers.trips = False
                is_over.set()
                for thread in changers:
                    thread.join()
                assert failures == []
                loader.resize("read", workers=3)
                with suppress(StageError):  # of a batch that was read ahead
                    list(loader)
                list(loader)
                assert loader.stats().stages[0].workers == 3


def change(loader: loaderkit.Loader, is_over: threading.Event, failures: list[BaseException], seed: float) -> None:
    rng = random.Random(seed)
    try:
        while not is_over.is_set():
            loader.resize("read", workers=rng.randint(1, 6))
            loader.resize(batches=rng.randint(1, 6), memory=rng.choice([None, "1GiB"]))
            json.dumps(loader.stats().to_dict())
            json.dumps(loader.series())
    except BaseException as error:
        failures.append(error)


class TestMistakes:
    def test_nothing_is_changed_by_half(self) -> None:
        with loaderkit.build(numbers()) as loader:
            with pytest.raises(ConfigError, match="memory"):
                loader.resize("read", workers=7, batches=3, memory="much")
            assert loader.stats().tuning.concurrency != 7

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"stage": "reed", "workers": 2}, "no stage 'reed'; there are read, batch"),
            ({"stage": "read"}, "a stage together with its workers"),
            ({"workers": 2}, "a stage together with its workers"),
            ({"stage": "read", "workers": 0}, "workers: expected a whole number from 1 on, not 0"),
            ({"stage": "read", "workers": 1.5}, "workers: expected a whole number"),
            ({"stage": "read", "workers": True}, "workers: expected a whole number"),
            ({"batches": 0}, "batches: expected a whole number"),
            ({"memory": -5}, "memory: expected a whole number"),
            ({"memory": "much"}, "memory: expected a size such as 8MiB"),
        ],
    )
    def test_say_what_is_wrong(self, arguments: dict[str, Any], message: str) -> None:
        with loaderkit.build(numbers()) as loader, pytest.raises(ConfigError, match=message):
            loader.resize(**arguments)

    def test_inline_has_no_workers(self) -> None:
        with (
            loaderkit.build(numbers(), overrides={"prefetch.executor": "inline"}) as loader,
            pytest.raises(ConfigError, match="inline"),
        ):
            loader.resize("read", workers=2)

    def test_a_closed_loader_is_closed(self, tmp_path: Path) -> None:
        loader = loaderkit.build(numbers())
        loader.close()
        with pytest.raises(loaderkit.errors.ClosedError):
            loader.resize(batches=2)
