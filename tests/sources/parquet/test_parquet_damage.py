"""Damaged Parquet files: named and refused, or bad samples; a good one beside them stays good."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from mutate import mutations
from parquet_tables import drawn_table, written

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError, LoaderkitError, StageError

INLINE = {"prefetch.executor": "inline"}


def build(data: bytes, overrides: Any = None) -> loaderkit.Loader:
    objects = {"f.parquet": data}
    pipeline = Pipeline.parquet("memory://").shuffle("none").read().batch(7)
    return loaderkit.build(
        pipeline, connectors={"memory": MemoryConnector(objects)}, overrides={**INLINE, **(overrides or {})}
    )


def test_what_is_no_whole_file(rng: random.Random) -> None:
    data = written(pa.table({"x": range(30)}), rng)
    for part, message in (
        (b"", "has 0 bytes, too few"),
        (data[:-1], "does not end as a Parquet file does"),
        (data[: len(data) // 2], "does not end as a Parquet file does"),
        (data[:-4] + b"PARE", "an encrypted footer"),
        (data[:-8] + b"\xff\xff\xff\x7fPAR1", "its footer is to have 2147483655: it is damaged"),
        (data[:4] + data[-200:], "damaged"),
    ):
        with pytest.raises(FormatError, match=rf"f\.parquet.*{message}"):
            build(part)


def test_a_damaged_row_group_costs_its_rows(rng: random.Random) -> None:
    """With checksums of pages every flipped byte is found."""
    numbers = np.random.default_rng(rng.randrange(2**32)).integers(0, 1 << 60, 30)
    table = pa.table({"x": numbers})
    settings = {"compression": "none", "use_dictionary": False, "row_group_size": 10, "write_page_checksum": True}
    data = bytearray(written(table, rng, **settings, data_page_version="1.0", data_page_size=1 << 20))
    middle = sorted(numbers[10:20].tolist())[5]  # the least and the greatest stand in statistics, too
    place = bytes(data).index(middle.to_bytes(8, "little"))
    data[place + 3] ^= 16
    with (
        build(bytes(data)) as loader,
        pytest.raises(StageError, match=r"'f.parquet/10'.*row group 1 cannot be decoded") as caught,
    ):
        list(loader)
    assert isinstance(caught.value.__cause__, FormatError)
    with build(bytes(data), {"errors.on_bad_sample": "skip"}) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
        assert keys == [f"f.parquet/{n}" for n in (*range(10), *range(20, 30))]
        assert loader.stats().stages[0].num_failed == 10


@pytest.mark.matrix(3)
@pytest.mark.parametrize("number", range(6))
def test_any_damage_is_an_error_of_ours_or_none(rng: random.Random, number: int) -> None:
    """What is read as if nothing were has as many rows as its footer says."""
    data = written(drawn_table(rng, 30), rng)
    numbers = np.random.default_rng(zlib.crc32(rng.randbytes(8)))
    outcomes = {"read": 0, "refused": 0}
    for _ in range(60):
        end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        of_rows, footer = data[:end], data[end:-8]
        if rng.random() < 0.5:
            of_rows = mutations(of_rows, numbers)
        else:
            footer = mutations(footer, numbers)
        damaged = of_rows + footer + data[-8:]
        try:
            with build(damaged, {"errors.on_bad_sample": "skip"}) as loader:
                for batch in loader:
                    assert batch["__key__"]
            outcomes["read"] += 1
        except LoaderkitError as error:
            assert "f.parquet" in str(error) or "batch" in str(error), error  # noqa: PT017 - any of many errors
            outcomes["refused"] += 1
    assert outcomes["refused"] > 5, outcomes
