"""`executor: ray` with another number of actors while they load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from numbers_dataset import numbers
from ray_clusters import RAY
from ray_nodes import check_nothing_left, live_actors
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.ray.cluster import RaySettings, num_that_fit
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.engine_factory import make_executor

pytestmark = pytest.mark.usefixtures("ray_nodes")


@contextmanager
def opened(pipeline: Pipeline, **overrides: Any) -> Iterator[RemoteEngine]:
    plan = compile_pipeline(to_config(pipeline, {**RAY, "prefetch.processes": 1, **overrides}), rank=0, world_size=1)
    engine = make_executor(plan)
    assert isinstance(engine, RemoteEngine)
    try:
        yield engine
    finally:
        engine.close()
        plan.close()


def take_until(engine: RemoteEngine, num: int) -> list[int]:
    """The first number of each batch, until so many actors have turns."""
    found = []
    while engine.stats(Tuning(), 0).tuning.processes != num:
        found.append(int(engine.next().result["x"][0]))
    return found


def test_the_same_batches_and_nothing_left() -> None:
    with opened(numbers(40_000)) as engine:
        found = [int(engine.next().result["x"][0])]
        for num in (3, 1, 2):
            engine.set_processes(num)
            found += take_until(engine, num)
            found += [int(engine.next().result["x"][0]) for _ in range(10)]
        assert found == list(range(0, 8 * len(found), 8))
        wait_for(lambda: len(live_actors()) == 2)
        engine.seek(1, 80)
        assert int(engine.next().result["x"][0]) == 80
        stats = engine.stats(Tuning(), 0)
        assert stats.stages[0].workers == 2, "each has a worker for the CPU that it brings"
    check_nothing_left()


def test_there_may_be_as_many_as_fit() -> None:
    """A cluster of three nodes with four CPUs each."""
    # What actors of another test had comes back a while after their end.
    wait_for(lambda: num_that_fit(RaySettings(num_cpus=1.0)) == 12)
    assert num_that_fit(RaySettings(num_cpus=2.0)) == 6
    assert num_that_fit(RaySettings(num_cpus=3.0)) == 3, "the one that is left on each makes no place together"
    assert num_that_fit(RaySettings(num_cpus=0.1)) == 120
    assert num_that_fit(RaySettings(num_cpus=0.5, resources={"nowhere": 1.0})) == 0
    with opened(numbers(400), **{"prefetch.ray": {"num_cpus": 3.0}}) as engine:
        engine.next()
        wait_for(lambda: num_that_fit(RaySettings(num_cpus=1.0)) == 9)


def test_auto_begins_with_one() -> None:
    with loaderkit.build(numbers(400), overrides={**RAY, "prefetch.processes": "auto"}) as loader:
        assert len(list(loader)) == 50
        tuning = loader.stats().tuning
        assert tuning.processes == 1
        assert "processes" in (tuning.auto or ())
    check_nothing_left()
