"""Whatever the source, another number of processes deals the same batches out: also where epochs differ, or bins of tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dealt import MOVES, Simulation
from mixtures import counted, numbers
from num_examples import num_examples
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import ExecutionPlan, compile_pipeline
from loaderkit.pipeline.executors.process_setup import keys_at
from loaderkit.sampling.shard import Shard


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def described(kind: str, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    paths = [write_megatron(folder / name, random_documents(rng, 60, 20), "uint16") for name in ("a", "b")]
    tokens = [{"name": path.stem, "kind": "tokens", "url": str(path)} for path in paths]
    ragged = {"ragged": {"tokens": "list"}}
    if kind == "mixture":
        return numbers(counted(30, name="x"), counted(17, 100, name="y", weight=0.3), mix={"stop": "all"})
    if kind == "mixture by tokens":
        return {"sources": tokens, "mix": {"by": "tokens"}, "stages": ["read", {"batch": {"size": 3, **ragged}}]}
    source = {key: value for key, value in tokens[0].items() if key != "name"}
    if kind == "pack":
        return {"source": source, "stages": ["read", {"pack": {"length": 64}}, {"batch": {"size": 2}}]}
    return {"source": source, "stages": ["read", {"batch": {"tokens": 150, "window": 30, **ragged}}]}


def cursor_of(plan: ExecutionPlan, shard: Shard) -> BatchCursor:
    return BatchCursor(plan.order, plan.schedule, shard=shard)


@pytest.mark.parametrize("kind", ["mixture", "mixture by tokens", "pack", "batches of tokens"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sequence_stays(kind: str, world_size: int, tmp_path: Path, rng: random.Random) -> None:
    plan = compile_pipeline(to_config(described(kind, tmp_path)), rank=world_size - 1, world_size=world_size)
    for _ in range(num_examples(16)):
        num, depth = rng.randint(1, 5), rng.randint(1, 4)
        simulation = Simulation(plan.schedule, num, depth, rng, lambda shard: cursor_of(plan, shard))
        for _ in range(80):
            simulation.move(rng.choice(MOVES))
        for _ in range(150):
            simulation.move("step")
        assert simulation.dealing.border is None
    plan.close()


@pytest.mark.parametrize("kind", ["mixture", "mixture by tokens", "pack", "batches of tokens"])
def test_a_batch_that_kills_its_process_is_named(kind: str, tmp_path: Path, rng: random.Random) -> None:
    """By the keys that the batch at a position has."""
    world_size = rng.randint(1, 3)
    rank = rng.randrange(world_size)
    plan = compile_pipeline(to_config(described(kind, tmp_path)), rank=rank, world_size=world_size)
    with loaderkit.build(described(kind, tmp_path), rank=rank, world_size=world_size) as loader:
        begin = loader.state_dict()
        for batch in loader:
            assert keys_at(plan, begin["epoch"], begin["position"]) == batch["__key__"]
            begin = loader.state_dict()
    plan.close()
