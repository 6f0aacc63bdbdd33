"""Drawn sources, packed: training gets from the shards the samples that it gets from the source."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_sources
import pytest
import torch
from packed_shards import packed

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import LoaderkitError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def epoch_of(pipeline: Any, **overrides: Any) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        return [
            {name: values[slot] for name, values in batch.items()}
            for batch in loader
            for slot in range(len(batch["__key__"]))
        ]


def assert_same(one: Any, other: Any, where: str) -> None:
    """Also in type, but for the labels of folders."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), where
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for first, second in zip(one, other, strict=True):
            assert_same(first, second, where)
    else:
        assert type(one) is type(other), where
        assert repr(one) == repr(other), where


def keeps(sample: dict[str, Any]) -> bool:
    key: str = sample["__key__"]
    return sum(key.encode("utf-8", "surrogateescape")) % 4 != 1


def files(folder: Path, rng: random.Random, num: int, share_bad: float) -> tuple[Pipeline, list[str]]:
    return drawn_sources.drawn_files(folder, rng, num, share_bad=share_bad)


def archives(folder: Path, rng: random.Random, num: int, share_bad: float) -> tuple[Pipeline, list[str]]:
    return drawn_sources.drawn_archives(folder, rng, num, share_bad=share_bad)


def items(folder: Path, rng: random.Random, num: int, share_bad: float) -> tuple[Pipeline, list[str]]:
    return drawn_sources.drawn_items(rng, num, share_bad=share_bad)


@pytest.mark.parametrize("num", [3, pytest.param(60, marks=pytest.mark.prove)])
@pytest.mark.parametrize("draw", [files, archives, items])
def test_training_gets_the_samples_of_the_source(
    tmp_path: Path, rng: random.Random, draw: Callable[..., tuple[Pipeline, list[str]]], num: int
) -> None:
    for number in range(num):
        folder, share_bad = tmp_path / str(number), rng.choice([0.0, 0.2])
        size = rng.choice([1, 7, 40])
        source, ragged = draw(folder / "source", rng, size, share_bad)
        shuffles = rng.random() < 0.5
        pipeline = source.shuffle("global", seed=rng.randrange(99)) if shuffles else source.shuffle("none")
        pipeline = pipeline.read()
        filters = size > 1 and rng.random() < 0.3
        if filters and rng.random() < 0.5:
            pipeline = pipeline.filter(keeps, on_empty_batch="skip")
            filters = False
        pipeline = pipeline.decode()
        if filters:
            pipeline = pipeline.filter(keeps, on_empty_batch="skip")
        pipeline = pipeline.batch(50, ragged=dict.fromkeys(ragged, "list")).with_overrides(
            {"errors.on_bad_sample": "skip", "errors.max_bad_samples": 1000}
        )
        wanted = epoch_of(pipeline)
        try:
            result = packed(pipeline, folder / "out", shard_bytes=rng.choice([1, 5_000, 60_000, 10**9]))
        except LoaderkitError:
            if wanted:
                raise
            continue
        found = epoch_of(result.pipeline.to_dict(), **{"order.shuffle": "none"})
        assert len(found) == len(wanted)
        keys = [sample["__key__"] for sample in found]
        assert len({*keys}) == len(keys)
        assert not [key for key in keys if "." in key.rpartition("/")[2]]
        for one, other in zip(wanted, found, strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                if name == "label" and isinstance(value, torch.Tensor):
                    assert value.tolist() == other[name].tolist()
                elif name != "__key__":
                    assert_same(value, other[name], f"{name} of {one['__key__']}")
