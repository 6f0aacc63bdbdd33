"""What the actors of a loader are given is in the object store once, until the loader's end; each writes to its own arrays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numbers_dataset import numbers
from ray.exceptions import ObjectStoreFullError
from ray_clusters import RAY
from ray_nodes import build_ray, check_nothing_left, object_sizes

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.ray.connection import Connection
from loaderkit.engine.ray.shared_engine import SharedEngine
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.errors import ClosedError, StageError, WorkerDiedError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.engine_factory import make_executor

NUM_BYTES = 20_000_000


class Rows:
    """Sample i is the beginning of row i of a large array, and in whose memory that lies. The rows are random numbers."""

    def __init__(self, *, may_write: bool = True) -> None:
        self.rows = np.random.default_rng(3).integers(0, 256, (400, NUM_BYTES // 400), np.uint8)
        self.rows.flags.writeable = may_write

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.rows[index, :16].copy(), "may_write": self.rows.flags.writeable, "stored": self.is_stored}

    @property
    def is_stored(self) -> bool:
        """True if the rows lie in the object store of this node."""
        start = self.rows.ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(text, 16) for text in line.split()[0].split("-"))
            if first <= start < last:
                return "plasma" in line
        return False


class Marked(Rows):
    """Its array is marked by the process that reads it, which must be the only one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows[0, :8] = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        mark = self.rows[0, :8].view(np.int64)
        if mark[0] not in (0, os.getpid()):
            raise ArithmeticError("another process writes to this array")
        mark[0] = os.getpid()
        return {"x": index, "pid": os.getpid()}


def pipeline_of(dataset: Rows) -> Pipeline:
    return Pipeline.dataset(dataset).shuffle("none").read().batch(8)


def engine_of(dataset: Rows, num_actors: int) -> RemoteEngine:
    overrides = {**RAY, "prefetch.processes": num_actors, "prefetch.batches": 8}
    engine = make_executor(compile_pipeline(to_config(pipeline_of(dataset), overrides), rank=0, world_size=1))
    assert isinstance(engine, RemoteEngine)
    return engine


@pytest.mark.usefixtures("ray_nodes")
class TestInTheStore:
    def test_it_is_there_once_for_all_actors_and_their_successors(self) -> None:
        dataset = Rows()
        rows = dataset.rows.copy()
        engine = engine_of(dataset, 3)
        found: list[torch.Tensor] = []

        def take(num: int) -> None:
            found.extend(engine.next().result["x"].clone() for _ in range(num))

        def check_store() -> None:
            assert len(object_sizes()) == 1
            assert NUM_BYTES < sum(object_sizes()) < 1.01 * NUM_BYTES

        try:
            engine.start()
            check_store()
            dataset.rows[:] = 0  # what they get was that of the start
            take(4)
            check_store()
            pids = engine.stats(Tuning(), 0).tuning.pids
            assert pids is not None
            for pid in pids[:2]:
                os.kill(pid, signal.SIGKILL)
            take(12)
            assert engine.stats(Tuning(), 0).num_restarts == 2
            check_store()
            engine.set_processes(4)
            while engine.stats(Tuning(), 0).tuning.processes != 4:
                take(1)
            take(8)
            check_store()
        finally:
            engine.close()
        assert not object_sizes()
        whole = torch.cat(found).numpy()
        assert len(whole) > 24 * 8
        assert np.array_equal(whole, rows[np.arange(len(whole)) % 400, :16])
        check_nothing_left()

    def test_only_an_array_that_may_not_be_written_is_not_copied(self) -> None:
        for may_write in (True, False):
            with build_ray(pipeline_of(Rows(may_write=may_write)), 1) as loader:
                batches = list(loader)
            assert {one for batch in batches for one in batch["may_write"].tolist()} == {may_write}
            assert {one for batch in batches for one in batch["stored"].tolist()} == {not may_write}
            assert np.array_equal(torch.cat([batch["x"] for batch in batches]).numpy(), Rows().rows[:, :16])
            del batches
            check_nothing_left()

    @pytest.mark.prove
    def test_an_actor_writes_to_its_own_array(self) -> None:
        """Two of each node."""
        with build_ray(pipeline_of(Marked()), 6, **{"prefetch.batches": 12}) as loader:
            pids = {pid for _ in range(2) for batch in loader for pid in batch["pid"].tolist()}
        assert len(pids) == 6
        check_nothing_left()

    def test_a_small_one_goes_with_the_calls(self) -> None:
        with build_ray(numbers(), 1) as loader:
            loader.start()
            assert not object_sizes()
            assert len(list(loader)) == 8
        check_nothing_left()

    @pytest.mark.matrix(2)
    @pytest.mark.parametrize("way", ["break", "error", "interrupt", "no room", "collected"])
    def test_nothing_is_left(self, way: str) -> None:
        def loop(loader: loaderkit.Loader) -> None:
            for batch in loader:
                if batch["x"][0, 0] == rows[16, 0]:
                    break
            if way == "interrupt":
                raise KeyboardInterrupt

        rows = Rows().rows
        if way == "no room":
            overrides: dict[str, Any] = {"prefetch.ray": {"num_cpus": 64.0}}
            with build_ray(pipeline_of(Rows()), **overrides) as loader:
                loader.start()
                assert len(object_sizes()) == 1
        elif way == "collected":
            loader = build_ray(pipeline_of(Rows()), 1)
            loop(loader)
            del loader
        elif way == "error":
            with build_ray(pipeline_of(Rows()).call(fail), 1) as loader, pytest.raises(StageError) as caught:
                loop(loader)
            del caught
        else:
            try:
                with build_ray(pipeline_of(Rows()), 1) as loader:
                    loop(loader)
            except KeyboardInterrupt:
                assert way == "interrupt"
        check_nothing_left()

    def test_a_store_that_does_not_take_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: object) -> None:
            raise ObjectStoreFullError("20 MB are not free")

        monkeypatch.setattr(ray, "put", refuse)
        with (
            build_ray(pipeline_of(Rows())) as loader,
            pytest.raises(WorkerDiedError, match=r"object store does not take what the actors are given: .*20 MB"),
        ):
            next(iter(loader))
        check_nothing_left()


def fail(batch: dict[str, Any]) -> None:
    raise ArithmeticError("no batch")


def test_after_the_end_there_is_none() -> None:
    engine = SharedEngine(Connection("auto"))
    assert engine.argument(len) is engine.argument(len)
    engine.free()
    engine.free()
    with pytest.raises(ClosedError, match="the loader is closed"):
        engine.argument(len)


def test_a_signals_handler_closes_the_loader_while_it_is_packed() -> None:
    engine = SharedEngine(Connection("auto"))

    class Interrupted:
        def __reduce__(self) -> Any:
            engine.free()
            return int, ()

    with pytest.raises(ClosedError, match="the loader is closed"):
        engine.argument(Interrupted())
