"""Stages in the trainer's process behind actors, as `transfer` to CUDA is, and the pinned memory that batches are copied to.

A recorder stands in for CUDA: it gives usual memory where pinned memory is asked for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from late_stages import engine_with
from numbers_dataset import numbers
from ray_nodes import actor_maker, check_nothing_left, object_sizes, stored_bytes
from waiting import join_threads, wait_for

from loaderkit import Pipeline
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.ray.object_memory import ObjectMemory
from loaderkit.engine.remote.contracts import ReceivedBatch
from loaderkit.engine.remote.trainer_stages import TrainerStages
from loaderkit.engine.restarts import Restarts
from loaderkit.engine.watchdog import HangReport
from loaderkit.engine.work import Stage
from loaderkit.samples.chunk import BatchContext

CUDA = torch.device("cuda", 3)


class Pins:
    """Notes the memory that was asked to be pinned, always while device 3 is current; more than `most` times is refused."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.most = 10**6
        self.num_asked = 0
        self._current = threading.local()

    def take(self, num_bytes: int, **options: Any) -> torch.Tensor:
        """As torch.empty(pin_memory=True)."""
        assert options.pop("pin_memory")
        assert self._current.device == CUDA, "a thread's current device is number 0 at first"
        self.num_asked += 1
        if self.num_asked > self.most:
            raise RuntimeError("CUDA error: out of memory\nMore.")
        tensor = torch.zeros(num_bytes, **options)
        self.arrays.append(tensor.numpy())
        return tensor

    @contextmanager
    def device(self, wanted: torch.device) -> Iterator[None]:
        self._current.device = wanted
        yield
        self._current.device = None

    def forget(self) -> None:
        """Let go of what is old, so that memory does not grow."""
        del self.arrays[:-1000]

    def hold(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies in pinned memory, from its first byte on."""
        return tensor.data_ptr() in {array.ctypes.data for array in self.arrays}


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    pins = Pins()
    empty = torch.empty

    def allocate(*size: Any, **options: Any) -> torch.Tensor:
        return pins.take(*size, **options) if options.get("pin_memory") else empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "device", pins.device)
    return pins


class TestMemory:
    def test_it_is_a_pinned_copy(self, pins: Pins) -> None:
        stored = np.arange(5000, dtype=np.uint8)
        stored.flags.writeable = False
        copied = ObjectMemory(CUDA).open(stored)
        assert copied.ctypes.data == pins.arrays[0].ctypes.data
        assert np.array_equal(copied, stored)
        copied += 1
        assert stored[7] == 7

    def test_where_no_more_can_be_pinned_it_is_the_object_s(self, pins: Pins, caplog: pytest.LogCaptureFixture) -> None:
        pins.most = 2
        memory = ObjectMemory(CUDA)
        for number in range(5):
            stored = np.full(5000, number, np.uint8)
            opened = memory.open(stored)
            assert (opened is stored) == (number >= 2)
            assert opened[0] == number
        assert pins.num_asked == 3
        assert caplog.text.count("cannot be pinned (CUDA error: out of memory)") == 1

    def test_an_error_of_an_earlier_kernel_is_raised(self, monkeypatch: pytest.MonkeyPatch, pins: Pins) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(pins, "take", fail)
        with pytest.raises(RuntimeError, match="illegal"):
            ObjectMemory(CUDA).open(np.zeros(5000, np.uint8))


class Large:
    """Sample i is a hundred thousand bytes of i, too large for a message."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((100_000,), index, dtype=torch.uint8), "number": index}


LARGE = Pipeline.dataset(Large()).shuffle("none").read().batch(8)


def first_of(batch: Any) -> int:
    """The number of the batch's first sample, if its values are what they should be: twice their number."""
    numbers = batch.result["number"]
    assert torch.equal(batch.result["x"], (2 * numbers).to(torch.uint8)[:, None].expand(8, 100_000))
    return int(numbers[0])


@pytest.mark.usefixtures("ray_nodes")
class TestActors:
    def test_batches_are_copied_and_leave_the_store(self, pins: Pins) -> None:
        is_pinned = []

        def late(batch: dict[str, Any], context: BatchContext) -> None:
            is_pinned.append((os.getpid(), pins.hold(batch["x"])))
            batch["x"] *= 2

        with closing(engine_with(late, 2, pipeline=LARGE, pinned_for=CUDA, **actor_maker())) as engine:
            kept = [engine.next() for _ in range(30)]
            wait_for(lambda: not object_sizes() and not stored_bytes())  # though all are held, and the actors live
        assert is_pinned == [(os.getpid(), True)] * 30
        assert [first_of(batch) for batch in kept] == list(range(0, 240, 8))
        check_nothing_left()

    @pytest.mark.prove
    def test_another_number_and_a_death(self, pins: Pins) -> None:
        """Each batch goes through the stages once, in this process, whoever makes it."""
        seen: list[int] = []

        def late(batch: dict[str, Any], context: BatchContext) -> None:
            assert pins.hold(batch["filling"])
            seen.append(context.first_position)
            batch["filling"] *= 2

        pipeline = numbers(40_000)
        engine = engine_with(late, 1, pipeline=pipeline, pinned_for=CUDA, restarts=Restarts(1), **actor_maker())
        found: list[int] = []

        def take() -> None:
            batch = engine.next().result
            assert torch.equal(batch["filling"], (2 * batch["x"])[:, None].expand(8, 1000))
            found.append(int(batch["x"][0]))
            pins.forget()

        def take_until(num: int) -> None:
            while engine.stats(Tuning(), 0).tuning.processes != num:
                take()

        take()
        engine.set_processes(3)
        take_until(3)
        assert engine.stats(Tuning(), 0).stages[-1].workers == 3
        pids = engine.stats(Tuning(), 0).tuning.pids
        assert pids is not None
        os.kill(pids[1], signal.SIGKILL)
        for _ in range(20):
            take()
        engine.set_processes(2)
        take_until(2)
        for _ in range(20):
            take()
        stats = engine.stats(Tuning(), 0)
        engine.close()
        assert stats.num_restarts == 1
        assert found == list(range(0, 8 * len(found), 8))
        assert sorted(seen)[: len(found)] == found
        check_nothing_left()

    def test_closed_while_batches_wait(self, pins: Pins) -> None:
        """The thread that fetches is gone with the engine, and so is what it had fetched."""
        engine = engine_with(lambda batch, context: None, 2, pipeline=LARGE, pinned_for=CUDA, **actor_maker())
        engine.next()
        wait_for(lambda: len(pins.arrays) >= 4)
        engine.close()
        join_threads("loaderkit-fetch")
        check_nothing_left()
        engine.close()


class Closable:
    """A receiver that has no batch and knows why."""

    def __init__(self) -> None:
        self.num_closed = 0

    def take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        raise EOFError

    def taken(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def report(self) -> HangReport | None:
        return HangReport("waits for 64 CPUs", "start")

    def close(self, join_s: float) -> None:
        self.num_closed += 1


def test_what_is_behind_the_stages_is_asked_and_closed() -> None:
    receiver = Closable()
    stages = TrainerStages([Stage("late", "call", "batch", lambda batch, context: None)], lambda: 0.0)
    inbox = stages.follow(receiver)
    assert inbox.report() == HangReport("waits for 64 CPUs", "start")
    inbox.close(60)
    assert receiver.num_closed == 1
