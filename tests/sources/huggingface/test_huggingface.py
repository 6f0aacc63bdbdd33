"""`kind: huggingface` against pyarrow's own stream reader, over files on disk and a store without mappings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from buckets import upload
from hf_folders import cached, drawn_sizes, saved, stream
from mutate import mutations
from parquet_tables import COLUMNS, drawn_table, numbered, plain, same
from seaweed import Seaweed

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, SourceError, StageError

INLINE = {"prefetch.executor": "inline"}
LISTS = ("list", "list of lists", "list of pairs", "list of times")
IPC_COLUMNS = sorted(COLUMNS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def put(folder: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


def table_of(rng: random.Random, num: int, names: list[str] | None = None) -> pa.Table:
    """Without columns packed by dictionaries, which datasets do not write."""
    table = drawn_table(rng, num, names)
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(field.type.value_type))
    return table


def cells_of(table: pa.Table) -> dict[str, list[Any]]:
    return {
        name: [
            plain(cell)
            for chunk in column.chunks
            for cell in numbered(chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk).to_pylist()
        ]
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def rows_of(loader: loaderkit.Loader) -> dict[str, dict[str, Any]]:
    with loader:
        return {
            key: {name: values[place] for name, values in batch.items() if not name.startswith("__")}
            for batch in loader
            for place, key in enumerate(batch["__key__"])
        }


def pipeline_of(names: list[str], **source: Any) -> Pipeline:
    ragged: Any = {name: "list" for name in names if name in LISTS}
    return Pipeline.huggingface(**source).shuffle(seed=4).read().batch(5, ragged=ragged)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("names", [None, *([name] for name in IPC_COLUMNS)])
def test_rows_are_those_of_the_stream(names: list[str] | None, rng: random.Random, tmp_path: Path) -> None:
    """Mapped, and read by ranges as of a store; also through a mapping of indices, which may name a row twice."""
    names = names or rng.sample(IPC_COLUMNS, 5)
    table = table_of(rng, 37, names)
    indices = [rng.randrange(37) for _ in range(20)] if rng.random() < 0.5 else None
    files = saved(table, rng, rng.randint(1, 3), indices)
    cells = cells_of(table)
    order = range(37) if indices is None else indices
    on_disk = rows_of(loaderkit.build(pipeline_of(names, url=put(tmp_path / "saved", files)), overrides=INLINE))
    in_store = rows_of(
        loaderkit.build(
            pipeline_of(names, url="memory://"), connectors={"memory": MemoryConnector(files)}, overrides=INLINE
        )
    )
    assert len(on_disk) == len(in_store) == len(order)
    with loaderkit.build(pipeline_of(names, url=str(tmp_path / "saved")).shuffle(False), overrides=INLINE) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
    for key, number in zip(keys, order, strict=True):
        for name in names:
            assert same(on_disk[key][name], cells[name][number]), (key, name)
            assert same(in_store[key][name], cells[name][number]), (key, name)


def test_a_bucket_gives_the_same(seaweed: Seaweed, s3_keys: None, rng: random.Random, tmp_path: Path) -> None:
    names = ["chat", "text", "number"]
    folder = put(tmp_path / "saved", saved(table_of(rng, 30, names), rng))
    upload(seaweed, tmp_path / "saved", "saved", "train/")
    bucket = pipeline_of(names, url="s3://saved/train", s3={"endpoint": seaweed.endpoint})
    on_disk, there = rows_of(loaderkit.build(pipeline_of(names, url=folder))), rows_of(loaderkit.build(bucket))
    assert repr(there) == repr(on_disk)


# ------------------------------------------------------------------------------------------------- which files


def test_splits_of_a_saved_dict(rng: random.Random, tmp_path: Path) -> None:
    files = {"dataset_dict.json": json.dumps({"splits": ["train", "test"]}).encode()}
    for number, split in enumerate(("train", "test")):
        part = saved(pa.table({"x": [number] * 5}), rng)
        files |= {f"{split}/{name}": data for name, data in part.items()}
    url = put(tmp_path / "saved", files)
    for number, split in enumerate(("train", "test")):
        rows = rows_of(loaderkit.build(pipeline_of([], url=url, split=split)))
        assert {int(row["x"]) for row in rows.values()} == {number}
    with pytest.raises(ConfigError, match=r"source\.split: .* has the splits train, test: choose one"):
        loaderkit.build(pipeline_of([], url=url))
    with pytest.raises(ConfigError, match=r"has no split 'dev', only train, test"):
        loaderkit.build(pipeline_of([], url=url, split="dev"))
    with pytest.raises(ConfigError, match=r"holds the split 'train', not 'test'"):
        loaderkit.build(pipeline_of([], url=f"{url}/train", split="test"))


def test_the_cache_by_name(rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    one, other = pa.table({"x": range(9)}), pa.table({"x": range(100, 107)})
    put(tmp_path / "hub/stanford___imdb/plain_text/0.0.0/aaa", cached(one, rng))
    named = {"name": "stanford/IMDB"}
    assert sorted(int(row["x"]) for row in rows_of(loaderkit.build(pipeline_of([], **named))).values()) == [*range(9)]
    folder = str(tmp_path / "hub/stanford___imdb/plain_text/0.0.0/aaa")
    assert len(rows_of(loaderkit.build(pipeline_of([], url=folder, split="train")))) == 9
    put(tmp_path / "hub/stanford___imdb/other/0.0.0/bbb", cached(other, rng))
    with pytest.raises(ConfigError, match=r"source\.config: .* has several, other, plain_text: choose one"):
        loaderkit.build(pipeline_of([], **named))
    assert len(rows_of(loaderkit.build(pipeline_of([], **named, config="other")))) == 7
    with pytest.raises(SourceError, match="the cache of datasets has no 'squad' that is prepared"):
        loaderkit.build(pipeline_of([], name="squad"))
    with pytest.raises(ConfigError, match="a name on the hub"):
        loaderkit.build(pipeline_of([], name="../etc"))
    (tmp_path / "hub/stanford___imdb/other/0.0.0/bbb/imdb-train.arrow").write_bytes(stream(other.slice(1), [6]))
    with pytest.raises(FormatError, match=r"have 6 rows, and its dataset_info\.json says 7: it is not whole"):
        loaderkit.build(pipeline_of([], **named, config="other"))


@pytest.mark.parametrize(("source", "said"), [
    ({}, "give `url`, the folder of a saved data set, or `name`"),
    ({"url": "x", "name": "imdb"}, "give `url`, the folder of a saved data set, or `name`"),
    ({"url": "x", "config": "a"}, "`config` chooses among the cached data sets of one `name`"),
    ({"url": "x", "split": "a/b"}, "a name, not 'a/b'"),
    ({"url": "x", "columns": ["a"], "fields": {"b": "c"}}, "`fields` names 'c', which is none of `columns`"),
])  # fmt: skip
def test_arguments_that_do_not_fit(source: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaderkit.build(Pipeline.huggingface(**source).read().batch(2))


def test_classes_and_columns(rng: random.Random, tmp_path: Path) -> None:
    files = saved(pa.table({"label": [0, 1, 1], "x": [1, 2, 3], "y": ["a", "b", "c"]}), rng)
    state = json.loads(files["state.json"]) | {"_format_columns": ["label", "x"]}
    url = put(tmp_path / "saved", files | {"state.json": json.dumps(state).encode()})
    with loaderkit.build(pipeline_of([], url=url)) as loader:
        assert loader.classes == ["cat", "dog"]
        assert list(next(iter(loader))) == ["label", "x", "__key__"]
    with loaderkit.build(pipeline_of([], url=url, fields={"text": "y"})) as loader:
        assert list(next(iter(loader))) == ["text", "__key__"]
    put(tmp_path / "saved", {"state.json": json.dumps(state | {"_output_all_columns": True}).encode()})
    with loaderkit.build(pipeline_of([], url=url)) as loader:
        assert list(next(iter(loader))) == ["label", "x", "y", "__key__"]


# ------------------------------------------------------------------------------------------------- what is damaged


def test_files_that_differ_or_cannot_be_fields(rng: random.Random) -> None:
    files = saved(pa.table({"x": range(8)}), rng)
    other = next(name for name in files if name.startswith("data-00001"))

    def build(changed: bytes) -> None:
        objects = MemoryConnector({**files, other: changed})
        loaderkit.build(pipeline_of([], url="memory://"), connectors={"memory": objects}).close()

    with pytest.raises(SourceError, match=r"the column 'x' is text in .*data-00001.* and int64 \[\] in .*data-00000"):
        build(stream(pa.table({"x": ["a"]}), [1]))
    with pytest.raises(FormatError, match="compressed"):
        build(stream(pa.table({"x": [7] * 5000}), [5000], compression="zstd"))
    views = pa.table({"x": pa.array(["a"], pa.string_view())})
    with pytest.raises(ConfigError, match="holds string_view, which is not read from Arrow files"):
        build(stream(views, [1]))
    with pytest.raises(FormatError, match="'dictionary', which cannot be read by ranges"):
        build(stream(pa.table({"x": pa.array(["a"]).dictionary_encode()}), [1]))


def test_a_damaged_file_is_left_out(rng: random.Random, tmp_path: Path) -> None:
    files = saved(pa.table({"x": range(20)}), rng)
    name = "data-00000-of-00002.arrow"
    url = put(tmp_path / "saved", {**files, name: files[name][:-40]})
    with pytest.raises(FormatError, match=rf"{name}.*(truncated|damaged).*on_bad_shard: skip"):
        loaderkit.build(pipeline_of([], url=url))
    rows = rows_of(loaderkit.build(pipeline_of([], url=url), overrides={"errors.on_bad_shard": "skip"}))
    assert sorted(int(row["x"]) for row in rows.values()) == [*range(10, 20)]


def test_a_file_that_changes_is_noticed(rng: random.Random, tmp_path: Path) -> None:
    """Mapped bytes that are cut off would end the process; they are not touched."""
    files = saved(pa.table({"x": ["word" * 2000] * 400}), rng, num_files=1)
    url = put(tmp_path / "saved", files)
    with loaderkit.build(pipeline_of([], url=url), overrides=INLINE) as loader:
        batches = iter(loader)
        next(batches)
        path = tmp_path / "saved/data-00000-of-00001.arrow"
        with path.open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(LoaderkitError, match="was changed since it was listed"):
            list(batches)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("number", range(10))
def test_damage_is_an_error_of_ours_or_none(rng: random.Random, number: int, tmp_path: Path) -> None:
    """Mapped, so that offsets beyond a buffer would be read by the process itself."""
    names = rng.sample(IPC_COLUMNS, 4)
    table = table_of(rng, 30, names)
    data = stream(table, drawn_sizes(rng, 30))
    files = saved(table, rng, num_files=1)
    name = "data-00000-of-00001.arrow"
    numbers = np.random.default_rng(rng.randrange(2**32))
    outcomes = {"read": 0, "refused": 0}
    for attempt in range(50):
        damaged = mutations(data, numbers)
        url = put(tmp_path / f"{attempt}", {**files, name: damaged})
        try:
            with loaderkit.build(
                pipeline_of(names, url=url), overrides={**INLINE, "errors.on_bad_sample": "skip"}
            ) as loader:
                for batch in loader:
                    assert batch["__key__"]
            outcomes["read"] += 1
        except LoaderkitError as error:
            assert name in str(error) or "batch" in str(error), error  # noqa: PT017 - any of many errors
            outcomes["refused"] += 1
    assert outcomes["refused"] > 5, outcomes


@pytest.mark.parametrize(("name", "data", "said"), [
    ("state.json", b"{", r"state\.json is no JSON"),
    ("state.json", b"[1]", r"state\.json is no object of JSON"),
    ("state.json", b'{"_data_files": [{"filename": "../x.arrow"}]}', r"names the file '\.\./x\.arrow', which is none beside"),
    ("state.json", b'{"_data_files": [{"filename": "gone.arrow"}]}', r"gone\.arrow"),
    ("state.json", b'{"_data_files": []}', "have no row"),
    ("state.json", b'{"_data_files": 7}', r"names the file None"),
    ("dataset_info.json", b"[" * 100_000, r"dataset_info\.json is no JSON"),
])  # fmt: skip
def test_damaged_json_is_refused(name: str, data: bytes, said: str, rng: random.Random) -> None:
    files = {**saved(pa.table({"x": range(8)}), rng), name: data}
    with pytest.raises(LoaderkitError, match=said):
        loaderkit.build(pipeline_of([], url="memory://"), connectors={"memory": MemoryConnector(files)})


def test_indices_beyond_the_rows(rng: random.Random) -> None:
    files = saved(pa.table({"x": range(8)}), rng, indices=[1, 8])
    with pytest.raises(FormatError, match=r"indices\.arrow names rows beyond the 8 that there are"):
        loaderkit.build(pipeline_of([], url="memory://"), connectors={"memory": MemoryConnector(files)})


def test_a_null_is_a_bad_sample(rng: random.Random, tmp_path: Path) -> None:
    url = put(tmp_path / "saved", saved(pa.table({"x": [["a"], None, ["b", None]]}), rng, num_files=1))
    with loaderkit.build(pipeline_of([], url=url)) as loader, pytest.raises(StageError, match="its column 'x' is null"):
        list(loader)
    rows = rows_of(loaderkit.build(pipeline_of([], url=url), overrides={"errors.on_bad_sample": "skip"}))
    assert sorted(row["x"] for row in rows.values()) == [["a"], ["b", None]]
