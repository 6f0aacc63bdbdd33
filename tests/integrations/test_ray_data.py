"""`RayRows`: the rows of a `ray.data.Dataset` as batches, in its order; a state that does not fit is an error."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_examples import examples, libraries
from ray_clusters import ray_cluster

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, SourceError
from loaderkit.integrations.ray import RayRows

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("default")]
SIZE = 100


@pytest.fixture(scope="module")
def data() -> Iterator[Any]:
    """`ray.data`, connected to a cluster of its own, with `preserve_order`."""
    import ray

    ray.shutdown()  # a test that ran before in this process may have left a connection
    with ray_cluster(3) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars, context.execution_options.preserve_order = False, True
        yield ray.data
        ray.shutdown()


def made(data: Any, rng: random.Random, numbers: list[int]) -> Any:
    """A Dataset of these numbers, in some blocks."""
    items = [{"x": number, "text": f"n {number}", "v": np.full((2, 3), number, np.float32)} for number in numbers]
    dataset = data.from_items(items, override_num_blocks=rng.randrange(1, 9))
    return dataset.map_batches(lambda batch: {**batch, "y": batch["x"] * 2}) if rng.random() < 0.5 else dataset


def numbers_of(loader: loaderkit.Loader) -> list[int]:
    """Of an epoch, or what is left of it; each row whole."""
    found: list[int] = []
    for batch in loader:
        x = batch["x"]
        assert batch["text"] == [f"n {number}" for number in x.tolist()]
        assert torch.equal(batch["v"], x.float()[:, None, None].expand(-1, 2, 3))
        assert "y" not in batch or torch.equal(batch["y"], x * 2)
        found += x.tolist()
    return found


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_rows_come_in_order_and_are_resumed(data: Any, rng: random.Random, executor: str) -> None:
    numbers = rng.sample(range(10**6), SIZE)
    size, num_taken = rng.randrange(1, 20), rng.randrange(1, 5)
    dataset = made(data, rng, numbers)
    pipeline = Pipeline.iterable(RayRows(dataset)).read().batch(size)
    overrides = {"prefetch.executor": executor}
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        assert numbers_of(loader) == numbers
        assert numbers_of(loader) == numbers, "another epoch"
        iterator = iter(loader)
        taken = [number for _ in range(num_taken) for number in next(iterator)["x"].tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
    assert taken == numbers[: size * num_taken]
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        loader.load_state_dict(state)
        assert numbers_of(loader) == numbers[size * num_taken :]
        assert numbers_of(loader) == numbers

    other = [*numbers[1 : size * num_taken], numbers[0], *numbers[size * num_taken :]]
    for changed, message in (other, "are not those that were delivered"), (numbers[: size * num_taken - 1], "rows now"):
        if changed == numbers or not changed:
            continue
        with loaderkit.build(Pipeline.iterable(RayRows(made(data, rng, changed))).read().batch(size)) as loader:
            loader.load_state_dict(state)
            with pytest.raises(SourceError, match=message):
                next(iter(loader))


def test_a_function_shuffles_by_the_epoch(data: Any, rng: random.Random) -> None:
    dataset = made(data, rng, list(range(SIZE)))
    rows = RayRows(lambda epoch: dataset.random_shuffle(seed=epoch))
    pipeline = Pipeline.iterable(rows, length=SIZE).read().batch(7)
    with loaderkit.build(pipeline) as loader:
        first, second = numbers_of(loader), numbers_of(loader)
        loader.set_epoch(1)
        iterator = iter(loader)
        assert next(iterator)["x"].tolist() == second[:7]
        state = loader.state_dict()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SIZE))
    with loaderkit.build(pipeline) as loader:
        loader.load_state_dict(state)
        assert numbers_of(loader) == second[7:]


def test_each_rank_reads_its_shard(data: Any, rng: random.Random) -> None:
    shards = made(data, rng, list(range(SIZE))).streaming_split(2, equal=True)
    found: dict[int, list[int]] = {}

    def read(rank: int) -> None:
        pipeline = Pipeline.iterable(RayRows(shards[rank])).read().batch(8)
        with loaderkit.build(pipeline, rank=0, world_size=1) as loader:
            found[rank] = numbers_of(loader) + numbers_of(loader)  # two epochs

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found[0]) == len(found[1]) == SIZE
    assert sorted(found[0] + found[1]) == sorted([*range(SIZE)] * 2)


def test_what_would_repeat_samples_is_refused(data: Any, caplog: pytest.LogCaptureFixture) -> None:
    dataset = data.range(10)
    pipeline = Pipeline.iterable(RayRows(dataset)).read().batch(2)
    refused = pytest.raises(ConfigError, match=r"each of 2 ranks.*streaming_split")
    with loaderkit.build(pipeline, rank=0, world_size=2) as loader, refused:
        next(iter(loader))
    with pytest.raises(ConfigError, match="connected to Ray"):
        loaderkit.build(pipeline, overrides={"prefetch.executor": "process"})
    with pytest.raises(ConfigError, match=r"ray\.data\.Dataset.*not list"):
        RayRows([1, 2])
    assert "another order" not in caplog.text
    context = data.DataContext.get_current()
    context.execution_options.preserve_order = False
    try:
        with loaderkit.build(Pipeline.iterable(RayRows(data.range(10))).read().batch(2)) as loader:
            next(iter(loader))
    finally:
        context.execution_options.preserve_order = True
    assert "another order each time" in caplog.text


def test_without_a_connection_no_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    pipeline = Pipeline.iterable(RayRows(lambda epoch: ray.data.range(3))).read().batch(2)
    with loaderkit.build(pipeline) as loader, pytest.raises(SourceError, match="not connected to Ray"):
        next(iter(loader))


def test_the_example_of_the_guide_runs(data: Any, tmp_path: Path) -> None:
    (text,) = (
        text for _, text in examples("docs/guide/iterables.md") if "RayRows" in text and "ray" in libraries(text)
    )
    exec(compile(text, "docs/guide/iterables.md", "exec"), {"__name__": "example"})
