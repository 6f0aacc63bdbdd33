"""litData: optimized chunks in a `StreamingDataLoader`; `CombinedStreamingDataset` mixes, `TokensLoader` cuts text into blocks.

Its ranks are told by WORLD_SIZE and GLOBAL_RANK, and run one after another. One worker each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from litdata import (
    CombinedStreamingDataset,
    StreamingDataLoader,
    StreamingDataset,
    TokensLoader,
    optimize,
)

from profiles.peers.elastic.matrix import LENGTH, Asked, Given, Run, documents, samples

PACKAGE = "litdata"
IS_PAIRWISE = False


def _same(value: Any) -> Any:
    return value


def _tokens(source: int) -> Any:
    for document in documents(source):
        yield torch.from_numpy(document)


def make(folder: Path) -> None:
    for source in range(2):
        if not (folder / f"numbers-{source}").exists():
            optimize(_same, list(samples(source)), str(folder / f"numbers-{source}"), chunk_size=100, num_workers=1)
        if not (folder / f"tokens-{source}").exists():
            place = str(folder / f"tokens-{source}")
            optimize(_tokens, [source], place, chunk_size=LENGTH * 200, item_loader=TokensLoader(), num_workers=1)


def runner(folder: Path) -> Run:
    def dataset_of(asked: Asked) -> Any:
        def loader() -> Any:
            return TokensLoader(block_size=LENGTH) if asked.is_packed else None

        kind = "tokens" if asked.is_packed else "numbers"
        parts = [
            StreamingDataset(str(folder / f"{kind}-{n}"), shuffle=True, drop_last=True, item_loader=loader())
            for n in range(2 if asked.is_mixed else 1)
        ]
        if not asked.is_mixed:
            return parts[0]
        return CombinedStreamingDataset(parts, weights=asked.weights, iterate_over_all=False)

    def run(asked: Asked) -> Given:
        parts, states = [], []
        for rank in range(asked.world_size):
            os.environ.update(WORLD_SIZE=str(asked.world_size), GLOBAL_RANK=str(rank))
            loader = StreamingDataLoader(dataset_of(asked), batch_size=asked.batch_size, num_workers=1)
            if asked.states is not None:
                loader.load_state_dict(asked.state_of(rank))
            iterator = iter(loader)
            part = []
            for _ in range(asked.num_steps):
                batch = next(iterator, None)
                if batch is None:
                    break
                part.append([tuple(row) for row in batch.reshape(len(batch), -1).tolist()])
            parts.append(part)
            states.append(loader.state_dict())
            del iterator
        return Given([[row for part in step for row in part] for step in zip(*parts, strict=False)], states)

    return run
