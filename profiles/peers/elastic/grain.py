"""Grain: `MapDataset`s, shuffled and mixed, in an `ElasticIterator`, which shards and batches.

It takes no packing. A packed job that is resumed at the same number of ranks is a pipeline a shard: a slice of the
`MapDataset`, `FirstFitPackIterDataset`, `batch`, and a state for each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import numpy as np

from profiles.peers.elastic.matrix import BUFFER, GLOBAL_BATCH, LENGTH, Asked, Given, Run, documents, samples

PACKAGE = "grain"
IS_PAIRWISE = True


def make(folder: Path) -> None:
    """It reads what is in memory."""


def runner(folder: Path) -> Run:
    numbers = [[np.array([x]) for x in samples(source)] for source in range(2)]
    texts = [list(documents(source)) for source in range(2)]

    def dataset_of(asked: Asked) -> Any:
        columns = texts if asked.is_packed else numbers
        parts = [grain.MapDataset.source(column).shuffle(seed=n) for n, column in enumerate(columns)]
        return grain.MapDataset.mix(parts, asked.weights) if asked.is_mixed else parts[0]

    def packed(dataset: Any) -> Any:
        named = dataset.map(lambda tokens: {"x": tokens}).to_iter_dataset()
        pack = grain.experimental.FirstFitPackIterDataset
        return pack(named, length_struct={"x": LENGTH}, num_packing_bins=BUFFER)

    def iterator_of(asked: Asked, rank: int) -> Any:
        dataset = dataset_of(asked)
        if asked.is_packed and asked.world_size == asked.other_world_size:
            return iter(packed(dataset[rank :: asked.world_size]).batch(asked.batch_size))
        options = grain.sharding.ShardOptions(rank, asked.world_size)
        whole = packed(dataset) if asked.is_packed else dataset
        return iter(grain.experimental.ElasticIterator(whole, GLOBAL_BATCH, options))

    def run(asked: Asked) -> Given:
        parts, states = [], []
        for rank in range(asked.world_size):
            iterator = iterator_of(asked, rank)
            if asked.states is not None:
                iterator.set_state(asked.state_of(rank))
            parts.append([rows_of(next(iterator)) for _ in range(asked.num_steps)])
            states.append(iterator.get_state())
        return Given([[row for part in step for row in part] for step in zip(*parts, strict=True)], states)

    return run


def rows_of(batch: Any) -> list[tuple[int, ...]]:
    if isinstance(batch, dict):
        return [tuple(row[row > 0].tolist()) for row in batch["x"]]
    return [tuple(row.tolist()) for row in batch]
