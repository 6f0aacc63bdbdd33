"""Chunks of a mixture: their samples are of few sources, so their slots lie apart, and the batch is what it would be."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from mixtures import augmented_mixture

import loaderkit
from loaderkit import Pipeline
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.thread_engine import make_batch_plan
from loaderkit.samples.chunk import BatchWork
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.parts import MixedChunk

BAD = (4, 30, 31)


class Values:
    """Item i has a value of every type, all from i; those in BAD cannot be had."""

    def __init__(self, begin: int) -> None:
        self.begin = begin

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in BAD:
            raise ValueError("bad")
        number = self.begin + index
        return {
            "number": number,
            "real": number / 8,
            "array": np.full((2, 2), number, np.int16),
            "long": np.full(3000, number, np.float32),
            "tensor": torch.full((3,), number),
            "text": str(number),
            "bytes": str(number).encode(),
        }


def values_of(policy: Literal["skip", "replace"]) -> Pipeline:
    sources = {f"s{n}": Pipeline.dataset(Values(100 * n)) for n in range(5)}
    return Pipeline.mix(sources, stop="all").read().batch(16).errors(on_bad_sample=policy)


def by_hand(pipeline: Pipeline, chunk_size: int, num_batches: int) -> tuple[list[dict[str, Any]], list[BatchWork]]:
    """The first batches of one rank, made chunk by chunk, the last chunk first."""
    made, works = [], []
    with closing(compile_pipeline(pipeline.config, rank=0, world_size=1)) as plan:
        source = plan.source
        assert isinstance(source, MixtureSource)
        batches = make_batch_plan(plan)
        batches.prepare()
        for _ in range(num_batches):
            work = batches.open(chunk_size)
            assert isinstance(work, BatchWork)
            works.append(work)
            chunks = [chunk for chunk in work.chunks if isinstance(chunk, MixedChunk)]
            assert len(chunks) == len(work.chunks)
            assert sorted(chunk.slot_of(row) for chunk in chunks for row in range(len(chunk))) == list(range(len(work)))
            for chunk in reversed(chunks):
                for row in range(len(chunk)):
                    assert chunk.indices[row] == work.indices[chunk.slot_of(row)]
                    assert chunk.position_of(row) == work.positions[chunk.slot_of(row)]
            num_sources = [len(np.unique(source.numbers_of(chunk.indices))) for chunk in chunks]
            # Sorted by source, neighbouring chunks share one at most.
            distinct = len(np.unique(source.numbers_of(work.indices)))
            assert sum(num_sources) <= distinct + len(chunks) - 1
            for chunk in reversed(chunks):
                for stage in plan.compiled.stages:
                    if stage.scope == "sample":
                        stage.run(chunk)
            batch = batches.finish(work)
            for stage in plan.compiled.stages:
                if stage.scope == "batch":
                    stage.run(batch, batches.context(work))
            made.append(batch)
        batches.close()
    return made, works


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("chunk_size", [1, 3, 7])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_values_of_all_types(policy: Literal["skip", "replace"], chunk_size: int) -> None:
    pipeline = values_of(policy)
    made, works = by_hand(pipeline, chunk_size, 6)
    assert any(work.failures for work in works) or policy == "skip"
    with loaderkit.build(pipeline, rank=0, world_size=1, overrides={"prefetch.executor": "inline"}) as loader:
        for batch, expected in zip(made, loader, strict=False):
            assert batch.keys() == expected.keys()
            assert all(same(batch[name], expected[name]) for name in expected)
            assert batch["array"][:, 0, 0].tolist() == batch["number"].tolist()
            assert [int(text) for text in batch["text"]] == batch["number"].tolist()


def test_pictures_written_by_normalize(photos: Path, shards: Path) -> None:
    pipeline = augmented_mixture(photos, shards)
    made, _ = by_hand(pipeline, 3, 4)
    with loaderkit.build(pipeline, rank=0, world_size=1, overrides={"prefetch.executor": "inline"}) as loader:
        for batch, expected in zip(made, loader, strict=False):
            assert all(same(batch[name], expected[name]) for name in expected)
