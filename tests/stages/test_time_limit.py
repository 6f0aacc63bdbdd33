"""A function that does not come back in time is the failure of its sample, and nothing waits for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from numbers_dataset import PROCESS, Numbers, hang, numbers
from waiting import join_threads

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.torch_threads import ONE_AT_A_TIME
from loaderkit.errors import ConfigError, StageError
from loaderkit.stages.time_limit import TimeLimit


def companions() -> list[threading.Thread]:
    gc.collect()
    return [thread for thread in threading.enumerate() if "-limited-" in thread.name]


def join_companions() -> None:
    gc.collect()
    join_threads("-limited-")


class Trap:
    """Holds the caller with a sample of `victims` until it is opened."""

    def __init__(self, *victims: str) -> None:
        self.victims = victims
        self.is_open = threading.Event()

    def on_sample(self, sample: dict[str, Any]) -> None:
        if sample["__key__"] in self.victims:
            self.is_open.wait(60)

    def on_batch(self, batch: dict[str, Any]) -> None:
        if batch["__key__"][0] in self.victims:
            self.is_open.wait(60)


@pytest.fixture
def trap() -> Iterator[Trap]:
    found = Trap("20", "40")
    yield found
    found.is_open.set()
    join_companions()


def trapped(trap: Trap, **overrides: Any) -> loaderkit.Loader:
    pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().call(trap.on_sample).batch(8)
    given = {"stages.call.timeout": "2s", "stages.call.thread_safe": True, "prefetch.concurrency": 2}
    return loaderkit.build(pipeline, overrides={**given, **overrides})


class TestSamples:
    @pytest.mark.parametrize("executor", ["inline", "thread"])
    def test_the_sample_is_named(self, trap: Trap, executor: str) -> None:
        with trapped(trap, **{"prefetch.executor": executor}) as loader:
            batches = iter(loader)
            next(batches)
            next(batches)
            with pytest.raises(StageError, match=r"did not return within 2s \(stages.call.timeout\)") as caught:
                next(batches)
            assert caught.value.key == "20"
            assert isinstance(caught.value.__cause__, TimeoutError)

    @pytest.mark.parametrize("executor", ["inline", "thread"])
    def test_the_others_are_served(self, trap: Trap, executor: str) -> None:
        with trapped(trap, **{"prefetch.executor": executor, "errors.on_bad_sample": "skip"}) as loader:
            found = [key for batch in loader for key in batch["__key__"]]
            assert found == [str(n) for n in range(64) if n not in (20, 40)]
            assert len(companions()) >= 2, "the two that hang"
        trap.is_open.set()
        join_companions()

    def test_in_another_process(self) -> None:
        pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().call(hang, thread_safe=True).batch(8)
        overrides = {**PROCESS, "stages.call.timeout": "1s", "errors.on_bad_sample": "skip"}
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            assert [key for batch in loader for key in batch["__key__"]] == [str(n) for n in range(64) if n != 20]


class TestBatches:
    def test_the_batch_is_named(self) -> None:
        trap = Trap("16")
        pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().batch(8).call(trap.on_batch, thread_safe=True)
        with loaderkit.build(pipeline, overrides={"stages.call.timeout": "2s"}) as loader:
            batches = iter(loader)
            next(batches)
            next(batches)
            with pytest.raises(StageError, match="batch 2 of epoch 0"):
                next(batches)
        trap.is_open.set()
        join_companions()


class TestLimit:
    def test_results_and_errors_pass(self) -> None:
        before, limit = companions(), TimeLimit("call", 60)
        assert [limit(divmod, n, 3) for n in range(5)] == [divmod(n, 3) for n in range(5)]
        with pytest.raises(ZeroDivisionError):
            limit(divmod, 1, 0)
        with pytest.raises(KeyboardInterrupt):
            limit(interrupt)
        assert limit(divmod, 7, 3) == (2, 1)
        assert len({*companions()} - {*before}) == 1
        del limit
        join_companions()

    def test_a_late_answer_is_dropped(self) -> None:
        trap = threading.Event()
        limit = TimeLimit("call", 0.01)
        with pytest.raises(TimeoutError):
            limit(trap.wait, 60)
        trap.set()
        assert TimeLimit("call", 60)(divmod, 7, 3) == (2, 1)
        limit.close()
        join_companions()

    def test_where_one_call_at_a_time_runs_it_waits_for_an_abandoned_one(self) -> None:
        limit, trap, has_ended = TimeLimit("call", 0.05, is_alone=True), threading.Event(), threading.Event()

        def hang() -> None:
            trap.wait(60)
            has_ended.set()

        with pytest.raises(TimeoutError, match="did not return within"):
            limit(hang)
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"still runs.*`thread_safe: true`"):
                limit(divmod, 7, 3)
        trap.set()
        has_ended.wait(60)
        assert limit(divmod, 7, 3) == (2, 1)
        limit.close()
        join_companions()

    def test_many_that_hang_are_announced(self, caplog: pytest.LogCaptureFixture) -> None:
        trap = threading.Event()
        limit = TimeLimit("call", 0.001)
        for _ in range(25):
            with pytest.raises(TimeoutError):
                limit(trap.wait, 60)
        assert caplog.text.count("10 calls of stages.call hang at once") == 1
        assert len(caplog.records) == 1
        trap.set()
        limit.close()  # one may wait for the next call
        join_companions()

    def test_a_worker_meets_the_same_thread_until_a_call_is_abandoned(self) -> None:
        """So a connection in `threading.local` is opened once a worker."""
        limit, trap = TimeLimit("call", 1.0), threading.Event()

        def idents() -> set[int]:
            return {limit(threading.get_ident) for _ in range(300)}

        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            both = [[worker.submit(idents) for worker in (first, second)] for _ in range(3)]
            met = [set[int]().union(*(future.result() for future in futures)) for futures in zip(*both, strict=True)]
            assert [len(each) for each in met] == [1, 1]
            assert met[0] != met[1]
            with pytest.raises(TimeoutError):
                first.submit(limit, trap.wait, 60).result()
            after = first.submit(idents).result()
            assert len(after) == 1
            assert not after & met[0]
            assert second.submit(idents).result() == met[1]
            trap.set()
        join_companions()  # they end with the workers
        assert not [thread for thread in threading.enumerate() if "Dummy" in thread.name]

    def test_every_thread_has_a_companion_of_its_own(self) -> None:
        limit = TimeLimit("call", 60)
        both = threading.Barrier(2)
        threads = [threading.Thread(target=limit, args=(both.wait, 30)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not both.broken


def interrupt() -> None:
    raise KeyboardInterrupt


def test_only_functions_of_the_users_have_a_limit() -> None:
    description: dict[str, Any] = {
        "source": {"kind": "dataset", "object": Numbers()},
        "stages": ["read", {"batch": {"size": 4, "timeout": "5s"}}],
    }
    with pytest.raises(ConfigError, match="timeout"):
        loaderkit.build(description)


class TestTorchsThreads:
    @pytest.mark.parametrize("executor", ["inline", "thread"])
    def test_those_to_come_are_left_as_they_were(self, executor: str) -> None:
        """Threads of a loader, and companions, compute with one each; other threads are left alone."""
        seen: set[int] = set()
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().call(partial(note_threads, seen)).batch(8)
            overrides = {"stages.call.timeout": "60s", "prefetch.executor": executor}
            with loaderkit.build(pipeline, overrides=overrides) as loader:
                list(loader)
                assert seen == {1}
                assert threads_of_a_thread_to_come() == [3]
                if executor == "thread":
                    resizer = threading.Thread(target=loader.resize, args=("read",), kwargs={"workers": 4})
                    resizer.start()
                    resizer.join()
                    assert threads_of_a_thread_to_come() == [3]
        finally:
            torch.set_num_threads(before)

    def test_a_thread_that_has_resized_before(self) -> None:
        """As the tuner's: what torch told it then is not what a user has set since."""
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            with loaderkit.build(numbers()) as loader, ThreadPoolExecutor(1) as resizer:
                next(iter(loader))
                resizer.submit(loader.resize, "read", workers=4).result()
                torch.set_num_threads(2)
                resizer.submit(loader.resize, "read", workers=6).result()
                assert threads_of_a_thread_to_come() == [2]
        finally:
            torch.set_num_threads(before)


def note_threads(seen: set[int], sample: dict[str, Any]) -> None:
    seen.add(torch.get_num_threads())


def threads_of_a_thread_to_come() -> list[int]:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    with ONE_AT_A_TIME:  # a thread of the loader may begin just now, and changes the number for a moment
        thread.start()
        thread.join()
    return found
