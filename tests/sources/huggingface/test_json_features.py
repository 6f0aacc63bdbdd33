"""The `Json` feature of datasets: texts in the files, values in the samples, from `kind: huggingface` and from Parquet."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hf_folders import saved
from parquet_tables import written

import loaderkit
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import SourceError, StageError

JSON = {"_type": "Json"}
FEATURES: dict[str, Any] = {
    "one": JSON,
    "some": {"feature": JSON, "_type": "List"},
    "early": [JSON],
    "deep": {"of": {"feature": {"x": JSON, "text": {"dtype": "string", "_type": "Value"}}, "_type": "List"}},
    "raw": {"decode": False, "_type": "Json"},
    "wrong": JSON,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def files_of(kind: str, table: pa.Table, features: dict[str, Any], rng: random.Random) -> dict[str, bytes]:
    info = {"features": features}
    if kind == "huggingface":
        return {**saved(table, rng), "dataset_info.json": json.dumps(info).encode()}
    return {"a.parquet": written(table.replace_schema_metadata({"huggingface": json.dumps({"info": info})}), rng)}


def rows_of(kind: str, files: dict[str, bytes], on_bad_sample: str = "raise") -> list[dict[str, Any]]:
    config: Any = {
        "source": {"kind": kind, "url": "memory://"},
        "order": {"shuffle": "none"},
        "stages": ["read", {"batch": {"size": 12}}],
    }
    overrides = {"prefetch.executor": "inline", "errors.on_bad_sample": on_bad_sample}
    with loaderkit.build(config, connectors={"memory": MemoryConnector(files)}, overrides=overrides) as loader:
        return [
            {name: values[place] for name, values in batch.items() if name != "__key__"}
            for batch in loader
            for place in range(len(batch["__key__"]))
        ]


def drawn(rng: random.Random, depth: int = 2) -> Any:
    """A value of JSON that is no null and no list of numbers, which would be an array."""
    kind = rng.choice(["text", "dict", "list"] if depth else ["text"])
    if kind == "text":
        return rng.choice(["", "ä", "null", '"', "[1]"])
    if kind == "dict":
        return {name: rng.choice([None, 1, 2.5, True, drawn(rng, depth - 1)]) for name in rng.sample("abc", 2)}
    return [drawn(rng, depth - 1), *rng.sample([None, 3, [4, 5]], 2)]


@pytest.mark.parametrize("kind", ["huggingface", "parquet"])
@pytest.mark.parametrize("is_extension", [True, False])
def test_texts_become_what_they_hold(kind: str, is_extension: bool, rng: random.Random) -> None:
    """Also where pyarrow does not know them as JSON; not with `decode: false`, nor where the column holds no texts."""
    text = pa.json_() if is_extension and hasattr(pa, "json_") else pa.string()

    def texts(values: list[Any]) -> pa.Array:
        stored = pa.array([None if value is None else json.dumps(value) for value in values], pa.string())
        return stored if text == pa.string() else pa.ExtensionArray.from_storage(text, stored)

    rows: list[dict[str, Any]] = [
        {
            "one": {"a": drawn(rng)},
            "some": [{"b": drawn(rng)}, rng.choice([None, 7, "x"])],
            "early": [drawn(rng), "x"],
            "deep": {"of": [{"x": drawn(rng), "text": "[2]"}] * rng.randint(0, 2)},
        }
        for _ in range(12)
    ]
    pairs = [pair for row in rows for pair in row["deep"]["of"]]
    structs = pa.StructArray.from_arrays([texts([one["x"] for one in pairs]), ["[2]"] * len(pairs)], ["x", "text"])
    bounds = np.cumsum([0, *(len(row["deep"]["of"]) for row in rows)]).astype(np.int32)
    lists = {
        name: pa.ListArray.from_arrays(
            np.arange(13, dtype=np.int32) * 2, texts([one for row in rows for one in row[name]])
        )
        for name in ("some", "early")
    }
    table = pa.table(
        {
            "one": texts([row["one"] for row in rows]),
            **lists,
            "deep": pa.StructArray.from_arrays([pa.ListArray.from_arrays(bounds, structs)], ["of"]),
            "raw": texts([row["one"] for row in rows]),
            "wrong": range(12),
        }
    )
    wanted = [{**row, "raw": json.dumps(row["one"]), "wrong": number} for number, row in enumerate(rows)]
    found = [{**row, "wrong": row["wrong"].item()} for row in rows_of(kind, files_of(kind, table, FEATURES, rng))]
    assert found == wanted


@pytest.mark.parametrize("kind", ["huggingface", "parquet"])
def test_any_value_and_what_is_none(kind: str, rng: random.Random) -> None:
    """Numbers in lists are arrays, as in JSON Lines; text that is no JSON is a bad sample."""
    table = pa.table({"one": ["{}", '{"a": ', None, "null", "[" * 100_000, f"[{2**70}]", '"x"']})
    files = files_of(kind, table, {"one": JSON}, rng)
    with pytest.raises(
        StageError, match="its column 'one' cannot be read: its feature is Json, and a text of it is no JSON"
    ):
        rows_of(kind, files)
    assert [row["one"] for row in rows_of(kind, files, "skip")] == [{}, "x"]
    arrays = files_of(kind, pa.table({"one": ["[1, 0.5]", "[1, 2.5]"]}), {"one": JSON}, rng)
    assert [row["one"].tolist() for row in rows_of(kind, arrays)] == [[1.0, 0.5], [1.0, 2.5]]


def test_files_that_differ_in_it(rng: random.Random) -> None:
    table = pa.table({"one": [["{}"], ["[]"]]})
    files = files_of("parquet", table, {"one": [JSON]}, rng) | {"b.parquet": written(table, rng)}
    with pytest.raises(SourceError, match=r"'one' is list<\w+: string> in .*b\.parquet.* and .* as \['JSON'\] in"):
        rows_of("parquet", files)
