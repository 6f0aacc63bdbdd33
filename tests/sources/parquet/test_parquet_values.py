"""`kind: parquet` against `pyarrow.parquet.read_table`: drawn columns, row groups, encodings and compressions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from parquet_tables import COLUMNS, drawn_table, reference, same, written

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StageError
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.groups import GroupReader
from loaderkit.sources.parquet.source import ParquetArgs, ParquetSource

RAGGED = {"list": "list", "list of times": "list", "list of lists": "list", "list of pairs": "list"}


def build(objects: dict[str, bytes], stages: Any = None, overrides: Any = None, **source: Any) -> loaderkit.Loader:
    pipeline = Pipeline.parquet("memory://", **source).shuffle(seed=1)
    pipeline = pipeline.read().batch(3) if stages is None else stages(pipeline.read())
    return loaderkit.build(pipeline, connectors={"memory": MemoryConnector(objects)}, overrides=overrides)


def keep(sample: dict[str, Any]) -> None:
    """A stage between `read` and `batch`, so that samples are made one by one."""


@pytest.mark.matrix(6)
@pytest.mark.parametrize("names", [None, *([name] for name in COLUMNS)])
def test_rows_are_those_of_read_table(rng: random.Random, names: list[str] | None) -> None:
    names = names or rng.sample(sorted(COLUMNS), 4)
    first = drawn_table(rng, 40, names)
    files = {"a.parquet": written(first.slice(0, 23), rng), "b/c.parquet": written(first.slice(23), rng)}
    cells = {key: reference(data) for key, data in files.items()}
    ragged = {name: how for name, how in RAGGED.items() if name in names}

    def stages(pipeline: Any) -> Any:
        return (pipeline.call(keep) if rng.random() < 0.5 else pipeline).batch(rng.randint(1, 9), ragged=ragged)

    with build(files, stages, include="**/*.parquet") as loader:
        keys = []
        for batch in loader:
            for place, key in enumerate(batch["__key__"]):
                file, _, row = key.rpartition("/")
                for name in names:
                    assert same(batch[name][place], cells[file][name][int(row)]), (key, name)
                keys.append(key)
            for name in names:
                if isinstance(batch[name], torch.Tensor) and name == "number":
                    kind = first.schema.field(name).type
                    dtype = "bool" if kind == pa.bool_() else np.dtype(kind.to_pandas_dtype()).name
                    assert str(batch[name].dtype) == f"torch.{dtype}"
        assert sorted(keys) == sorted([f"a.parquet/{n}" for n in range(23)] + [f"b/c.parquet/{n}" for n in range(17)])


def test_shapes_of_lists(rng: random.Random) -> None:
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24.0)), 2)
    table = pa.table(
        {
            "fixed": pa.FixedSizeListArray.from_arrays(pairs, 3),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype="i4").reshape(4, 3, 2)),
            "ragged": pa.array([[[1, 2], [3, 4]], [], [[5, 6]], [[7, 8]]], pa.list_(pa.list_(pa.int16()))),
        }
    )

    def stages(pipeline: Any) -> Any:
        return pipeline.batch(4, ragged={"ragged": "list"})

    with build({"x.parquet": written(table, rng)}, stages, limit=4) as loader:
        batch = next(iter(loader))
        order = torch.tensor([int(key.rpartition("/")[2]) for key in batch["__key__"]])
        assert torch.equal(batch["fixed"], torch.arange(24.0, dtype=torch.float64).reshape(4, 3, 2)[order])
        assert torch.equal(batch["tensor"], torch.arange(24, dtype=torch.int32).reshape(4, 3, 2)[order])
        shapes = {int(row): tuple(value.shape) for row, value in zip(order, batch["ragged"], strict=True)}
        assert shapes == {0: (2, 2), 1: (0, 0), 2: (1, 2), 3: (1, 2)}


BAD: dict[str, tuple[Any, str]] = {
    "null": (pa.array([1, None, 3]), "'x' is null"),
    "null text": (pa.array(["a", None, "c"]), "'x' is null"),
    "null in a list": (pa.array([[1], [2, None], []]), "'x' has a null in a list"),
    "null list": (pa.array([[1], None, []], pa.list_(pa.int64())), "'x' is null"),
    "null in a fixed list": (pa.array([[1, 2], [2, None], [3, 4]], pa.list_(pa.int64(), 2)), "'x' is null, or has a null"),
    "null fixed list": (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), "'x' is null, or has a null"),
    "null pair": (pa.array([[[1, 2]], [None], []], pa.list_(pa.list_(pa.int64(), 2))), "'x' has a null in a list"),
    "lengths": (pa.array([[[1]], [[1], [2, 3]], []], pa.list_(pa.list_(pa.int8()))), "'x' holds lists of 1 to 2 items"),
    "no bytes": (
        pa.array([{"bytes": b"a", "path": None}, {"bytes": None, "path": "z/y.jpg"}, {"bytes": b"", "path": "q"}]),
        "'x' has no bytes, only the path 'y.jpg'",
    ),
    "no text": (
        pa.array([b"a", b"\xff", b"c"]).view(pa.string()), "'x' is no UTF-8"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_row_that_is_no_sample(kind: str, rng: random.Random) -> None:
    """It is named with its column; the rows beside it are good."""
    column, message = BAD[kind]
    files = {"f.parquet": written(pa.table({"ok": [0, 1, 2], "x": column}), rng, row_group_size=rng.randint(1, 3))}

    def stages(pipeline: Any) -> Any:
        after = pipeline.call(keep) if rng.random() < 0.5 else pipeline
        return after.batch(3, ragged={"x": "list"} if pa.types.is_list(column.type) else {})

    with build(files, stages) as loader, pytest.raises(StageError) as caught:
        list(loader)
    assert "'f.parquet/1'" in str(caught.value)
    assert message in str(caught.value)
    with build(files, stages, {"errors.on_bad_sample": "skip"}) as loader:
        (batch,) = loader
        assert sorted(batch["ok"].tolist()) == [0, 2]


WRONG: dict[str, Any] = {
    "map<string, int64": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "list<element: map<string": pa.array([[[("a", 1)]], []], pa.list_(pa.map_(pa.string(), pa.int64()))),
    "struct<a: map<string": pa.array([{"a": []}, {"a": []}], pa.struct([("a", pa.map_(pa.string(), pa.int64()))])),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_column_that_can_be_no_field(said: str, rng: random.Random) -> None:
    table = pa.table({"x": [1, 2], "odd": WRONG[said], "y": ["a", "b"]})
    files = {"f.parquet": written(table, rng, use_dictionary=False)}
    with pytest.raises(ConfigError, match=r"source\.columns: the column 'odd' of .*f\.parquet holds ") as caught:
        build(files)
    assert said in str(caught.value)
    assert "columns: [x, y]" in str(caught.value)
    with build(files, columns=["y", "x"]) as loader:
        batch = next(iter(loader))
        assert list(batch) == ["y", "x", "__key__"]
        assert sorted(batch["x"].tolist()) == [1, 2]


DECODED: dict[str, tuple[Any, int]] = {
    "text": (pa.array(["é" * 50] * 1000), 100),
    "categories": (pa.array(["é" * 50] * 1000).dictionary_encode(), 100),
    "views": (pa.array(["é" * 50] * 1000, pa.string_view()), 100),
    "booleans": (pa.FixedSizeListArray.from_arrays(pa.array([True, False] * 50_000), 100), 100),
    "lists": (pa.array([[True, False] * 50] * 1000), 100),
    "categories in lists": (pa.array([[7.0] * 10] * 1000, pa.list_(pa.dictionary(pa.int8(), pa.float64()))), 80),
    "files": (pa.array([{"bytes": b"a" * 90, "path": "b" * 10}] * 1000), 100),
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODED)
def test_the_memory_of_a_row_group_is_that_of_its_values(kind: str, rng: random.Random) -> None:
    """Not of what they were decoded from: `memory` bounds what is held."""
    column, row_bytes = DECODED[kind]
    connector = MemoryConnector({"f.parquet": written(pa.table({"x": column}), rng, row_group_size=1000)})
    source = ParquetSource(connector, ParquetArgs(url="memory://"), lambda info: load_footer(connector, info, None))
    memory_bytes = GroupReader(source, connector).read(0).memory_bytes
    assert 1000 * row_bytes <= memory_bytes <= 1000 * (row_bytes + 40)
