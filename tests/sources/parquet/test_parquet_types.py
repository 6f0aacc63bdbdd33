"""What `kind: parquet` makes of times, decimals and the names of folders: numbers that lose nothing, or a bad sample."""

from __future__ import annotations

import io
import random
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from parquet_tables import written

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import SourceError, StageError
from loaderkit.sources.arrow.convert import column_of
from loaderkit.sources.arrow.decimals import decimal_numbers, number_of
from loaderkit.sources.arrow.types import column_type


def build(objects: dict[str, bytes], batch: dict[str, Any] | None = None, **source: Any) -> loaderkit.Loader:
    overrides = {"prefetch.executor": "inline", "errors.on_bad_sample": source.pop("on_bad_sample", "raise")}
    pipeline = Pipeline.parquet("memory://", **source).shuffle(False).read().batch(100, **(batch or {}))
    return loaderkit.build(pipeline, connectors={"memory": MemoryConnector(objects)}, overrides=overrides)


@pytest.mark.parametrize(("kind", "said"), [
    (pa.timestamp("us"), "timestamp [us]"), (pa.timestamp("us", "UTC"), "timestamp [us, UTC]"), (pa.date32(), "date [day]"),
    (pa.time32("ms"), "time [ms]"), (pa.duration("ns"), "duration [ns]"),
])  # fmt: skip
def test_times_are_int64_and_their_unit_is_the_same_in_all_files(kind: Any, said: str, rng: random.Random) -> None:
    narrow = pa.array([5, -1], pa.int32() if kind.bit_width == 32 else pa.int64())
    files = {"a.parquet": written(pa.table({"x": narrow.cast(kind)}), rng)}
    with build(files) as loader:
        batch = next(iter(loader))
    assert torch.equal(batch["x"], torch.tensor([5, -1]))
    assert batch["x"].dtype is torch.int64
    files["b.parquet"] = written(pa.table({"x": pa.array([5], pa.timestamp("ms"))}), rng)
    with pytest.raises(SourceError) as caught:
        build(files)
    assert f"int64 [] of {said} in a.parquet" in str(caught.value).replace("memory://", "")


def test_times_of_spark_do_not_overflow() -> None:
    """As pyarrow's own nanoseconds do, without a word, from the year 2262 on."""
    micros = [253_370_764_800_000_000, -(10**15), 0]
    for kind in ("us", "ns"):
        file = io.BytesIO()
        fits = micros if kind == "us" else micros[1:]
        column = pa.array(fits, pa.timestamp("us")).cast(pa.timestamp(kind))
        pq.write_table(pa.table({"x": column}), file, use_deprecated_int96_timestamps=True)
        with build({"x.parquet": file.getvalue()}) as loader:
            assert next(iter(loader))["x"].tolist() == fits


def test_times_of_spark_in_lists_and_structs() -> None:
    far = 253_370_764_800_000_000  # the year 9999, in microseconds
    column = pa.array([[far], [-(10**15), 0]], pa.list_(pa.timestamp("us")))
    pairs = pa.StructArray.from_arrays([column, pa.array(["a", "b"])], ["at", "word"])
    file = io.BytesIO()
    table = pa.table({"lists": column, "pairs": pairs, "x": [1, 2]})
    pq.write_table(table, file, use_deprecated_int96_timestamps=True)
    with build({"x.parquet": file.getvalue()}, {"ragged": {"lists": "list"}}) as loader:
        (batch,) = loader
    assert [one.tolist() for one in batch["lists"]] == [[far], [-(10**15), 0]]
    assert batch["pairs"] == [{"at": [far], "word": "a"}, {"at": [-(10**15), 0], "word": "b"}]
    assert batch["x"].tolist() == [1, 2]


def test_a_decimal_that_float64_cannot_hold_is_a_bad_sample(rng: random.Random) -> None:
    texts = ["1.50", "123456789012345.67", None, "-0.07"]
    column = pa.array([None if text is None else Decimal(text) for text in texts], pa.decimal128(38, 2))
    files = {"f.parquet": written(pa.table({"x": column, "n": range(4)}), rng, row_group_size=9)}
    with build(files) as loader, pytest.raises(StageError, match=r"more than the 15 digits that float64 holds"):
        list(loader)
    with build(files, on_bad_sample="skip") as loader:
        (batch,) = loader
    assert batch["x"].tolist() == [1.5, -0.07]
    assert batch["n"].tolist() == [0, 3]


def test_decimals_are_those_of_python(rng: random.Random) -> None:
    """The nearest float64 of up to 15 digits, from which these can be read again; no number for any other."""
    for _ in range(200):
        num_words, scale = rng.choice([1, 2, 4]), rng.choice([0, 1, 9, 22, 30, 76, -3])
        words = np.frombuffer(rng.randbytes(8 * num_words * 5), "i8").reshape(5, num_words).copy()
        words[::2, 1:] = np.where(words[::2, :1] < 0, -1, 0)
        words[0] //= 10 ** rng.randint(2, 8) if num_words == 1 else 1
        numbers, is_held = decimal_numbers(words, scale)
        for row in range(5):
            whole = int.from_bytes(words[row].tobytes(), "little", signed=True)
            exact = Decimal(f"{whole}E{-scale}")
            held = is_held is None or bool(is_held[row])
            if scale > 0:
                assert held == (len(str(abs(whole)).strip("0")) <= 15)
                if held:
                    assert numbers[row] == float(exact)
                    assert Decimal(f"{numbers[row]:.14e}") == exact
            else:
                assert held == (-(2**63) <= exact < 2**63)
                assert not held or numbers[row] == int(exact)
    assert number_of(Decimal("Infinity"), is_whole=False) is None


def test_a_scale_of_damage_costs_no_memory() -> None:
    _, is_held = decimal_numbers(np.array([[1]]), -(2**31))
    assert is_held is not None
    assert not is_held.any()


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, partial(pa.list_, list_size=2)])
def test_texts_and_bytes_of_views_inside_lists_and_structs(make: Any) -> None:
    """Of which pyarrow takes no rows."""
    kind = pa.struct([("words", make(pa.string_view())), ("data", pa.binary_view())])
    rows = [
        {"words": ["a", "longer than a view has"], "data": None},
        {"words": ["b", None], "data": b"longer than a view"},
    ]
    column = column_of(pa, column_type(pa, kind), pa.array([*rows, None], kind))
    values, bad = column.take(np.array([2, 1, 0]))
    assert [*values] == [None, rows[1], rows[0]]
    assert bad == {0: "is null"}


def test_folders_name_columns(tmp_path: Path, rng: random.Random) -> None:
    """As pyarrow reads them: texts, whole numbers, escaped signs; a null is a bad sample."""
    rows: list[dict[str, Any]] = [
        {"year": rng.choice([2023, 2024]), "place": rng.choice(["de", "a b/c", "ü=1"]), "x": number}
        for number in range(40)
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_to_dataset(table, str(tmp_path), partition_cols=["year", "place"])
    wanted = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table().to_pylist()
    pipeline = Pipeline.parquet(str(tmp_path), include="**/*.parquet").shuffle(seed=2).read().batch(7)
    with loaderkit.build(pipeline) as loader:
        found: list[dict[str, Any]] = [
            {"x": x, "year": year, "place": place}
            for batch in loader
            for x, year, place in zip(batch["x"].tolist(), batch["year"].tolist(), batch["place"], strict=True)
        ]
    assert sorted(found, key=lambda row: row["x"]) == sorted(wanted, key=lambda row: row["x"])
    chosen = pipeline.config.to_dict()
    chosen["source"] |= {"fields": {"when": "year"}, "columns": ["year"]}
    with loaderkit.build(chosen) as loader:
        assert sorted(year for batch in loader for year in batch["when"].tolist()) == sorted(
            row["year"] for row in rows
        )


def test_folders_that_name_other_columns(rng: random.Random) -> None:
    data = written(pa.table({"x": [1]}), rng)
    with pytest.raises(SourceError, match=r"name the columns b, and those of 'a=1/f\.parquet' a"):
        build({"a=1/f.parquet": data, "b=1/f.parquet": data}, include="**/*.parquet")
    files = {"a=__HIVE_DEFAULT_PARTITION__/f.parquet": data, "a=7/f.parquet": data}
    with build(files, include="**/*.parquet", on_bad_sample="skip") as loader:
        assert [batch["a"].tolist() for batch in loader] == [[7]]
    with build({"x=5/f.parquet": data}, include="**/*.parquet") as loader:
        assert next(iter(loader))["x"].tolist() == [1], "the file's own column is what it says"
