"""Row groups that are too large to be decoded at once come slice by slice: the same rows, in memory for one slice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from memory_peak import forget_peak, peak_bytes
from parquet_tables import COLUMNS, drawn_table, reference, same, written

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConnectorError, StageError
from loaderkit.sources.parquet import arrow, source
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.slices import SlicedGroups

LISTS = ("list", "list of lists", "list of pairs", "list of times")
EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"prefetch.executor": "inline"},
    "threads": {"prefetch.executor": "thread", "prefetch.concurrency": 3},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


class Counting(MemoryConnector):
    """A store that counts what is read of it."""

    traits = ConnectorTraits(is_remote=True)
    num_read = most_read = 0

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.num_read += len(buffer)
        self.most_read = max(self.most_read, len(buffer))
        super().read_into(key, start, buffer, etag=etag)


def bound(monkeypatch: pytest.MonkeyPatch, most: int, slice_bytes: int, buffer_bytes: int = 1 << 20) -> None:
    monkeypatch.setattr(source, "_MOST_AT_ONCE", most)
    monkeypatch.setattr(source, "_SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(arrow, "_BUFFER_BYTES", buffer_bytes)


def rows_of(pipeline: Pipeline, **overrides: Any) -> dict[str, dict[str, Any]]:
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        return {
            key: {name: values[place] for name, values in batch.items() if not name.startswith("__")}
            for batch in loader
            for place, key in enumerate(batch["__key__"])
        }


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shuffle", ["none", "global", "block"])
@pytest.mark.parametrize("names", [None, *([name] for name in sorted(COLUMNS))])
def test_rows_are_those_of_read_table(
    rng: random.Random,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str] | None,
    shuffle: Any,
) -> None:
    bound(monkeypatch, rng.randint(1, 300), rng.randint(1, 200), rng.choice([1, 64, 1 << 20]))
    data = written(drawn_table(rng, 60, names or rng.sample(sorted(COLUMNS), 5)), rng, row_group_size=40)
    (tmp_path / "t.parquet").write_bytes(data)
    cells = reference(data)
    ragged: Any = {name: "list" for name in cells if name in LISTS}
    read = Pipeline.parquet(str(tmp_path / "t.parquet"), memory=rng.choice([1, 300, 1 << 20]))
    block: Any = {"block": 1, "window": 2, "lanes": 2} if shuffle == "block" else {}
    pipeline = read.shuffle(shuffle, seed=2, **block).read().batch(7, ragged=ragged)
    for overrides in EXECUTORS.values():
        found = rows_of(pipeline, **overrides)
        assert len(found) == 60
        for key, row in found.items():
            assert all(same(row[name], values[int(key.rpartition("/")[2])]) for name, values in cells.items())


def test_in_order_all_is_read_once_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": np.random.default_rng(0).random(200_000), "y": np.arange(200_000)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=100_000, use_dictionary=False, compression="none", data_page_size=9000)
    data = sink.getvalue().to_pybytes()
    store = Counting({"t.parquet": data})
    pipeline = Pipeline.parquet("memory:///t.parquet", memory=500_000).shuffle("none").read().batch(1000)
    bound(monkeypatch, 1_000_000, 200_000, buffer_bytes=20_000)
    args = source.ParquetArgs(url="memory:///t.parquet")
    sizes = source.ParquetSource(store, args, partial(load_footer, store, cache_dir=None)).group_bytes
    assert sizes.max() <= 200_000
    assert sizes.sum() == pytest.approx(len(data), rel=0.01)
    with loaderkit.build(pipeline, connectors={"memory": store}, overrides=EXECUTORS["threads"]) as loader:
        store.num_read = store.most_read = 0
        kept = [batch["y"] for batch in loader]
    assert torch.equal(torch.cat(kept), torch.arange(200_000))
    assert store.num_read < 1.1 * len(data)
    assert store.most_read <= 64 << 10


def test_a_state_is_of_the_same_data_however_it_is_sliced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": np.arange(900)}), tmp_path / "t.parquet", row_group_size=300)
    pipeline = Pipeline.parquet(str(tmp_path / "t.parquet")).shuffle(seed=1).read().batch(10)
    with loaderkit.build(pipeline) as loader:
        expected = [batch["x"].tolist() for batch in loader]
    with loaderkit.build(pipeline) as loader:
        next(iter(loader))
        state = loader.state_dict()
    bound(monkeypatch, 1000, 800)
    with loaderkit.build(pipeline) as loader:
        loader.load_state_dict(state)
        assert [batch["x"].tolist() for batch in loader] == expected[1:]
    limited = Pipeline.parquet(str(tmp_path / "t.parquet"), limit=350).shuffle("none").read().batch(50)
    assert [int(row["x"]) for row in rows_of(limited).values()] == list(range(350))


def test_damage_in_a_slice_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 40, 5000)})
    path = tmp_path / "t.parquet"
    pq.write_table(table, path, use_dictionary=False, compression="none", data_page_size=800, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    bound(monkeypatch, 1000, 4000, 500)
    pipeline = Pipeline.parquet(str(path)).shuffle("none").read()
    with pytest.raises(StageError, match=r"t\.parquet: row group 0 cannot be decoded"):
        rows_of(pipeline.batch(100))
    found = rows_of(pipeline.batch(5000).errors(on_bad_sample="skip", max_bad_samples=5000), **EXECUTORS["inline"])
    assert 1500 < len(found) < 2600
    assert [int(row["x"]) for row in found.values()] == table["x"].to_pylist()[: len(found)]


class TestSlicedGroups:
    @pytest.fixture(name="begun")
    def _begun(self) -> list[int]:
        return []

    @pytest.fixture(name="begin")
    def _begin(self, begun: list[int]) -> Callable[..., Iterator[list[Any]]]:
        def begin(note: Callable[[int], None]) -> Iterator[list[Any]]:
            begun.append(0)
            for number in range(6):
                note(10)
                yield [number]

        return begin

    def test_in_order_and_of_two_workers(self, begin: Any, begun: list[int]) -> None:
        """Of two neighbours the later one may be asked for first."""
        groups: Any = SlicedGroups()
        order = [0, 2, 1, 3, 5, 4]
        assert [groups.take("a", number, begin) for number in order] == [
            ([0], 10), ([2], 20), ([1], 0), ([3], 10), ([5], 20), ([4], 0)
        ]  # fmt: skip
        assert len(begun) == 1
        assert groups.take("a", 4, begin) == ([4], 50)
        assert len(begun) == 2

    def test_drawn(self, rng: random.Random, begin: Any) -> None:
        groups: Any = SlicedGroups()
        for _ in range(200):
            number = rng.randrange(6)
            assert groups.take(rng.choice("abc"), number, begin)[0] == [number]

    def test_one_that_fails_begins_anew(self) -> None:
        failures = [ConnectorError("gone"), None]

        def begin(note: Callable[[int], None]) -> Iterator[list[Any]]:
            yield [0]
            error = failures.pop(0)
            if error is not None:
                raise error
            yield [1]

        groups: Any = SlicedGroups()
        assert groups.take("a", 0, begin) == ([0], 0)
        with pytest.raises(ConnectorError):
            groups.take("a", 1, begin)
        assert groups.take("a", 1, begin) == ([1], 0)


@pytest.mark.prove
def test_more_than_two_gibibytes_in_a_row_group(tmp_path: Path) -> None:
    """Of texts in lists, which pyarrow does not decode at once, and of bytes."""
    num_rows, text = 2400, "x" * (1 << 20)
    hundred = pa.array([["a", text]] * 100, pa.list_(pa.string()))  # chunks of one column that share memory
    table = pa.table({"texts": pa.chunked_array([hundred] * 24), "number": np.arange(num_rows)})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=num_rows, compression="zstd", use_dictionary=False)
    del table, hundred
    assert pq.read_metadata(tmp_path / "t.parquet").num_row_groups == 1
    pa.default_memory_pool().release_unused()
    pipeline = Pipeline.parquet(str(tmp_path / "t.parquet"), memory="600MiB").shuffle("none").read().batch(20)
    before = peak_bytes("VmRSS")
    forget_peak()
    seen: list[int] = []
    with loaderkit.build(pipeline, overrides=EXECUTORS["inline"]) as loader:
        for batch in loader:
            assert all(texts == ["a", text] for texts in batch["texts"])
            seen += batch["number"].tolist()
    assert seen == list(range(num_rows))
    assert peak_bytes("VmHWM") - before < 2 << 30
