"""`kind: parquet` through whole pipelines: pictures, executors, mixtures, resuming, packing, bounds."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from buckets import epoch_of, upload
from conftest import CLASSES
from seaweed import Seaweed

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError
from loaderkit.sources.arrow.row_groups import RowGroup
from loaderkit.sources.held_groups import HeldGroups

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"prefetch.executor": "inline"},
    "threads": {"prefetch.concurrency": 3},
    "processes": {"prefetch.executor": "process", "prefetch.processes": 2},
}


class Remote(MemoryConnector):
    traits = ConnectorTraits(is_remote=True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """The photographs as Hugging Face stores them, in two files of row groups of 8, with their classes and bare bytes."""
    folder = tmp_path_factory.mktemp("parquet")
    paths = sorted(photos.rglob("*.jpg"))
    for number in range(2):
        some = paths[number::2]
        data = [path.read_bytes() for path in some]
        images = [{"bytes": one, "path": path.name} for one, path in zip(data, some, strict=True)]
        labels = [CLASSES.index(path.parent.name) for path in some]
        table = pa.table({"image": images, "bare": data, "label": labels, "name": [path.name for path in some]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=8)
    return folder


def train(source: Pipeline) -> Pipeline:
    return source.read().decode().random_resized_crop(32).random_horizontal_flip().batch(8)


def batches(pipeline: Pipeline, **overrides: Any) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        return [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in b.items()}
            for b in loader
        ]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    def equal(value: Any, wanted: Any) -> bool:
        return bool(torch.equal(value, wanted)) if isinstance(value, torch.Tensor) else bool(value == wanted)

    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a) for a, b in zip(one, other, strict=True)
    )


def test_pictures_are_those_of_the_files(pictures: Path, photos: Path) -> None:
    from_parquet = Pipeline.parquet(str(pictures)).shuffle("none").read().decode().resize(24).center_crop(24).batch(60)
    (batch,) = batches(from_parquet)
    by_name = {name: place for place, name in enumerate(batch["name"])}
    (wanted,) = batches(
        Pipeline.files(str(photos), label="parent").shuffle("none").read().decode().resize(24).center_crop(24).batch(60)
    )
    places = [by_name[Path(key).name] for key in wanted["__key__"]]
    assert torch.equal(batch["image"][places], wanted["image"])
    assert torch.equal(batch["bare"][places], wanted["image"])
    assert torch.equal(batch["label"][places], wanted["label"])


@pytest.mark.parametrize("order", [{}, {"mode": "block", "block": 1, "window": 2, "lanes": 2}])
def test_every_executor_gives_the_same(pictures: Path, order: dict[str, Any]) -> None:
    pipeline = train(Pipeline.parquet(str(pictures), columns=["image", "label"]).shuffle(seed=5, **order))
    expected = batches(pipeline, **EXECUTORS["inline"])
    assert same(batches(pipeline, **EXECUTORS["threads"]), expected)
    if not order:
        assert same(batches(pipeline, **EXECUTORS["processes"]), expected)


def test_a_remote_store_is_read_ahead(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All orders, of which each row group is fetched once; with memory for one row group as often as it is needed again."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path))
    objects = {path.name: path.read_bytes() for path in pictures.iterdir()}
    orders: tuple[Literal["none", "global", "block"], ...] = ("none", "global", "block")
    for order in orders:
        block: dict[str, Any] = {"block": 1, "window": 2, "lanes": 2} if order == "block" else {}
        for memory in ("1GiB", 1):
            source = Pipeline.parquet("memory://", columns=["image", "label"], memory=memory)
            pipeline = train(source.shuffle(order, seed=2, **block))
            remote = Remote(objects)
            with loaderkit.build(pipeline, connectors={"memory": remote}) as loader:
                found = [batch["__key__"] for batch in loader]
                store = loader.stats().store
            with loaderkit.build(pipeline, overrides={"source.url": str(pictures)}) as loader:
                assert found == [batch["__key__"] for batch in loader]
            assert store["num_direct_reads"] <= (2 if memory == "1GiB" else 12), "but for the first sample"
            assert store["ahead_bytes"] > 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]


def test_every_store_gives_the_same(
    pictures: Path, seaweed: Seaweed, s3_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket, the cache of one, and a filesystem of fsspec's."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "footers"))
    upload(seaweed, pictures, "tables", "train/")
    for path in pictures.iterdir():
        fsspec.filesystem("memory").pipe(f"/tables/{path.name}", path.read_bytes())
    source = {"kind": "parquet", "columns": ["image", "label"]}
    expected, _ = epoch_of({**source, "url": str(pictures)})
    bucket = {**source, "url": "s3://tables/train", "s3": {"endpoint": seaweed.endpoint}}
    found, store = epoch_of(bucket)
    assert found == expected
    assert 0 < store["ahead_bytes"] <= sum(path.stat().st_size for path in pictures.iterdir())
    cached = {**bucket, "cache": {"dir": str(tmp_path / "cache")}}
    for _ in range(2):
        assert epoch_of(cached)[0] == expected
    assert epoch_of({**source, "url": "fsspec+memory://tables"})[0] == expected


@pytest.mark.matrix(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resumed_at_another_world_size(pictures: Path, world_size: int, rng: random.Random) -> None:
    pipeline = Pipeline.parquet(str(pictures), columns=["label"]).shuffle(seed=rng.randint(0, 99)).read().batch(2)
    with loaderkit.build(pipeline) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
    with loaderkit.build(pipeline) as loader:
        stream = iter(loader)
        for _ in range(6):
            next(stream)
        state = loader.state_dict()
    found: list[list[str]] = []
    for rank in range(world_size):
        with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
            loader.load_state_dict(state)
            found.append([key for batch in loader for key in batch["__key__"]])
    dealt = [key for step in zip(*found, strict=True) for key in step]
    assert dealt[: len(keys) - 12] == keys[12:]


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["label"] % 2 == 0)


def test_mixed_and_filtered(pictures: Path, photos: Path) -> None:
    sources = [
        {"name": "tables", "kind": "parquet", "url": str(pictures), "columns": ["image", "label"], "weight": 0.5},
        {"name": "files", "kind": "files", "url": str(photos), "label": "parent", "weight": 0.5},
    ]
    stages = [
        "read",
        "decode",
        {"resize": {"size": [16, 16]}},
        {"filter": {"function": is_even}},
        {"batch": {"size": 8}},
    ]
    described = {"sources": sources, "stages": stages, "order": {"seed": 1}}
    with loaderkit.build(described, overrides=EXECUTORS["inline"]) as loader:
        expected = [(batch["__key__"], batch["__source__"].tolist(), batch["label"].tolist()) for batch in loader]
    with loaderkit.build(described, overrides=EXECUTORS["threads"]) as loader:
        assert [
            (batch["__key__"], batch["__source__"].tolist(), batch["label"].tolist()) for batch in loader
        ] == expected
    assert {label for _, _, labels in expected for label in labels} == {0, 2}
    assert {number for _, numbers, _ in expected for number in numbers} == {0, 1}


def test_lists_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their lengths, which are measured."""
    rows = [list(range(1 + n % 7)) for n in range(40)]
    pq.write_table(pa.table({"tokens": rows}), tmp_path / "t.parquet", row_group_size=6)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    pipeline = Pipeline.parquet(str(tmp_path)).shuffle(seed=1).read().pack(length=16, window=40).batch(2)
    (tmp_path / "p.yaml").write_text(pipeline.to_yaml())
    assert main(["index", "--lengths", str(tmp_path / "p.yaml")]) == 0
    with loaderkit.build(pipeline) as loader:
        tokens = [int(batch["input_ids"].sum()) for batch in loader]
    assert sum(tokens) == sum(map(sum, rows))


def test_packed_to_shards(pictures: Path, tmp_path: Path) -> None:
    """Pictures keep their bytes, numbers and texts come back."""
    pipeline = Pipeline.parquet(str(pictures)).shuffle("none").read().decode().resize([8, 8]).batch(60)
    simple = Pipeline.parquet(str(pictures)).shuffle("none").read().decode().batch(1)
    (tmp_path / "s.yaml").write_text(simple.to_yaml())
    assert main(["pack", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "shards")]) == 0
    fields = {"image": "jpg", "label": "cls", "name": "name.txt", "bare": "bare.jpg"}
    shards = (
        Pipeline.tar(str(tmp_path / "shards"), fields=fields).shuffle("none").read().decode().resize([8, 8]).batch(60)
    )
    assert same(batches(shards), batches(pipeline))


def test_no_more_is_held_than_memory_allows() -> None:
    """Ten threads ask for groups of 10 bytes within 35; each is decoded once while it is held, and an error is raised again."""
    lock, now, most = threading.Lock(), [0], [0]
    decoded: list[int] = []

    def read(group: int) -> RowGroup:
        with lock:
            decoded.append(group)
            now[0] += 1
            most[0] = max(most[0], now[0])
        if group == 7:
            with lock:
                now[0] -= 1
            raise FormatError("damaged")
        with lock:
            now[0] -= 1
        return RowGroup({}, 10, 3)

    held = HeldGroups(read, np.full(20, 10), 35)
    errors: list[BaseException] = []

    def ask(seed: int) -> None:
        try:
            for group in random.Random(seed).choices(range(20), k=200):
                if group == 7:
                    with pytest.raises(FormatError):
                        held.get(group)
                else:
                    assert held.get(group)[0].memory_bytes == 10
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert most[0] <= 3
    assert decoded.count(7) == 1
    held.clear()
    decoded.clear()
    for group in (1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 1):
        held.get(group)
    assert decoded == [1, 2, 3, 4, 1], "the least recently used goes first"
