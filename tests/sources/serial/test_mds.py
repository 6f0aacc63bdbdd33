"""`kind: mds` over shards written from the format's description."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buckets import upload
from mds_shards import VALUES, mds_files, write_mds
from mutate import mutations
from seaweed import Seaweed

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, LoaderkitError, StageError

INLINE = {"prefetch.executor": "inline"}
RAGGED: Any = {"ndarray": "list", "ndarray:float32": "list"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def drawn(rng: random.Random, num: int, names: list[str] | None = None) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Columns named after their encodings, and samples."""
    names = names or rng.sample(sorted(VALUES), 4)
    return {name: name for name in names}, [{name: VALUES[name](rng) for name in names} for _ in range(num)]


def build(files: dict[str, bytes], overrides: dict[str, Any] | None = None, **source: Any) -> loaderkit.Loader:
    names = json.loads(files["index.json"])["shards"][0]["column_names"] if not source else []
    ragged = {name: form for name, form in RAGGED.items() if name in names}
    pipeline = Pipeline.mds("memory://", **source).shuffle(False).read().batch(5, ragged=ragged)
    return loaderkit.build(
        pipeline, connectors={"memory": MemoryConnector(files)}, overrides={**INLINE, **(overrides or {})}
    )


def same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        return value.shape == wanted.shape and bool(np.array_equal(value.numpy(), wanted))
    return bool(value.item() == wanted if isinstance(value, torch.Tensor) else value == wanted)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("names", [None, *([name] for name in VALUES)])
def test_samples_are_those_that_were_written(names: list[str] | None, rng: random.Random) -> None:
    columns, samples = drawn(rng, 23, names)
    with build(mds_files(columns, samples, rng.randint(1, 23))) as loader:
        found = [
            {name: batch[name][place] for name in columns} for batch in loader for place in range(len(batch["__key__"]))
        ]
    assert len(found) == 23
    for sample, wanted in zip(found, samples, strict=True):
        assert all(same(sample[name], wanted[name]) for name in columns), wanted


def test_a_bucket_and_splits_and_fields(seaweed: Seaweed, s3_keys: None, rng: random.Random, tmp_path: Path) -> None:
    columns, samples = drawn(rng, 20, ["int", "str"])
    write_mds(tmp_path / "data/train", columns, samples, 7)
    upload(seaweed, tmp_path / "data", "mds")
    where: list[dict[str, Any]] = [
        {"url": str(tmp_path / "data")},
        {"url": "s3://mds", "s3": {"endpoint": seaweed.endpoint}},
    ]
    for source in where:
        pipeline = Pipeline.mds(**source, split="train", fields={"y": "int int64", "text": "str"})
        with loaderkit.build(pipeline.shuffle(seed=1).read().batch(4)) as loader:
            found = {
                key: (y, text)
                for batch in loader
                for key, y, text in zip(batch["__key__"], batch["y"].tolist(), batch["text"], strict=True)
            }
        assert found == {
            f"shard.{number // 7:05}.mds:{number % 7}": (sample["int"], sample["str"])
            for number, sample in enumerate(samples)
        }
    with pytest.raises(ConfigError, match="has no column 'z', only int, str"):
        loaderkit.build(Pipeline.mds(str(tmp_path / "data/train"), fields={"a": "z"}).read().batch(1))


def changed(files: dict[str, bytes], **shard: Any) -> dict[str, bytes]:
    index = json.loads(files["index.json"])
    index["shards"][-1] |= shard
    return {**files, "index.json": json.dumps(index).encode()}


def test_what_is_not_read_is_named(rng: random.Random) -> None:
    files = mds_files(*drawn(rng, 20, ["int", "str"]), 10)
    pickled = json.dumps(json.loads(files["index.json"])).replace('["int", "str"]', '["pkl", "str"]', 1).encode()
    one = mds_files(*drawn(rng, 3, ["bytes"]), 3)
    name, size = "shard.00001.mds", len(files["shard.00001.mds"])
    for damaged, said in (
        (changed(one, column_encodings=["pkl"]), "the encoding 'pkl', which runs code when it is read"),
        (changed(one, column_encodings=["other"]), "the encoding 'other', which is not known"),
        (changed(one, column_encodings=["jpeg:best"]), "the encoding 'jpeg:best', which is not known"),
        ({**files, "index.json": pickled}, "has other columns than the first one|runs code"),
        (changed(files, zip_data={"basename": "x.zstd"}), r"shard\.00001\.mds' is compressed"),
        (changed(files, version=1), "is no MDS of version 2"),
        (changed(files, samples="many"), r"is damaged: what it says of the shard 'shard\.00001\.mds'"),
        (changed(files, samples=9), r"shard\.00001\.mds has 10 samples, and index\.json says 9"),
        (changed(files, raw_data={"basename": "../etc/x", "bytes": 3}), r"there is no memory://\.\./etc/x"),
        (changed(files, raw_data=None), "is damaged: what it says of the shard None"),
        (changed(files, column_names=["a", "a"]), "is damaged"),
        ({**files, name: files[name][:-1]}, rf"has {size - 1} bytes, and index\.json says {size}: it is truncated"),
        ({**files, name: b"\xff\xff\xff\xff" + files[name][4:]}, "too few for the header of 4294967295 samples"),
        ({**files, name: files[name][:8] + bytes(4) + files[name][12:]}, "do not lie one behind another"),
        ({**files, "index.json": b"{"}, r"index\.json is no JSON"),
        ({**files, "index.json": b'{"shards": []}'}, "has no list of `shards`"),
    ):
        with pytest.raises(LoaderkitError, match=said):
            build(damaged, fields={"x": "bytes"} if b'"bytes"]' in damaged["index.json"] else {"x": "int"})


def test_damaged_shards_are_left_out(rng: random.Random) -> None:
    files = mds_files(*drawn(rng, 20, ["int"]), 5)
    damaged = {**files, "shard.00001.mds": files["shard.00001.mds"][:-3]}
    del damaged["shard.00003.mds"]
    with build(damaged, {"errors.on_bad_shard": "skip", "errors.max_bad_shards": 2}) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
    assert keys == [f"shard.{shard:05}.mds:{number}" for shard in (0, 2) for number in range(5)]


def test_a_damaged_sample_is_a_bad_one(rng: random.Random) -> None:
    files = mds_files(*drawn(rng, 10, ["str"]), 10)
    data = bytearray(files["shard.00000.mds"])
    place = int.from_bytes(data[4 + 4 * 3 : 8 + 4 * 3], "little")
    data[place : place + 4] = b"\xff\xff\xff\x7f"
    files["shard.00000.mds"] = bytes(data)
    with build(files) as loader, pytest.raises(StageError, match=r"mds:3.*its column 'str' ends behind it"):
        list(loader)
    with build(files, {"errors.on_bad_sample": "skip"}) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 9


@pytest.mark.matrix(2)
@pytest.mark.parametrize("number", range(10))
def test_any_damage_of_shards_is_an_error_of_ours_or_none(rng: random.Random, number: int) -> None:
    columns, samples = drawn(rng, 20)
    files = mds_files(columns, samples, 20)
    numbers = np.random.default_rng(rng.randrange(2**32))
    for _ in range(50):
        name = rng.choice(["index.json", "shard.00000.mds"])
        damaged = {**files, name: mutations(files[name], numbers)}
        if name != "index.json":  # else its size would tell
            damaged = changed(damaged, raw_data={"basename": name, "bytes": len(damaged[name])})
        try:
            ragged = {name: form for name, form in RAGGED.items() if name in columns}
            pipeline = Pipeline.mds("memory://").shuffle(False).read().batch(5, ragged=ragged)
            with loaderkit.build(
                pipeline,
                connectors={"memory": MemoryConnector(damaged)},
                overrides={**INLINE, "errors.on_bad_sample": "skip"},
            ) as loader:
                for batch in loader:
                    assert batch["__key__"]
        except LoaderkitError as error:
            assert str(error)  # noqa: PT017 - any of many errors
