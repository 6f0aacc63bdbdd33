"""What a state and a length index say of a stage's arguments stays what releases before have written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixtures import counted, numbers
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.fingerprint import fingerprint_of
from loaderkit.pipeline.lengths import length_index
from loaderkit.stages.base import StageConfig

OF_A_STATE = (
    *("workers", "name", "timeout", "thread_safe", "max_pixels", "formats", "device", "regions", "on_gpu_error"),
    "on_empty_batch",
)
OF_AN_INDEX = ("workers", "timeout", "thread_safe", "device", "regions", "on_gpu_error")


def in_a_state(stage: StageConfig) -> str:
    """As releases up to now write it."""
    defaults = type(stage.args).model_fields
    args = {name: value for name, value in stage.args if name not in OF_A_STATE and value != defaults[name].default}
    return f"{stage.kind} {json.dumps(args, sort_keys=True, default=lambda value: value.__qualname__)}"


def in_an_index(stage: StageConfig) -> list[Any]:
    return [stage.kind, stage.name, {name: value for name, value in stage.args if name not in OF_AN_INDEX}]


def keep(sample: dict[str, Any]) -> bool:
    return bool(len(sample))


def drawn_stages(rng: random.Random) -> list[Any]:
    stages: list[Any] = [
        {"decode": rng.choice([{}, {"max_pixels": 10**7}, {"formats": ["jpeg"], "fields": ["image"]}])}
    ]
    size = rng.randint(8, 64)
    stages.append({"random_resized_crop": {"size": size, "scale": [0.3, 1.0], "workers": rng.randint(1, 3)}})
    stages.append(
        {"call": {"function": "copy:copy", "name": rng.choice(["a", "b"]), "timeout": rng.choice([None, "3s"])}}
    )
    stages.append({"filter": {"function": "test_fingerprint:keep", "on_empty_batch": rng.choice(["raise", "skip"])}})
    return [stages[0], *rng.sample(stages[1:], rng.randint(0, 3))]


def test_arguments_are_told_as_before(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path))
    source = {"kind": "files", "url": str(photos), "include": "**/*.jpg", "label": "parent"}
    for _ in range(5):
        stages = ["read", *drawn_stages(rng)]
        config = to_config({"source": source, "stages": [*stages, {"batch": {"size": 2}}]})
        plan = compile_pipeline(config, rank=0, world_size=1)
        told = fingerprint_of(config, plan.source, plan.order)
        own = {f"stages.{stage.name}": in_a_state(stage) for stage in config.stages[1:-1]}
        assert {name: text for name, text in told.items() if name.startswith("stages.")} == own
        assert list(told)[:3] == ["data", "order", "stages"]
        assert told["order"] == "global"

        seed = rng.randrange(100)
        sections = {"source": source, "order": {"seed": seed}}
        packed = to_config({**sections, "stages": [*stages, {"pack": {"length": 9}}, {"batch": {"size": 2}}]})
        before = [in_an_index(stage) for stage in packed.stages[:-2]]
        parts = ["files", len(plan.source), plan.source.fingerprint(), "tokens", seed, {"label": "parent"}, *before]
        text = json.dumps(parts, sort_keys=True, default=repr)
        assert length_index(packed, plan.source)._made_of == f"2 {text}"
        plan.close()


MIXED = {"sources": "x:30:da259364 y:17:e2ae14b2", "mix": "all 0:e92f2368", "order": "global", "stages": "read > batch"}
PACKED = {
    "sources": "a:60:487f2497 b:60:f7583c7d",
    "mix": "first/tokens 0:cf9713c9",
    "order": "global",
    "stages": "read > pack > batch",
    "lengths": "158f06b554e0934e",
    "stages.pack": 'pack {"length": 64, "window": 20}',
}
CUT = {
    "data": "tokens of 60 samples, digest 09c6fff9e1babbb6",
    "order": "global",
    "stages": "read > batch",
    "lengths": "9b42e0de64a01f60",
    "batches": "250 tokens of 'tokens', pad, window 30, cost attention",
}


@pytest.mark.parametrize("written", [MIXED, PACKED, CUT])
def test_a_state_of_before_is_loaded(written: dict[str, str], tmp_path: Path) -> None:
    """Text, and the order of its parts, that an earlier release has written."""
    generator = np.random.default_rng(7)
    paths = [write_megatron(tmp_path / name, random_documents(generator, 60, 20), "uint16") for name in ("a", "b")]
    tokens = [{"name": path.stem, "kind": "tokens", "url": str(path)} for path in paths]
    stages: list[Any] = ["read", {"pack": {"length": 64, "window": 20}}, {"batch": {"size": 2}}]
    described: dict[str, Any] = {"sources": tokens, "mix": {"by": "tokens"}, "stages": stages}
    if written is MIXED:
        described = numbers(counted(30, name="x"), counted(17, 100, name="y", weight=0.3), mix={"stop": "all"})
    if written is CUT:
        batch = {"tokens": 250, "window": 30, "ragged": {"tokens": "pad"}}
        described = {"source": {"kind": "tokens", "url": str(paths[0])}, "stages": ["read", {"batch": batch}]}
    with loaderkit.build(described, rank=0, world_size=1) as loader:
        state = loader.state_dict()
        assert state["fingerprint"] == [list(part) for part in written.items()]
        loader.load_state_dict({**state, "position": 1, "fingerprint": written})
        assert len(next(iter(loader))) > 0
