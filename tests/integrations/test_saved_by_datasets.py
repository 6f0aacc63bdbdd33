"""`kind: huggingface` against `datasets` itself, on what that package saves and caches."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures

import loaderkit
from loaderkit import Pipeline

pytestmark = pytest.mark.integration


@pytest.fixture
def made(rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set of drawn rows, in the cache of datasets as `made`."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    datasets.disable_progress_bars()
    rows = [_row(rng) for _ in range(30)]
    feature, value = datasets.Image(), datasets.Value
    features = datasets.Features(
        {
            "image": feature,
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": value("string"),
            "at": value("timestamp[ms]"),
            "box": datasets.Array2D((2, 2), "float32"),
            "chat": [{"role": value("string"), "content": value("string")}],
            "several": datasets.List(feature),
        }
    )

    def generate() -> Iterator[dict[str, Any]]:
        yield from rows

    return datasets.Dataset.from_generator(generate, features=features, cache_dir=str(tmp_path / "hub"))


def _row(rng: random.Random) -> dict[str, Any]:
    def picture() -> dict[str, Any]:
        file = io.BytesIO()
        Pictures.frombytes("RGB", (8, 8), rng.randbytes(192)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    return {
        "image": picture(),
        "label": rng.randint(0, 1),
        "text": "".join(rng.choices("aé日", k=4)),
        "at": rng.randint(0, 10**12),
        "box": [[rng.random(), 1.0], [2.0, 3.0]],
        "chat": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}][: rng.randint(0, 2)],
        "several": [picture() for _ in range(rng.randint(0, 2))],
    }


def check(pipeline: Pipeline, rows: Any) -> None:
    """Compare every field of every sample with the rows of datasets."""
    raw = rows.with_format("arrow")
    with loaderkit.build(pipeline.shuffle(False).read().decode().batch(4)) as loader:
        assert loader.classes == ["cat", "dog"]
        found = [(batch, place) for batch in loader for place in range(len(batch["__key__"]))]
    assert len(found) == len(rows)
    for (batch, place), wanted, number in zip(found, rows, range(len(rows)), strict=True):
        sample = {name: values[place] for name, values in batch.items()}
        assert np.array_equal(sample["image"].permute(1, 2, 0).numpy(), np.asarray(wanted["image"]))
        assert sample["label"].item() == wanted["label"]
        assert sample["text"] == wanted["text"]
        assert sample["box"].tolist() == np.asarray(wanted["box"]).tolist()
        assert sample["chat"] == wanted["chat"]
        stored = raw[number]
        assert sample["at"].item() == stored["at"][0].value
        several = [picture.permute(1, 2, 0).numpy() for picture in sample["several"]]
        assert [picture.tolist() for picture in several] == [np.asarray(one).tolist() for one in wanted["several"]]


def test_what_is_saved(made: Any, tmp_path: Path) -> None:
    shuffled = made.shuffle(seed=3).select(range(25))
    shuffled.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    check(Pipeline.huggingface(url=str(tmp_path / "saved")), shuffled)


def test_splits(made: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = datasets.DatasetDict({"train": made, "test": made.select([3, 1, 1])})
    parts.save_to_disk(str(tmp_path / "saved"))
    for split, rows in parts.items():
        check(Pipeline.huggingface(url=str(tmp_path / "saved"), split=split), rows)


def test_the_cache(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, as `load_dataset` finds it without a network."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    config = next((tmp_path / "hub" / "generator").iterdir()).name
    check(Pipeline.huggingface(name="generator", config=config, split="train"), made)


@pytest.mark.parametrize("kind", ["huggingface", "parquet"])
def test_values_of_json(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    datasets.disable_progress_bars()
    columns = {
        "one": [{"a": 1}, {"b": [1, 2]}, {"a": None}],
        "list": [[{"a": 1}, "x"], [None, {"b": {}}], [{"c": "[1]"}, 2]],
        "struct": [{"text": "[1]", "any": [{"a": 1}, {"a": "x"}]}] * 3,
    }
    made = datasets.Dataset.from_dict(columns, on_mixed_types="use_json")
    made.save_to_disk(tmp_path / "huggingface")
    made.to_parquet(tmp_path / "parquet/a.parquet")
    source = Pipeline.huggingface if kind == "huggingface" else Pipeline.parquet
    with loaderkit.build(source(url=str(tmp_path / kind)).shuffle(False).read().batch(3)) as loader:
        (batch,) = loader
    assert {name: batch[name] for name in columns} == made[:] == columns
