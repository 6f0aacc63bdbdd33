"""Stages that run in the trainer's process behind one that loads: those from `transfer` to CUDA on."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from late_stages import engine_with, scale
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import build, numbers
from waiting import join_threads

import loaderkit
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.restarts import Restarts
from loaderkit.errors import ClosedError, StallTimeout, WorkerDiedError
from loaderkit.samples.chunk import BatchContext


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_processes", [1, 2])
class TestTrainerStages:
    def test_they_run_here_in_order_and_are_accounted_for(self, num_processes: int) -> None:
        seen: list[tuple[int, int, str]] = []

        def late(batch: dict[str, Any], context: BatchContext) -> None:
            seen.append((os.getpid(), context.first_position, context.keys[0]))
            batch["filling"] = batch["filling"] * 2

        engine = engine_with(late, num_processes)
        batches = [engine.next() for _ in range(3)]
        engine.seek(0, 48)
        batches.append(engine.next())
        assert [batch.result["x"][0].item() for batch in batches] == [0, 8, 16, 48]
        assert all(torch.equal(b.result["filling"][:, 0], 2 * b.result["x"]) for b in batches)
        assert {(os.getpid(), position, str(position)) for position in (0, 8, 16, 48)} <= set(seen)
        stats = engine.stats(Tuning(), 0)
        assert [stage.name for stage in stats.stages] == ["read", "batch", "late"]
        assert stats.stages[-1].num_items >= 32
        assert stats.stages[-1].workers == num_processes
        assert stats.stages[-1].slot_s > 0
        assert sum(stats.stall_s.values()) > 0
        engine.close()
        with pytest.raises(ClosedError):
            engine.next()

    def test_their_error_comes_in_its_place(self, num_processes: int) -> None:
        def late(batch: dict[str, Any], context: BatchContext) -> None:
            if context.first_position == 16:
                raise ArithmeticError("sixteen")

        engine = engine_with(late, num_processes)
        assert [engine.next().error for _ in range(2)] == [None, None]
        assert isinstance(engine.next().error, ArithmeticError)
        assert engine.next().error is None
        engine.close()

    def test_the_death_of_a_process(self, num_processes: int) -> None:
        engine = engine_with(lambda batch, context: None, num_processes)
        engine.next()
        pids = engine.stats(Tuning(), 0).tuning.pids
        assert pids is not None
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            for _ in range(8):
                engine.next()
        engine.close()

    def test_a_process_in_the_place_of_another(self, num_processes: int) -> None:
        """What the dead one had finished goes through the stages, too, and their time is counted on."""
        seen: list[int] = []

        def late(batch: dict[str, Any], context: BatchContext) -> None:
            seen.append(context.first_position)
            scale(batch)

        engine = engine_with(late, num_processes, restarts=Restarts(1))
        batches = [engine.next() for _ in range(2)]
        before = engine.stats(Tuning(), 0)
        assert before.tuning.pids is not None
        os.kill(before.tuning.pids[-1], signal.SIGKILL)
        batches += [engine.next() for _ in range(6)]
        after = engine.stats(Tuning(), 0)
        assert after.num_restarts == 1
        assert [batch.result["x"][0].item() for batch in batches] == list(range(0, 64, 8))
        assert all(torch.equal(b.result["scaled"], b.result["filling"] * 2.0) for b in batches)
        assert sorted(seen) == list(range(0, 64, 8))  # each once
        assert after.stages[-1].num_items == 64
        assert after.stages[-1].workers == num_processes
        engine.close()


def test_a_stage_that_hangs_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    is_in, is_free = threading.Event(), threading.Event()

    def late(batch: dict[str, Any], context: BatchContext) -> None:
        if context.first_position == 16:
            is_in.set()
            is_free.wait(600)

    engine = engine_with(late, timeout_s=0.1, raises=True)
    try:
        engine.start()
        assert is_in.wait(60)  # so nothing is waited for before that batch
        for _ in range(2):
            engine.next()
        with pytest.raises(StallTimeout, match="batch 2 of epoch 0, in late for") as caught:
            engine.next()
        assert caught.value.stage == "late"
        assert "is_free.wait" in str(caught.value), "the stack"
        del caught
        engine.close(0.5)
        assert "loaderkit-late did not stop within 0.5 s" in caplog.text
    finally:
        is_free.set()
        join_threads("loaderkit-late")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_transfer_runs_in_the_process_that_trains(self) -> None:
        made = numbers().call(scale).transfer().call(on_device)
        with loaderkit.build(made) as plain, build(made) as loader:
            for found, expected in zip(loader, plain, strict=True):
                assert found["scaled"].device.type == "cuda"
                assert torch.equal(found["scaled"], expected["scaled"])
                assert found["where"] == os.getpid()
            assert [pool.is_trainers for pool in loader.stats().tuning.pools] == [False, True]

    def test_slabs_are_pinned(self) -> None:
        pinned: list[bool] = []
        engine = engine_with(
            lambda batch, context: pinned.append(batch["filling"].is_pinned()), pinned_for=torch.device("cuda", 0)
        )
        engine.next()
        engine.close()
        assert pinned[0]


def on_device(batch: dict[str, Any]) -> None:
    batch["where"] = os.getpid()
