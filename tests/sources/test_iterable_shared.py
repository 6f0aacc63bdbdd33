"""`kind: iterable` on several ranks and in several processes: what they would not see alike is refused."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from executors import EXECUTORS
from torch.utils.data import DataLoader, DistributedSampler

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError

INLINE = EXECUTORS["inline"]


@pytest.mark.integration
def test_what_is_split_by_rank_already_is_refused() -> None:
    datasets: Any = importlib.import_module("datasets")
    distributed: Any = importlib.import_module("datasets.distributed")
    rows = datasets.Dataset.from_dict({"x": list(range(60))})
    split = distributed.split_dataset_by_node(rows.to_iterable_dataset(num_shards=2), rank=1, world_size=2)
    sampler: Any = DistributedSampler(list(range(60)), 2, 1)  # type: ignore[arg-type]
    loader_of_rank: Any = DataLoader(list(range(60)), sampler=sampler)  # type: ignore[arg-type]
    for one in (split, loader_of_rank):
        made = Pipeline.iterable(one).read().batch(4)
        with (
            loaderkit.build(made, rank=1, world_size=2) as loader,
            pytest.raises(ConfigError, match="is split over 2 ranks already"),
        ):
            next(iter(loader))
        with loaderkit.build(made, rank=0, world_size=1) as loader:
            assert sum(len(next(iter(batch.values()))) for batch in loader) == 30


def test_an_order_without_a_seed_is_refused_where_it_is_shared() -> None:
    def shuffled(seed: int | None) -> Any:
        drawing = None if seed is None else torch.Generator().manual_seed(seed)
        numbers: Any = list(range(40))
        return DataLoader(numbers, batch_size=None, shuffle=True, generator=drawing)

    made = Pipeline.iterable(shuffled(None)).read().batch(4)
    for world_size, executor in ((2, "inline"), (1, "two processes")):
        with (
            loaderkit.build(made, rank=0, world_size=world_size, overrides=EXECUTORS[executor]) as loader,
            pytest.raises(ConfigError, match=r"shuffles without a seed, .*: shuffle by a seed"),
        ):
            next(iter(loader))
    with loaderkit.build(made, overrides=EXECUTORS["thread"]) as loader:
        assert sorted(x for batch in loader for x in batch["0"].tolist()) == list(range(40))
    found = []
    for rank in range(2):
        with loaderkit.build(Pipeline.iterable(shuffled(3)).read().batch(4), rank=rank, world_size=2) as loader:
            found += [x for batch in loader for x in batch["0"].tolist()]
    assert sorted(found) == list(range(40))


def streams(seed: int | None) -> dict[str, Any]:
    """Streaming data sets of Hugging Face's that shuffle, or draw which of two comes next, by `seed`; None: by none."""
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(60))}).to_iterable_dataset(num_shards=3)
    shuffled = rows.shuffle(seed=seed)
    return {
        "shuffled": shuffled,
        "one shard": datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset().shuffle(seed=seed),
        "with stages behind": shuffled.map(dict).filter(bool).skip(1).take(50),
        "one of two": datasets.concatenate_datasets([rows, shuffled]),
        "interleaved": datasets.interleave_datasets([rows, rows], probabilities=[0.5, 0.5], seed=seed),
        "in a DataLoader": DataLoader(shuffled, batch_size=None),
        "by a generator": rows.shuffle(generator=np.random.default_rng(seed)),
    }


@pytest.mark.integration
def test_a_streaming_data_set_without_a_seed_is_refused_where_it_is_shared() -> None:
    for name, stream in streams(None).items():
        made = Pipeline.iterable(stream).read().batch(4)
        for world_size, executor in ((2, "inline"), (1, "two processes")):
            with (
                loaderkit.build(made, rank=0, world_size=world_size, overrides=EXECUTORS[executor]) as loader,
                pytest.raises(ConfigError, match=r"shuffles without a seed, .*`shuffle\(seed=0\)`"),
            ):
                next(iter(loader))
                pytest.fail(name)
    with loaderkit.build(Pipeline.iterable(streams(None)["shuffled"]).read().batch(4), overrides=INLINE) as loader:
        assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(60))


@pytest.mark.integration
@pytest.mark.parametrize("seed", [0, 42, 2**63])
def test_a_streaming_data_set_with_a_seed_is_shared(seed: int) -> None:
    for name, stream in streams(seed).items():
        found = []
        for rank in range(2):
            made = Pipeline.iterable(stream).read().batch(1)
            with loaderkit.build(made, rank=rank, world_size=2, overrides=INLINE) as loader:
                found += [x for batch in loader for x in batch["x"].tolist()]
        expected = [row["x"] for row in stream]
        assert sorted(found) == sorted(expected[: len(expected) // 2 * 2]), name


@pytest.mark.integration
def test_a_state_of_an_order_without_a_seed_is_loaded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for seed in (None, 7):
        with loaderkit.build(Pipeline.iterable(streams(seed)["shuffled"]).read().batch(4), overrides=INLINE) as loader:
            loader.load_state_dict(loader.state_dict())
            next(iter(loader))
            assert not caplog.records, "at the beginning any order will do"
            loader.load_state_dict(loader.state_dict())
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == (seed is None)
        assert all("not be the one of which 4 items of epoch 0 were delivered" in message for message in warned)
        caplog.clear()
