"""What is packed beside tokens: labels and other numbers of each token, and of a mixture its sources."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError, StageError

LENGTH = 48


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


class Labelled:
    """Documents with labels and weights, of lengths that the seed draws. Some are bad, if asked for."""

    def __init__(self, num: int, seed: int, bad: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.ids = [rng.integers(1, 99, rng.integers(1, 130)) for _ in range(num)]
        self.labels = [np.where(rng.random(len(ids)) < 0.5, ids, -100) for ids in self.ids]
        self.weights = [rng.random(len(ids)).astype(np.float32) for ids in self.ids]
        self.bad = bad

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cut = 1 if index < self.bad else 0
        return {"ids": self.ids[index], "labels": self.labels[index][cut:], "weights": self.weights[index]}


def pack_of(**more: Any) -> dict[str, Any]:
    values = {"labels": -100, "weights": 0.25, "input_ids": 7}
    return {"length": LENGTH, "window": 30, "field": "ids", "pad_value": values, **more}


def build(tmp_path: Path, num: int = 60, bad: int = 0, size: int = 3, **settings: Any) -> dict[str, Any]:
    """A pipeline over `Labelled`, whose lengths are indexed."""
    description = {
        "source": {
            "kind": "dataset",
            "object": "test_pack_beside:Labelled",
            "args": {"num": num, "seed": 4, "bad": bad},
        },
        "order": {"seed": 2, "epochs": 1},
        "stages": ["read", {"pack": pack_of()}, {"batch": {"size": size}}],
        **settings,
    }
    (tmp_path / "p.yaml").write_text(Pipeline(description).to_yaml())
    assert main(["index", "--lengths", str(tmp_path / "p.yaml")]) == 0
    return description


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_numbers_beside_tokens_go_where_the_tokens_go(tmp_path: Path, rng: random.Random, world_size: int) -> None:
    """At any number of ranks, and after a resume."""
    description, data = build(tmp_path), Labelled(60, 4)
    found: dict[int, int] = {}
    for rank in range(world_size):
        with loaderkit.build(description, rank=rank, world_size=world_size) as loader:
            batches = [next(iter(loader))]
            state = loader.state_dict()
        with loaderkit.build(description, rank=rank, world_size=world_size) as loader:
            loader.load_state_dict(state)
            batches += list(loader)
        for batch in batches:
            assert (batch["labels"].dtype, batch["weights"].dtype) == (torch.int64, torch.float32)
            for row, keys in enumerate(batch["__key__"]):
                if "__wrapped__" in batch and batch["__wrapped__"][row]:
                    continue
                documents = batch["document_ids"][row]
                for number, key in enumerate(keys.split(" ")):
                    name, _, part = key.partition("[")
                    own, first = documents == number, int(part.partition(":")[0] or 0)
                    for field, values in ("input_ids", data.ids), ("labels", data.labels), ("weights", data.weights):
                        expected = values[int(name)][first : first + int(own.sum())]
                        assert batch[field][row][own].tolist() == expected.tolist()
                    found[int(name)] = found.get(int(name), 0) + int(own.sum())
                padding = documents < 0
                for field, value in ("input_ids", 7), ("labels", -100), ("weights", 0.25):
                    assert (batch[field][row][padding] == value).all()
    assert found == {number: len(ids) for number, ids in enumerate(data.ids)}


def test_a_document_whose_labels_do_not_fit_is_bad(tmp_path: Path) -> None:
    """What it would have taken is padding in all fields."""
    description = build(tmp_path, num=12, bad=1)
    with (
        loaderkit.build(description) as loader,
        pytest.raises(StageError, match=r"'labels' has \d+ numbers, and there are"),
    ):
        list(loader)
    with loaderkit.build({**description, "errors": {"on_bad_sample": "skip"}}) as loader:
        batches = list(loader)
    assert not any((batch["labels"][batch["document_ids"] < 0] != -100).any() for batch in batches)
    assert sum((batch["document_ids"] >= 0).sum().item() for batch in batches) == sum(map(len, Labelled(12, 4).ids[1:]))


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        ({"pad_value": {"position_ids": 0}}, "which `pack` makes itself"),
        ({"pad_value": {"ids": 0}}, "the tokens, which become `input_ids`"),
        ({"pad_value": {"nothing": 0}}, "no field 'nothing'"),
        ({"pad_value": {"labels": 0.5}}, r"pad_value: 'labels' cannot hold 0\.5"),
        ({"pad_value": {"input_ids": 2**70}}, "'input_ids' cannot hold"),
    ],
)
def test_what_cannot_be_beside_tokens(tmp_path: Path, pack: dict[str, Any], message: str) -> None:
    description = build(tmp_path, num=5)
    with pytest.raises((ConfigError, StageError), match=message):
        list(loaderkit.build({**description, "stages": ["read", {"pack": pack_of(**pack)}, {"batch": {"size": 1}}]}))


def test_a_source_of_tokens_alone_has_no_labels(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", random_documents(np.random.default_rng(0), 9, 20), "uint16")
    pipeline = Pipeline.tokens(path).read().pack(LENGTH, pad_value={"labels": -100}).batch(1)
    with loaderkit.build(pipeline) as loader, pytest.raises(StageError, match="no field 'labels', but tokens"):
        next(iter(loader))
    with loaderkit.build(Pipeline.tokens(path).read().pack(LENGTH, pad_value={"input_ids": 9}).batch(1)) as loader:
        for _, batch in zip(range(3), loader, strict=False):
            assert (batch["input_ids"][batch["document_ids"] < 0] == 9).all()


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_tokens_of_a_mixture_tell_their_sources(tmp_path: Path, executor: Literal["inline", "thread"]) -> None:
    rng = np.random.default_rng(1)
    pipelines = {}
    for number, name in enumerate(["web", "code", "books"]):
        documents = [np.full(rng.integers(1, 70), 10 + number) for _ in range(40)]
        pipelines[name] = Pipeline.tokens(write_megatron(tmp_path / name, documents, "uint16"))
    mixed = Pipeline.mix(pipelines, {"web": 0.5, "code": 0.3, "books": 0.2}, stop="all")
    pipeline = mixed.shuffle(seed=1).epochs(1).read().pack(LENGTH, window=30).batch(4)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        assert loader.sources == ["web", "code", "books"]
        batches = list(loader)
    for batch in batches:
        assert batch["source_ids"].dtype == torch.int32
        is_there = batch["document_ids"] >= 0
        assert torch.equal(batch["source_ids"][is_there] + 10, batch["input_ids"][is_there].int())
        assert (batch["source_ids"][~is_there] == -1).all()
    with loaderkit.build(pipeline.output("input_ids")) as loader:
        assert torch.equal(next(iter(loader))[0], batches[0]["input_ids"])
