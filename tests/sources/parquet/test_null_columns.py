"""Columns that have nothing but nulls, in all files or in some, of Parquet and of Hugging Face's datasets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hf_folders import saved, stream
from parquet_tables import COLUMNS, drawn_table, reference, same, written

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError, SourceError, StageError

LISTS = ("list", "list of lists", "list of pairs", "list of times")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def rows_of(pipeline: Any) -> dict[str, dict[str, Any]]:
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        return {
            key: {name: values[place] for name, values in batch.items() if not name.startswith("__")}
            for batch in loader
            for place, key in enumerate(batch["__key__"])
        }


def pipeline_of(names: list[str], num_bad: int, **source: Any) -> dict[str, Any]:
    ragged = {name: "list" for name in names if name in LISTS}
    errors = {"on_bad_sample": "skip", "max_bad_samples": num_bad} if num_bad else {}
    stages = ["read", {"batch": {"size": 5, "ragged": ragged}}]
    return {"source": source, "order": {"seed": 4}, "stages": stages, "errors": errors}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_nulls_in_one_file_of_two(rng: random.Random, tmp_path: Path, name: str, place: str) -> None:
    """Its rows are bad samples, as every row with a null is, and those of the other file are what they are alone."""
    beside = rng.choice([one for one in sorted(COLUMNS) if one != name])
    table = drawn_table(rng, 17, [name, beside])
    nulls = table.slice(0, 6).set_column(table.column_names.index(name), name, pa.nulls(6))
    first, last = ("b", "a") if place == "last" else ("a", "b")
    (tmp_path / f"{first}.parquet").write_bytes(written(nulls, rng))
    data = written(table, rng)
    (tmp_path / f"{last}.parquet").write_bytes(data)
    found = rows_of(pipeline_of([name, beside], 6, kind="parquet", url=str(tmp_path)))
    cells = reference(data)
    assert sorted(found) == sorted(f"{last}.parquet/{row}" for row in range(17))
    for key, row in found.items():
        for column, values in cells.items():
            assert same(row[column], values[int(key.rpartition("/")[2])]), column
    read = Pipeline.parquet(str(tmp_path), columns=[name]).shuffle("none").read().batch(23)
    with pytest.raises(StageError, match=rf"{first}.parquet/\d.*'{name}' is null"):
        rows_of(read)


def test_nulls_everywhere_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        table = pa.table({"x": [number] * 3, "empty": pa.nulls(3), "none": pa.nulls(3)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    pipeline = Pipeline.parquet(str(tmp_path)).shuffle("none").read().batch(6)
    with loaderkit.build(pipeline) as loader:
        (batch,) = loader
    assert sorted(name for name in batch if not name.startswith("__")) == ["x"]
    assert torch.equal(batch["x"], torch.tensor([0, 0, 0, 1, 1, 1]))
    assert [record.message for record in caplog.records if "nulls" in record.message] == [
        f"{str(tmp_path)!r}: left out 'empty', 'none', as there is nothing but nulls in them"
    ]
    (tmp_path / "p.yaml").write_text(pipeline.to_yaml())
    assert main(["check", str(tmp_path / "p.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["null_columns"] == ["empty", "none"]
    assert main(["check", str(tmp_path / "p.yaml")]) == 0
    assert "the column 'empty', which has nothing but nulls" in capsys.readouterr().out
    for asked in ({"columns": ["x", "empty"]}, {"fields": {"y": "empty"}}):
        with pytest.raises(ConfigError, match=r"source\.(columns|fields): the column 'empty' .*nothing but nulls"):
            rows_of(Pipeline.parquet(str(tmp_path), **asked).read().batch(2))
    with pytest.raises(ConfigError, match="all columns"):
        pq.write_table(pa.table({"none": pa.nulls(3)}), tmp_path / "only.parquet")
        rows_of(Pipeline.parquet(str(tmp_path / "only.parquet")).read().batch(2))


def test_nulls_inside_of_chats(tmp_path: Path) -> None:
    """A part of a struct that only some files have values of; writers also call the items of a list differently."""
    call = pa.struct([("name", pa.string()), ("scores", pa.list_(pa.float32()))])
    chats: dict[str, Any] = {}
    for file, kind in {"a": pa.null(), "b": pa.list_(call), "c": pa.null()}.items():
        calls = [{"name": "add", "scores": [0.5]}] if file == "b" else None
        chats[file] = [[{"role": "user", "content": file, "calls": calls}]] * 4
        message = pa.struct([("role", pa.string()), ("content", pa.string()), ("calls", kind)])
        for items in ("element", "item"):
            column = pa.array(chats[file], pa.list_(pa.field(items, message)))
            table = pa.table({"messages": column, "x": pa.nulls(4) if file == "b" else [1] * 4})
            pq.write_table(table, tmp_path / f"{file}-{items}.parquet", use_compliant_nested_type=False)
    found = rows_of(pipeline_of([], 8, kind="parquet", url=str(tmp_path)))
    assert {key: row["messages"] for key, row in found.items()} == {
        f"{file}-{items}.parquet/{row}": chats[file][row]
        for file in "ac"
        for items in ("element", "item")
        for row in range(4)
    }
    found = rows_of(pipeline_of([], 0, kind="parquet", url=str(tmp_path), columns=["messages"]))
    assert {row["messages"][0]["content"] for row in found.values()} == {"a", "b", "c"}
    message = pa.struct([("role", pa.string()), ("content", pa.int8()), ("calls", pa.null())])
    odd = pa.table({"messages": pa.array([[]], pa.list_(message)), "x": [1]})
    pq.write_table(odd, tmp_path / "d.parquet")
    with pytest.raises(SourceError, match=r"d\.parquet.*files of one source have the same columns"):
        rows_of(pipeline_of([], 0, kind="parquet", url=str(tmp_path)))


@pytest.mark.parametrize("name", ["number", "text", "chat", "fixed list", "list", "pictures"])
def test_of_a_saved_data_set(rng: random.Random, tmp_path: Path, name: str) -> None:
    """Left out where there is nothing else; in one of its files they are bad samples."""
    table = drawn_table(rng, 12, [name])
    if pa.types.is_dictionary(table.schema[0].type):  # which datasets do not write
        table = table.cast(pa.schema({name: pa.string()}))
    files = saved(table.append_column("none", pa.nulls(12)), rng, num_files=2)
    (tmp_path / "data").mkdir()
    for file, data in files.items():
        (tmp_path / "data" / file).write_bytes(data)
    found = rows_of(pipeline_of([name], 0, kind="huggingface", url=str(tmp_path / "data")))
    assert len(found) == 12
    assert {tuple(row) for row in found.values()} == {(name,)}
    first, last = sorted(file for file in files if file.endswith(".arrow"))
    for nulls, values in ((first, last), (last, first)):
        files[nulls] = stream(pa.table({name: pa.nulls(6)}), [2, 4])
        files[values] = stream(table.slice(0, 6), [5, 1])
        for file in (first, last):
            (tmp_path / "data" / file).write_bytes(files[file])
        found = rows_of(pipeline_of([name], 6, kind="huggingface", url=str(tmp_path / "data")))
        assert sorted(found) == [f"{values}/{row}" for row in range(6)]
