"""Records of one array file from end to end: what `loaderkit.build` delivers is what NumPy has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_arrays import INLINE, TYPES, Plain, assert_delivers, random_array, recorded, same_bits, touch

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import BulkReads
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError, StageError, StateError


@pytest.mark.parametrize("order", ["native", "swapped", "raw"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type(tmp_path: Path, dtype: Any, order: str) -> None:
    array = random_array(dtype, 53, 3)
    if order == "raw":
        array.tofile(tmp_path / "x.bin")
        source = Pipeline.array(tmp_path / "x.bin", dtype=dtype, shape=[3])
    else:
        saved = array.astype(array.dtype.newbyteorder(">")) if order == "swapped" else array
        np.save(tmp_path / "x.npy", saved)
        source = Pipeline.array(tmp_path / "x.npy")
    for pipeline in (source.read().batch(8), source.read().call(touch).batch(8), source.read().decode().batch(8)):
        with loaderkit.build(pipeline, overrides=INLINE) as loader:
            assert sorted(map(int, assert_delivers(loader, lambda i: array[i]))) == list(range(53))


def test_bfloat16(tmp_path: Path) -> None:
    values = torch.randn(50, 2, 3).to(torch.bfloat16)
    values.view(torch.int16).numpy().tofile(tmp_path / "x.bin")
    source = Pipeline.array(tmp_path / "x.bin", dtype="bfloat16", shape=[2, 3], field="weights").shuffle("none")
    for pipeline in (source.read().batch(50), source.read().call(lambda sample: None).batch(50)):
        with loaderkit.build(pipeline) as loader:
            (batch,) = loader
            assert torch.equal(batch["weights"], values)


ORDERS: list[dict[str, Any]] = [
    {"mode": "global", "seed": 3},
    {"mode": "none"},
    {"mode": "block", "block": "300", "window": 3, "lanes": 2},
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order["mode"])
@pytest.mark.parametrize("window", [None, 1, 17])
@pytest.mark.parametrize("executor", ["inline", "thread"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_orders_windows_and_ranks(
    tmp_path: Path, order: dict[str, Any], window: int | None, executor: str, world_size: int
) -> None:
    array = random_array("int16", 500)
    array.tofile(tmp_path / "x.bin")
    source = Pipeline.array(tmp_path / "x.bin", dtype="int16", window=window).shuffle(**order)
    num_samples = 500 if window is None else 500 - window + 1
    seen: list[str] = []
    for rank in range(world_size):
        direct = source.read().batch(16, drop_last=False)
        overrides = {"prefetch.executor": executor}
        with loaderkit.build(direct, rank=rank, world_size=world_size, overrides=overrides) as loader:
            expected = [(batch["__key__"], batch["data"].clone()) for batch in loader]
            seen += [key for keys, _ in expected for key in keys]
            for keys, data in expected:
                rows = [array[int(key)] if window is None else array[int(key) :][:window] for key in keys]
                assert same_bits(data, np.stack(rows))
        longer = source.read().call(touch).batch(16)
        with loaderkit.build(longer, rank=rank, world_size=world_size, overrides=overrides) as loader:
            for (keys, data), batch in zip(expected, loader, strict=True):
                assert batch["__key__"] == keys
                assert torch.equal(batch["data"], data)
    assert set(seen) == set(map(str, range(num_samples)))
    assert len(seen) == -(-num_samples // world_size) * world_size


def test_resuming(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", random_array("float32", 100, 4))
    pipeline = Pipeline.array(tmp_path / "x.npy").shuffle(seed=5).read().batch(8)
    with loaderkit.build(pipeline) as loader:
        stream = iter(loader)
        for _ in range(4):
            next(stream)
        state = loader.state_dict()
        expected = [batch["__key__"] for batch in stream]
    with loaderkit.build(pipeline, overrides=INLINE) as loader:
        loader.load_state_dict(state)
        assert [batch["__key__"] for batch in loader] == expected
    with (
        loaderkit.build(pipeline, overrides={"source.window": 2}) as loader,
        pytest.raises(StateError, match="differs in data"),
    ):
        loader.load_state_dict(state)


def test_yaml_and_defaults(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    text = "source: {kind: array, url: tokens.bin, dtype: uint16, window: 9, limit: 10}\nstages: [read, {batch: {size: 5}}]\n"
    (tmp_path / "p.yaml").write_text(text)
    pipeline = Pipeline.from_yaml(tmp_path / "p.yaml")
    assert Pipeline.from_yaml(_written(tmp_path / "q.yaml", pipeline.to_yaml())) == pipeline.named("q")
    with loaderkit.build(tmp_path / "p.yaml") as loader:
        assert sorted(row[0].item() for batch in loader for row in batch["data"].int()) == list(range(10))


def _written(path: Path, text: str) -> Path:
    path.write_text(text.replace("name: p", "name: q"))
    return path


def test_a_chunk_is_one_call(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", random_array("int32", 640, 4))
    loader, connector = recorded(Pipeline.array(tmp_path / "x.npy").read().batch(64), tmp_path)
    with loader:
        connector.reads.clear()
        assert len(list(loader)) == 10
        # The probe, and the batches in a chunk each: a clock that stands still makes no chunk seem slow.
        assert connector.gathered == [1] + [64] * 10
        assert connector.reads == []


def test_a_large_record_is_not_read_for_its_layout(tmp_path: Path) -> None:
    array = random_array("float32", 4, 200_000)
    np.save(tmp_path / "x.npy", array)
    ragged: Any
    for ragged in ({}, {"data": "list"}):
        pipeline = Pipeline.array(tmp_path / "x.npy").shuffle("none").read().batch(4, ragged=ragged)
        loader, connector = recorded(pipeline, tmp_path)
        with loader:
            connector.gathered.clear()
            (batch,) = loader
            assert all(same_bits(found, wanted) for found, wanted in zip(batch["data"], array, strict=True))
            assert sum(connector.gathered) == 4


def test_memory_is_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", random_array("int32", 16, 1000))
    filled: list[tuple[int, int]] = []
    gather = FileConnector.gather_into

    def noted(self: Any, key: str, starts: Any, length: int, buffer: memoryview, *, etag: str | None = None) -> None:
        filled.append((np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)))
        gather(self, key, starts, length, buffer, etag=etag)

    monkeypatch.setattr(FileConnector, "gather_into", noted)
    with loaderkit.build(Pipeline.array(tmp_path / "x.npy").read().batch(16), overrides=INLINE) as loader:
        (batch,) = loader
        # After the probe, each chunk (one, or several where rows seem slow) goes straight to its place in the batch.
        end = batch["data"].data_ptr()
        for start, size in sorted(filled[1:]):
            assert start == end
            end += size
        assert end == batch["data"].data_ptr() + batch["data"].nbytes


def test_any_connector_will_do(tmp_path: Path) -> None:
    array = random_array("float64", 90, 2)
    np.save(tmp_path / "x.npy", array)
    pipeline = Pipeline.array(tmp_path / "x.npy").read().batch(16)
    memory = {"memory": loaderkit_memory({"x.npy": (tmp_path / "x.npy").read_bytes()})}
    with loaderkit.build(pipeline, connectors={"file": Plain(tmp_path)}) as loader:
        assert len(assert_delivers(loader, lambda i: array[i])) == 90
    with loaderkit.build(pipeline, connectors=memory, overrides={"source.url": "memory://x.npy"}) as loader:
        assert len(assert_delivers(loader, lambda i: array[i])) == 90


def loaderkit_memory(objects: dict[str, bytes]) -> Any:
    from loaderkit.connectors.memory import MemoryConnector

    return MemoryConnector(objects)


def test_what_a_call_keeps_stays(tmp_path: Path) -> None:
    array = random_array("int64", 64, 5)
    np.save(tmp_path / "x.npy", array)
    kept: dict[int, torch.Tensor] = {}

    def keep(sample: dict[str, Any]) -> None:
        kept[int(sample["__key__"])] = sample["data"]
        if int(sample["__key__"]) % 2:
            sample["data"] += 1  # in place, and only here

    with loaderkit.build(Pipeline.array(tmp_path / "x.npy").read().call(keep).batch(8), overrides=INLINE) as loader:
        for batch in loader:
            places = np.array([int(key) for key in batch["__key__"]])
            assert np.array_equal(batch["data"].numpy(), array[places] + places[:, None] % 2)
    assert all(np.array_equal(kept[i], array[i] + i % 2) for i in range(64))


def test_ragged_records(tmp_path: Path) -> None:
    array = random_array("int64", 20, 5)
    np.save(tmp_path / "x.npy", array)
    pipeline = Pipeline.array(tmp_path / "x.npy").shuffle("none").read().batch(8, ragged={"data": "list"})
    with loaderkit.build(pipeline) as loader:
        rows = [row for batch in loader for row in batch["data"]]
    assert np.array_equal(torch.stack(rows), array)


@pytest.mark.parametrize("between", [False, True], ids=["straight", "a call between"])
@pytest.mark.parametrize("saved", ["<i4", ">i4"])
def test_a_file_that_was_cut_costs_the_samples_it_lacks(tmp_path: Path, between: bool, saved: str) -> None:
    array = random_array("int32", 100, 4)
    np.save(tmp_path / "x.npy", array.astype(saved))
    pipeline = Pipeline.array(tmp_path / "x.npy").read()
    pipeline = (pipeline.call(touch) if between else pipeline).batch(10)
    size = (tmp_path / "x.npy").stat().st_size
    times = (tmp_path / "x.npy").stat()

    def cut() -> None:
        """As if the disk had lost the end: size and time are what they were, as far as the connector is told."""
        with open(tmp_path / "x.npy", "r+b") as file:
            file.truncate(size - 16 * 30 - 3)

    class Forgetful(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            super().read_into(key, start, buffer)

        def gather_into(
            self, key: str, starts: Any, length: int, buffer: memoryview, *, etag: str | None = None
        ) -> None:
            super().gather_into(key, starts, length, buffer)

        def bulk(self) -> BulkReads:
            return BulkReads(gather_into=self.gather_into)

    assert times.st_size == size
    for policy in ("skip", "replace", "raise"):
        np.save(tmp_path / "x.npy", array.astype(saved))
        overrides = {**INLINE, "errors.on_bad_sample": policy}
        with loaderkit.build(pipeline, connectors={"file": Forgetful(tmp_path)}, overrides=overrides) as loader:
            cut()
            if policy == "raise":
                with pytest.raises(StageError, match=r"read failed for sample '\d+'.*x.npy ended after"):
                    list(loader)
                continue
            keys = assert_delivers(loader, lambda i: array[i])
            assert max(map(int, keys)) < 69
            assert len(keys) == (69 if policy == "skip" else 100)


def test_a_file_that_was_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 4)))
    with loaderkit.build(Pipeline.array(tmp_path / "x.npy").read().batch(5)) as loader:
        np.save(tmp_path / "x.npy", np.ones((20, 4)))
        with pytest.raises(StageError, match="was changed since it was listed"):
            next(iter(loader))


def test_image_stages_take_records_that_are_images(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", random_array("uint8", 6, 3, 40, 30))
    pipeline = Pipeline.array(tmp_path / "x.npy", field="image").read().random_horizontal_flip().center_crop(24)
    with loaderkit.build(pipeline.batch(3).normalize()) as loader:
        assert next(iter(loader))["image"].shape == (3, 3, 24, 24)
    with (
        pytest.raises((ConfigError, StageError), match="image"),
        loaderkit.build(Pipeline.array(tmp_path / "x.npy").read().batch(3).normalize()) as loader,
    ):
        next(iter(loader))
