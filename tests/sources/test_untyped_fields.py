"""Data without types (JSON, Python objects, TFRecords): what a field is does not depend on which sample comes first."""

from __future__ import annotations

import json
import random
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tf_records import example, record

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import FormatError, StageError
from loaderkit.sources.typed_fields import DTYPES, FieldOrigin

NUM = 24
INLINE = {"prefetch.executor": "inline"}


def lines(folder: Path, rows: list[Any], fields: dict[str, str] | None = None) -> Pipeline:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Pipeline.lines(str(path), fields=fields)


def dataset(folder: Path, rows: list[Any], fields: dict[str, str] | None = None) -> Pipeline:
    return Pipeline.dataset(rows, fields=fields)


def batches_of(made: Pipeline, size: int = 5, **overrides: Any) -> list[dict[str, Any]]:
    ready = made.shuffle(False).read().batch(size, ragged=overrides.pop("ragged", {}))
    with loaderkit.build(ready, overrides=INLINE | overrides) as loader:
        return list(loader)


def column(batches: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


@pytest.mark.parametrize("source", [lines, dataset])
def test_whole_numbers_beside_others_are_floats_in_every_batch(source: Any, tmp_path: Path, rng: random.Random) -> None:
    values: list[Any] = [rng.randrange(-9, 9) for _ in range(NUM)]
    values[rng.randrange(NUM)] = rng.random()
    lists: list[list[float]] = [[rng.randrange(9), rng.randrange(9)] for _ in range(NUM)]
    lists[rng.randrange(NUM)][0] = rng.random()
    rows = [{"x": value, "of_lists": items} for value, items in zip(values, lists, strict=True)]
    batches = batches_of(source(tmp_path, rows), ragged={"of_lists": "pad"})
    assert {batch["x"].dtype for batch in batches} == {batch["of_lists"].dtype for batch in batches} == {torch.float64}
    assert column(batches, "x") == values
    assert column(batches, "of_lists") == lists


def test_a_whole_number_that_float64_does_not_hold_is_refused(tmp_path: Path, rng: random.Random) -> None:
    values: list[Any] = [0.5, *(rng.randrange(9) for _ in range(6)), 2**53 + 1]
    rng.shuffle(values)
    with pytest.raises(StageError, match="float64 does not hold exactly"):
        batches_of(lines(tmp_path, [{"x": value} for value in values]))


@pytest.mark.parametrize("source", [lines, dataset])
@pytest.mark.parametrize("odd", [None, "text", "absent"])
def test_an_odd_sample_is_the_bad_one_wherever_it_stands(
    odd: str | None, source: Any, tmp_path: Path, rng: random.Random
) -> None:
    for place in (0, rng.randrange(1, NUM)):
        rows: list[dict[str, Any]] = [{"id": n, "x": n / 2} for n in range(NUM)]
        if odd == "absent":
            del rows[place]["x"]
        else:
            rows[place]["x"] = odd
        skips: dict[str, Any] = {"errors.on_bad_sample": "skip"}
        batches = batches_of(source(tmp_path, rows), **skips)
        assert column(batches, "x") == [n / 2 for n in range(NUM) if n != place]
        with pytest.raises(StageError) as caught:
            batches_of(source(tmp_path, rows))
        assert caught.value.key in (str(place), f"rows.jsonl:{place + 1}")


def test_what_stands_behind_only_nones_is_no_silent_list(tmp_path: Path) -> None:
    rows = [{"x": None if n < 500 else "text"} for n in range(501)]
    assert batches_of(lines(tmp_path, rows))[-1]["x"][-1] == "text"
    with pytest.raises(StageError, match=r"None in every sample.*fields: \{x: float64\}"):
        batches_of(lines(tmp_path, [{"x": None if n < 3000 else 7} for n in range(3001)]))


@pytest.mark.parametrize("source", [lines, dataset])
def test_a_declared_type_is_that_of_every_batch(source: Any, tmp_path: Path, rng: random.Random) -> None:
    rows = [{"x": rng.choice([n, n / 4]), "m": {"y": n}, "z": 0} for n in range(NUM)]
    batches = batches_of(source(tmp_path, rows, {"x": "float32", "label": "m.y", "small": "m.y int16"}))
    assert {name for batch in batches for name in batch} == {"x", "label", "small", "__key__"}
    assert [batches[0][name].dtype for name in ("x", "label", "small")] == [torch.float32, torch.int64, torch.int16]
    assert column(batches, "x") == [row["x"] for row in rows]
    assert column(batches, "label") == column(batches, "small") == [*range(NUM)]


def test_what_a_declared_type_cannot_hold_is_refused(rng: random.Random) -> None:
    for dtype in DTYPES:
        origin = FieldOrigin.parse("x", f"a.b {dtype}")
        assert (origin.field, origin.key, origin.dtype) == ("x", "a.b", dtype)
        bad: Any
        for bad in ("1", None, [1, [2]], {}):
            with pytest.raises(FormatError, match="declares 'x'"):
                origin.typed(bad)
        if np.dtype(dtype).kind in "iu":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            for number in (low - 1, high + 1, 0.5, float("nan")):
                with pytest.raises(FormatError):
                    origin.typed(number)
            held = rng.randint(int(low), int(high))
            assert origin.typed([held]).tolist() == [held]
    assert FieldOrigin.parse("x", "float32") == ("x", "x", "float32")
    assert FieldOrigin.parse("x", "a key") == ("x", "a key", None)


def test_a_list_that_a_record_lacks_is_empty(tmp_path: Path, rng: random.Random) -> None:
    boxes = [[rng.random() for _ in range(rng.choice([0, 0, 1, 3]))] for _ in range(NUM)]
    boxes[rng.randrange(NUM)] = [0.5, 1.5]
    records = []
    for number, box in enumerate(boxes):
        records.append(record(example({"id": [number]} | ({"box": box} if box else {}))))
    (tmp_path / "a.tfrecord").write_bytes(b"".join(records))
    for origin in ("box[]", "box[] float32"):
        made = Pipeline.tfrecord(str(tmp_path / "a.tfrecord"), fields={"id": "id", "box": origin})
        batches = batches_of(made, ragged={"box": "list"})
        found = [box for batch in batches for box in batch["box"]]
        assert {box.dtype for box in found} == {torch.float32}
        assert [box.tolist() for box in found] == [np.array(box, np.float32).tolist() for box in boxes]


def test_items_that_collate_takes(rng: random.Random) -> None:
    """Mappings that are no dict, a list in the place of a tuple, lists of numbers where `ragged` names them."""
    numbers = [[rng.randrange(9) for _ in range(rng.randint(0, 4))] for _ in range(NUM)]
    numbers[rng.randrange(NUM)] = [1, 2, 3, 4, 5]
    pictures = torch.rand(NUM, 3)
    items = [UserDict(ids=ids, picture=picture) for ids, picture in zip(numbers, pictures, strict=True)]
    (batch,) = batches_of(Pipeline.dataset(items), NUM, ragged={"ids": "pad"})
    assert batch["ids"].dtype == torch.int64
    assert [ids[:size] for ids, size in zip(batch["ids"].tolist(), batch["ids_sizes"].tolist(), strict=True)] == numbers
    assert torch.equal(batch["picture"], pictures)
    for fields in (None, ["0", "1"]):
        pairs = Pipeline.dataset([[picture, n] for n, picture in enumerate(pictures)], fields=fields)
        (batch,) = batches_of(pairs, NUM)
        assert torch.equal(batch["0"], pictures)
        assert batch["1"].tolist() == [*range(NUM)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_declared_float_is_never_infinite_unless_the_number_is(dtype: str, rng: random.Random) -> None:
    most = float(np.finfo(dtype).max)
    origin = FieldOrigin.parse("x", dtype)
    values = [rng.uniform(-1, 1) * most for _ in range(9)] + [most, -most, float("inf")]
    rng.shuffle(values)
    assert origin.of({"x": values}).tolist() == np.array(values).astype(dtype).tolist()
    if dtype != "float64":
        values[rng.randrange(len(values))] = rng.choice([-1, 1]) * most * rng.uniform(1.01, 9)
        with pytest.raises(FormatError, match=f"a number that {dtype}.* cannot hold"):
            origin.of({"x": values})


def test_a_declared_type_of_a_bfloat16_tensor(rng: random.Random) -> None:
    value = torch.tensor([rng.randrange(99) / 8 for _ in range(5)]).bfloat16()
    assert torch.equal(FieldOrigin.parse("x", "float32").of({"x": value}), value.float())
