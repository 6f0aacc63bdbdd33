"""`executor: ray`: the batches of actors are those of one thread, and are the user's."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numbers_dataset import is_running, numbers, pids_of
from ray_clusters import RAY
from ray_nodes import build_ray, check_nothing_left, stored_bytes
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.ray.connection import Connection
from loaderkit.engine.ray.surroundings import Surroundings
from loaderkit.errors import ClosedError, ConfigError, StageError
from loaderkit.profile.render.html import to_html
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report
from profiles.bottlenecks import text_contradictions

pytestmark = pytest.mark.usefixtures("ray_nodes")


class Large:
    """Sample i is a hundred thousand bytes of i, too large for a message."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((100_000,), index, dtype=torch.uint8), "text": f"number {index}"}


def large() -> Pipeline:
    return Pipeline.dataset(Large()).shuffle(seed=3).read().batch(8)


def frozen(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def of_inline(pipeline: Pipeline, num_epochs: int = 1) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        return [frozen(batch) for _ in range(num_epochs) for batch in loader]


class TestBatches:
    @pytest.mark.parametrize("num", [pytest.param(1, marks=pytest.mark.prove), 3])
    def test_are_those_of_inline(self, num: int) -> None:
        with build_ray(numbers(200), num) as loader:
            found = [frozen(batch) for _ in range(2) for batch in loader]
            stats = loader.stats()
        assert found == of_inline(numbers(200), 2)
        assert (stats.num_batches, stats.num_samples, stats.num_restarts) == (50, 400, 0)
        assert len(stats.tuning.pids or ()) == len(set(stats.tuning.nodes or ())) == num  # spread over the nodes
        assert sum(stats.stall_s.values()) == pytest.approx(stats.to_dict()["stall"]["total_s"])
        check_nothing_left()

    def test_are_the_users(self) -> None:
        """They may be changed in place, stay valid when the loader goes on, is closed and its actors are dead, and leave the
        store with their last tensor."""
        with build_ray(large(), 1) as loader:
            stream = iter(loader)
            kept = [next(stream) for _ in range(3)]
            expected = [batch["x"].clone() + 1 for batch in kept]
            for batch in kept:
                batch["x"] += 1
            pids = pids_of(loader)
            others = list(stream)
            assert all(torch.equal(batch["x"], values) for batch, values in zip(kept, expected, strict=True))
        wait_for(lambda: not any(map(is_running, pids)))
        for _ in range(20):  # others would be given memory that was free
            ray.get(ray.put(np.full(800_000, 255, np.uint8)))
        assert all(torch.equal(batch["x"], values) for batch, values in zip(kept, expected, strict=True))
        view = kept[0]["x"][3]
        del kept, batch, others
        gc.collect()
        assert torch.equal(view, expected[0][3])
        del view
        check_nothing_left()

    def test_a_dropped_batch_leaves_the_store(self) -> None:
        with build_ray(large(), 1, **{"prefetch.batches": 4}) as loader:
            most = 0
            for _ in range(3):
                for batch in loader:
                    del batch
                    most = max(most, stored_bytes())
        assert most <= 4 * 800_000 + 4096 * 12
        check_nothing_left()

    def test_with_fewer_or_more_ahead_at_any_time(self, rng: random.Random) -> None:
        pipeline = large()
        expected = of_inline(pipeline, 2)
        with build_ray(pipeline, 2, **{"prefetch.batches": 8}) as loader:
            found = []
            for _ in range(2):
                for batch in loader:
                    found.append(frozen(batch))
                    if rng.random() < 0.5:
                        loader.resize(batches=rng.choice([2, 3, 8]))
        assert found == expected
        del batch
        check_nothing_left()

    def test_come_when_memory_bounds_those_ahead(self) -> None:
        """An actor that may have a hundred batches ahead, and memory for nine: it is told of each that is taken."""
        more = {
            "prefetch.batches": 100,
            "prefetch.memory": "8MB",
            "prefetch.timeout": "30s",
            "prefetch.on_timeout": "raise",
        }
        with build_ray(large(), 1, **more) as loader:
            found = [frozen(batch) for _ in range(5) for batch in loader]
        assert found == of_inline(large(), 5)
        check_nothing_left()

    def test_seeks_and_states_across_executors(self) -> None:
        pipeline = large()
        expected = of_inline(pipeline, 2)
        one = {**RAY, "prefetch.processes": 1}
        for first, second in ((one, {"prefetch.executor": "inline"}), ({"prefetch.executor": "thread"}, one)):
            with loaderkit.build(pipeline, overrides=first) as loader:
                stream = iter(loader)
                found = [frozen(next(stream)) for _ in range(5)]
                state = loader.state_dict()
            with loaderkit.build(pipeline, overrides=second) as loader:
                loader.load_state_dict(state)
                found += [frozen(batch) for _ in range(2) for batch in loader]
            assert found == expected
        with build_ray(pipeline, 2) as loader:  # while batches are underway
            stream = iter(loader)
            for _ in range(3):
                next(stream)
            loader.load_state_dict(state)
            assert [frozen(batch) for batch in loader] == expected[5:12]
            for _ in range(3):
                next(iter(loader))
        del stream
        check_nothing_left()


class Unreadable:
    """Can be pickled, and not be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("seven",)


def test_an_actor_that_cannot_read_what_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surroundings, "here", Unreadable)
    with build_ray(large(), 1) as loader, pytest.raises(ConfigError, match=r"seven(.|\n)*the same versions of Python"):
        next(iter(loader))
    check_nothing_left()


def test_a_signals_handler_closes_it_while_a_batch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    do = Connection.do

    def interrupted(self: Connection, function: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and isinstance(arguments[0], int):  # the number of a call for a batch
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
        return do(self, function, *arguments, **options)

    loader = build_ray(large(), 1)
    before = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
    try:
        stream = iter(loader)
        next(stream)
        monkeypatch.setattr(Connection, "do", interrupted)
        with pytest.raises(ClosedError):
            list(stream)
    finally:
        signal.signal(signal.SIGUSR1, before)
    del stream
    check_nothing_left()


def test_rows_by_node_say_what_came_from_where() -> None:
    """Of two actors on two nodes, neither the trainer's, one of which is killed."""
    with build_ray(large(), **{"prefetch.batches": 4, "order.epochs": 4}) as loader:
        batches = [batch for _ in range(2) for batch in loader]
        with loader.profile() as recording:
            stream = iter(loader)
            batches += [next(stream) for _ in range(3)]
            os.kill(pids_of(loader)[0], signal.SIGKILL)
            batches += [*stream, *loader]
        stats = loader.stats()
    assert len(batches) == 4 * 12
    here, *others = stats.nodes.rows
    assert (here.is_trainers, here.num_workers, here.num_batches, here.way_s) == (True, 0, 0, 0.0)
    assert [(row.is_trainers, row.cpus) for row in others] == [(False, 4.0)] * len(others)
    assert sum(row.num_workers for row in others) == 2
    assert sum(row.num_restarts for row in others) == stats.num_restarts == 1
    # What a dead actor had finished may have come, and is made again.
    assert 48 <= sum(row.num_batches for row in others) <= 48 + 4
    assert all(row.num_bytes >= 800_000 * row.num_batches for row in others)
    for row in others:
        assert 0 <= row.carrying_s <= row.way_s
        assert row.cpu_s > 0
        assert (row.latency_s or 0) > 0
    assert stats.nodes.carrying_s <= sum(row.carrying_s for row in others)
    assert stats.waits_s["network"] > 0
    assert sum(stats.stall_s.values()) == pytest.approx(sum(stats.waits_s.values()))
    report = Report.from_json(recording.result.to_json())
    assert sum(row.num_batches for row in report.nodes) <= sum(row.num_batches for row in others) - 24
    assert not text_contradictions(report)
    text, page = to_text(report, width=200), to_html(report)
    for name in [row.name for row in report.nodes]:
        assert name in text.partition("\nNodes\n")[2]
        assert name in page
    assert "(training)" in text
    check_nothing_left()


def fail_at_20(sample: dict[str, Any]) -> None:
    logging.getLogger("loaderkit").warning("about to fail, in %d", os.getpid())
    if sample["__key__"] == "20":
        raise ArithmeticError("twenty")


def test_errors_and_log_records_name_the_node(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline.dataset(Large()).shuffle("none").read().call(fail_at_20).batch(8)
    with build_ray(pipeline, 1) as loader, pytest.raises(StageError, match=r"'20'.*twenty") as caught:
        list(loader)
    notes = "".join(caught.value.__notes__)
    assert "the actor that loads (pid " in notes
    assert " on node " in notes
    assert "about to fail" in caplog.text
    del caught
    check_nothing_left()
