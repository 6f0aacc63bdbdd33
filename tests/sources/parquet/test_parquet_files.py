"""`kind: parquet`: which files, columns and fields; what is read of them; and footers that are kept."""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_tables import written

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, LoaderkitError, MissingExtraError, ObjectChangedError, SourceError, StageError
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.source import ParquetArgs, ParquetSource


class Counting(MemoryConnector):
    """Notes the ranges that are read; it may count as remote."""

    def __init__(self, objects: dict[str, bytes], *, is_remote: bool = False) -> None:
        super().__init__(objects)
        self.traits = ConnectorTraits(is_remote=is_remote)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)


def table(first: int, num: int, **more: Any) -> pa.Table:
    return pa.table({"x": range(first, first + num), "text": [f"t{n}" for n in range(first, first + num)], **more})


def build(connector: MemoryConnector, overrides: Any = None, size: int = 4, **source: Any) -> loaderkit.Loader:
    pipeline = Pipeline.parquet("memory://", **source).shuffle("none").read().batch(size)
    return loaderkit.build(pipeline, connectors={"memory": connector}, overrides=overrides)


def rows(loader: loaderkit.Loader, field: str = "x") -> list[Any]:
    return [value for batch in loader for value in (batch[field] if field == "__key__" else batch[field].tolist())]


@pytest.fixture
def files(rng: random.Random) -> dict[str, bytes]:
    """Rows 0 to 29; one file has no row, and so no types."""
    return {
        "b/c.parquet": written(table(20, 10), rng),
        "a.parquet": written(table(0, 7), rng),
        "a0.parquet": written(table(7, 13), rng),
        "empty.parquet": written(table(0, 0), rng),
        "_SUCCESS": b"",
    }


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def test_canonical_order_and_keys(files: dict[str, bytes]) -> None:
    with build(MemoryConnector(files), include="**/*.parquet") as loader:
        assert rows(loader) == list(range(30))
        keys = rows(loader, "__key__")
    assert keys[6:9] == ["a.parquet/6", "a0.parquet/0", "a0.parquet/1"]
    assert keys[-1] == "b/c.parquet/9"
    with build(MemoryConnector(files), limit=9) as loader:
        assert rows(loader) == list(range(9))
    with build(MemoryConnector(files), limit=7) as loader:
        assert loader.num_samples == 7
        assert rows(loader) == list(range(7))


def test_files_named_by_braces_or_one_by_one(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name in ("a.parquet", "a0.parquet"):
        (tmp_path / name).write_bytes(files[name])
    for url, num in (("a{,0}.parquet", 20), ("a0.parquet", 13)):
        with loaderkit.build(Pipeline.parquet(str(tmp_path / url)).shuffle("none").read().batch(3)) as loader:
            assert len(rows(loader)) == num
    with pytest.raises(SourceError, match=r"is called 'a1\.parquet'; there are 'a\.parquet', 'a0\.parquet'"):
        loaderkit.build(Pipeline.parquet(str(tmp_path / "a{0,1}.parquet")).read().batch(3))
    with pytest.raises(SourceError, match="have no row"):
        build(MemoryConnector({"e.parquet": files["empty.parquet"]}))


def test_what_spark_has_not_committed_is_hidden(rng: random.Random) -> None:
    """Parts that begin with `_` below `url`, as in pyarrow, unless a pattern names them or they are a column's."""
    names = ["_temporary/0/a.parquet", "_a.parquet", "b/_c/a.parquet", "b/a_.parquet", "c/_.parquet", "a.parquet"]
    files = {name: written(table(10 * number, 1), rng) for number, name in enumerate(names)}
    for include, expected in (
        ("**/*.parquet", [50, 30]),
        ("**", [50, 30]),
        ("*", [50]),
        ("?a.parquet", []),
        ("_*", [10]),
        (["_a.parquet", "*.parquet"], [10, 50]),
        ("{_temporary,b}/**/*.parquet", [0, 30]),
        ("b/_c/*", [20]),
        ("**/_*", [10, 40]),
    ):
        if expected:
            with build(MemoryConnector(files), include=include) as loader:
                assert rows(loader) == expected, include
        else:
            with pytest.raises(SourceError, match="nothing below"):
                build(MemoryConnector(files), include=include)
    with build(MemoryConnector({"_y=1/a.parquet": files["a.parquet"]}), include="**/*.parquet") as loader:
        assert rows(loader) == [50]
        assert rows(loader, "_y") == [1]
    with build(MemoryConnector({"_x/a.parquet": files["a.parquet"]}), include="_x/a.parquet") as loader:
        assert rows(loader) == [50]


def test_pyarrow_hides_the_same(tmp_path: Path) -> None:
    for number, name in enumerate(["part-0", "_temporary/0/part-1", "_part-2", "sub/part-3", "sub/_b/part-4"]):
        path = tmp_path / f"data/{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(number, 1), path)
    pipeline = Pipeline.parquet(str(tmp_path / "data"), include="**/*.parquet").shuffle("none").read().batch(2)
    with loaderkit.build(pipeline) as loader:
        assert rows(loader) == pq.read_table(tmp_path / "data")["x"].to_pylist() == [0, 3]


def test_what_is_left_out_is_counted(files: dict[str, bytes]) -> None:
    connector = MemoryConnector(files | {"a.parq": b"", "z/z.parquet": b"", "_SUCCESS": b"", ".d.parq": b""})
    args = ParquetArgs(url="memory://")
    source = ParquetSource(connector, args, lambda info: load_footer(connector, info, None))
    assert source.left_out == {"parq": 1, "": 1, "parquet": 1 + sum("/" in key for key in files)}


def test_columns_and_fields(files: dict[str, bytes]) -> None:
    connector = MemoryConnector(files)
    for source, names in (
        ({"columns": ["text"]}, ["text"]),
        ({"fields": {"label": "x"}}, ["label"]),
        ({"columns": ["text", "x"], "fields": {"label": "x"}}, ["text", "label"]),
    ):
        with build(connector, **source) as loader:
            assert list(next(iter(loader))) == [*names, "__key__"]
    with pytest.raises(ConfigError, match=r"source\.columns: .*a\.parquet has no column 'y'; .* are x, text"):
        build(connector, columns=["x", "y"])
    with pytest.raises(ConfigError, match=r"source\.fields: .*a\.parquet has no column 'y'"):
        build(connector, fields={"label": "y"})
    for wrong, message in (
        ({"columns": ["x", "x"]}, "names a column twice"),
        ({"columns": ["x"], "fields": {"a": "text"}}, "none of `columns`"),
        ({"columns": ["x", "text"], "fields": {"x": "text"}}, "two columns would be the field 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(connector, **wrong)


def test_only_chosen_columns_are_read(rng: random.Random) -> None:
    data = written(table(0, 50, big=[rng.randbytes(1000) for _ in range(50)]), rng, row_group_size=10)
    connector = Counting({"f.parquet": data})
    with build(connector, columns=["x"]) as loader:
        assert rows(loader) == list(range(50))
    of_rows = [length for _, start, length in connector.reads if start + length < len(data)]
    assert len(of_rows) == 5, "each row group is read once"
    assert sum(of_rows) < 5000


def test_a_row_group_is_read_once_however_rows_are_mixed(rng: random.Random) -> None:
    connector = Counting({"f.parquet": written(table(0, 200), rng, row_group_size=10)})
    pipeline = Pipeline.parquet("memory://").shuffle(seed=3).read().batch(8)
    overrides = {"prefetch.concurrency": 4}
    with loaderkit.build(pipeline, connectors={"memory": connector}, overrides=overrides) as loader:
        assert sorted(rows(loader)) == list(range(200))
        assert sorted(rows(loader)) == list(range(200))
        num_read = len({start for _, start, _ in connector.reads})
        assert len(connector.reads) <= num_read + 1, "each range once, but the footer that `build` has read before"


@pytest.mark.parametrize(("memory", "warns"), [("1MB", False), (1, True)])
def test_much_decoding_is_warned_of(
    memory: Any, warns: bool, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    connector = MemoryConnector({"f.parquet": written(table(0, 200), rng, row_group_size=20)})
    pipeline = Pipeline.parquet("memory://", memory=memory).shuffle(seed=3).read().batch(8)
    with loaderkit.build(pipeline, connectors={"memory": connector}) as loader:
        for _ in range(3):
            assert sorted(rows(loader)) == list(range(200))
    said = [record.getMessage() for record in caplog.records if "rows are read and decoded" in record.getMessage()]
    assert len(said) == warns


def test_blocks_are_row_groups(rng: random.Random) -> None:
    connector = Counting({f"{n}.parquet": written(table(100 * n, 100), rng, row_group_size=10) for n in range(4)})
    source = Pipeline.parquet("memory://", memory="2kB")
    pipeline = source.shuffle("block", seed=3, block=1, window=4, lanes=2).read().batch(8)
    with loaderkit.build(pipeline, connectors={"memory": connector}) as loader:
        assert len(loader) == 50
        found = rows(loader)
    assert sorted(found) == list(range(400))
    assert found != sorted(found)


def test_files_that_differ_in_their_columns(files: dict[str, bytes], rng: random.Random) -> None:
    others = {
        "lacks": (pa.table({"x": [1]}), "the column 'text' is no such column in .*z.parquet and text in .*a.parquet"),
        "has more": (table(0, 1, more=[1]), "the column 'more' is int64 .*z.parquet and no such column in"),
        "type": (
            pa.table({"x": [1.5], "text": ["a"]}),
            r"the column 'x' is float64 \[\] in .*z.parquet and int64 \[\] in",
        ),
    }
    for other, message in others.values():
        with pytest.raises(SourceError, match=message):
            build(MemoryConnector({**files, "z.parquet": written(other, rng)}))
    swapped = table(30, 3).select(["text", "x"])
    with build(MemoryConnector({"a.parquet": files["a.parquet"], "z.parquet": written(swapped, rng)})) as loader:
        assert rows(loader)[7:] == [30, 31, 32], "their order may be another"


def test_names_of_classes_that_hugging_face_wrote(rng: random.Random) -> None:
    features = {"x": {"names": ["ant", "bee"], "_type": "ClassLabel"}, "text": {"dtype": "string", "_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    data = written(table(0, 2).replace_schema_metadata(metadata), rng)
    with build(MemoryConnector({"f.parquet": data}), fields={"label": "x"}) as loader:
        assert loader.classes == ["ant", "bee"]
    with build(MemoryConnector({"f.parquet": data})) as loader:
        assert loader.classes is None


def test_footers_of_a_remote_store_are_kept(rng: random.Random, tmp_path: Path) -> None:
    objects = {f"{n}.parquet": written(table(10 * n, 10), rng) for n in range(5)}
    inline = {"prefetch.executor": "inline"}
    connector = Counting(objects, is_remote=True)
    with build(connector, inline, limit=50):
        pass
    ends = {key: len(data) for key, data in objects.items()}
    assert sum(start + length == ends[key] for key, start, length in connector.reads) == 5
    again = Counting(objects, is_remote=True)
    with build(again, inline) as loader:
        assert rows(loader) == list(range(50))
    assert all(start + length < ends[key] for key, start, length in again.reads), "no footer is read again"
    for kept in (tmp_path / "cache").rglob("*"):
        if kept.is_file():
            kept.write_bytes(kept.read_bytes()[:-3])
    replaced = Counting({**objects, "3.parquet": written(table(70, 3), rng)}, is_remote=True)
    with build(replaced, inline) as loader:
        assert rows(loader) == [*range(30), 70, 71, 72, *range(40, 50)]


def test_a_file_that_is_replaced_while_it_is_read(rng: random.Random) -> None:
    connector = MemoryConnector({"f.parquet": written(table(0, 40), rng, row_group_size=5)})
    with build(connector, {"prefetch.executor": "inline"}, memory="1kB") as loader:
        stream = iter(loader)
        next(stream)
        connector.writes().put("f.parquet", written(table(0, 40), rng, row_group_size=4))
        with pytest.raises((StageError, LoaderkitError), match=r"f\.parquet") as caught:
            list(stream)
    assert isinstance(caught.value.__cause__, ObjectChangedError)


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loaderkit\[parquet\]'"):
        build(MemoryConnector(files))


def test_no_footer_outlives_its_loader(rng: random.Random) -> None:
    """Of any number of row groups, columns and files."""

    def num_footers() -> int:
        gc.collect()
        return sum(isinstance(one, pq.FileMetaData) for one in gc.get_objects())

    before = num_footers()
    for _ in range(3):
        files = {
            f"{n}.parquet": written(table(0, rng.randint(1, 30)), rng, row_group_size=rng.choice([1, 7, 100]))
            for n in range(rng.randint(1, 6))
        }
        with build(MemoryConnector(files), {"prefetch.executor": "inline"}) as loader:
            next(iter(loader))
        del loader
        assert num_footers() <= before  # another test's may go meanwhile
