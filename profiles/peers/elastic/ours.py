"""loaderkit: numbers as one data set a source, documents as Megatron's files; mixed by `sources`, packed by `pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import loaderkit
from profiles.peers.elastic.matrix import (
    BUFFER,
    GLOBAL_BATCH,
    INTERRUPTED_AT,
    LATER_WEIGHTS,
    LENGTH,
    Asked,
    Given,
    Run,
    documents,
    samples,
)

PACKAGE = "loaderkit"
IS_PAIRWISE = False


class Numbers:
    def __init__(self, source: int) -> None:
        self._numbers = samples(source)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": self._numbers[index]}


def make(folder: Path) -> None:
    for source in range(2):
        end = -1
        tokens = np.concatenate([np.append(document, end) for document in documents(source)])
        np.save(folder / f"{source}.npy", tokens)


def runner(folder: Path) -> Run:
    def described(asked: Asked) -> dict[str, Any]:
        sources: list[dict[str, Any]] = [
            {"kind": "tokens", "url": str(folder / f"{n}.npy"), "end": -1}
            if asked.is_packed
            else {"kind": "dataset", "object": "profiles.peers.elastic.ours:Numbers", "args": {"source": n}}
            for n in range(2 if asked.is_mixed else 1)
        ]
        pack = [{"pack": {"length": LENGTH, "window": BUFFER}}] if asked.is_packed else []
        pipeline = {
            "order": {"seed": 1},
            "stages": ["read", *pack, {"batch": {"size": asked.batch_size}}],
            "prefetch": {"executor": "inline"},
        }
        if not asked.is_mixed:
            return {**pipeline, "source": sources[0]}
        weights = dict(zip("ab", asked.weights, strict=True))
        changes: list[dict[str, Any]] = []
        if asked.weights == LATER_WEIGHTS:  # from where training was interrupted
            weights = {"a": 0.7, "b": 0.3}
            changes = [{"at": INTERRUPTED_AT * GLOBAL_BATCH, "weights": dict(zip("ab", LATER_WEIGHTS, strict=True))}]
        named = [{"name": name, "weight": weights[name], **source} for name, source in zip("ab", sources, strict=True)]
        return {**pipeline, "sources": named, "mix": {"changes": changes}}

    def run(asked: Asked) -> Given:
        parts, states = [], []
        for rank in range(asked.world_size):
            with loaderkit.build(described(asked), rank=rank, world_size=asked.world_size) as loader:
                if asked.states is not None:
                    loader.load_state_dict(asked.state_of(rank))
                parts.append([rows_of(batch) for _, batch in zip(range(asked.num_steps), loader, strict=False)])
                states.append(loader.state_dict())
        return Given([[row for part in step for row in part] for step in zip(*parts, strict=True)], states)

    return run


def rows_of(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    if "x" in batch:
        return [(x,) for x in batch["x"].tolist()]
    return [tuple(row[row > 0].tolist()) for row in batch["input_ids"]]
