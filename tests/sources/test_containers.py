"""`kind: zarr` and `kind: hdf5`: against zarr and h5py themselves, on arrays, chunks and windows drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from buckets import upload
from containers import INLINE, KINDS, Arrays, epochs, source_of, write
from executors import EXECUTORS

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError
from loaderkit.testing import SourceContract


@pytest.fixture
def rng(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(64))


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Of several stores, in any order: each row is what the format's own reader gives."""
    stores: dict[str, Arrays] = {}
    for number in range(2):
        num = int(rng.integers(5, 20))
        image = rng.integers(0, 2**16, (num, 3, 5, 4), np.uint16)
        path = write(kind, tmp_path / f"{number}", {"data/image": image, "data/label": rng.normal(size=num)}, rng)
        stores[path.name] = own_reader(path)
    for order in ({"shuffle": "none"}, {"shuffle": "global"}, {"shuffle": "block", "block": {"block": "1KiB"}}):
        found = epochs(source_of(kind, tmp_path, "rows"), {"batch": {"size": 4}}, order=order)
        keys = [key for batch in found for key in batch["__key__"]]
        assert sorted(keys) == sorted(
            f"{name}/{row}" for name, arrays in stores.items() for row in range(len(arrays["label"]))
        )
        for batch in found:
            for key, image, label in zip(batch["__key__"], batch["image"], batch["label"], strict=True):
                name, row = key.split("/")
                np.testing.assert_array_equal(image, stores[name]["image"][int(row)])
                assert label == stores[name]["label"][int(row)]


def own_reader(path: Path) -> Arrays:
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            return {name: file["data"][name][...] for name in file["data"]}
    group = zarr.open_group(path, mode="r")
    return {name: group[f"data/{name}"][...] for name in ("image", "label")}


CROPS: dict[str, dict[str, Any]] = {
    "anywhere": {"size": [4, 3]},
    "of three dimensions": {"size": [2, 5, 3]},
    "around the foreground": {"size": [2, 3, 4], "foreground": "label", "p": 0.7},
}


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_that_of_the_whole(kind: str, crop: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """What is read of it alone is what would be cut of the whole, which a stage between leaves no choice but to read."""
    for number in range(6):
        shape = tuple(int(side) for side in rng.integers(6, 12, 3))
        label = (rng.random(shape) > 0.97).astype(np.uint8)
        image = rng.normal(size=(2, *shape)).astype(np.float32)
        write(kind, tmp_path / f"{number}", {"data/image": image, "data/label": label}, rng)
    cut = {"random_volume_crop": {**CROPS[crop], "fields": ["image", "label"]}}
    behind = [
        cut,
        {"random_volume_flip": {"fields": ["image", "label"], "axes": [-1, -2]}},
        {"batch": {"size": 2, "ragged": {"image": "list", "label": "list"}}},
    ]
    source = source_of(kind, tmp_path, "whole")
    windows = epochs(source, *behind, num=2)
    whole = epochs(source, {"call": {"function": f"{__name__}:leave"}}, *behind, num=2)
    assert len(windows) == 6
    for one, other in zip(windows, whole, strict=True):
        assert one["__key__"] == other["__key__"]
        for name in ("image", "label"):
            assert all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True))


def leave(sample: dict[str, Any]) -> None:
    """Changes nothing."""


@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
def test_a_window_reads_only_its_chunks(
    kind: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rng.integers(0, 256, (64, 64, 64), np.uint8)
    path = tmp_path / f"big.{'h5' if kind == 'hdf5' else 'zarr'}"
    if kind == "hdf5":
        with h5py.File(path, "w") as file:
            file.create_dataset("data/image", data=values, chunks=(64, 64, 8), compression="lzf")
    else:
        zarr.create_array(path, name="data/image", data=values, chunks=(64, 64, 8), compressors=None)
    num_read: list[int] = []
    whole = FileConnector.read_into

    def counted(self: FileConnector, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        num_read.append(len(buffer))
        whole(self, key, start, buffer, etag=etag)

    monkeypatch.setattr(FileConnector, "read_into", counted)
    monkeypatch.setattr("loaderkit.sources.containers.hdf5._PAGE_BYTES", 4096)
    crop = {"random_volume_crop": {"size": [64, 64, 8], "fields": ["image"]}}
    with loaderkit.build(
        {"source": source_of(kind, path, "whole", ["image"]), "stages": ["read", crop, {"batch": {"size": 1}}]},
        overrides=INLINE,
    ) as loader:
        del num_read[:]
        (batch,) = (batch for batch, _ in zip(loader, range(1), strict=False))
    assert any(np.array_equal(batch["image"][0], values[..., begin : begin + 8]) for begin in range(57))
    assert sum(num_read) < 0.6 * values.nbytes  # of the first sample, which tells the layout, and of this one


def test_rows_that_share_chunks_are_unpacked_once(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are held: of no memory, each row alone."""
    values = rng.integers(0, 256, (64, 100), np.uint8)
    zarr.create_array(tmp_path / "x.zarr", name="data/image", data=values, chunks=(16, 100))
    reads: list[str] = []
    whole = FileConnector.read_into

    def counted(self: FileConnector, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        reads.append(key)
        whole(self, key, start, buffer, etag=etag)

    monkeypatch.setattr(FileConnector, "read_into", counted)
    for memory, num in (("1MiB", 4), ("2000B", None), ("1B", 64)):
        source = {**source_of("zarr", tmp_path / "x.zarr", "rows", ["image"]), "memory": memory}
        del reads[:]
        batches = epochs(source, {"batch": {"size": 16}})
        rows = torch.cat([batch["image"] for batch in batches])
        assert {row.tobytes() for row in rows.numpy()} == {row.tobytes() for row in values}
        found = len([key for key in reads if "/c/" in key])
        assert num is None or num <= found <= num + 2  # for the sample that tells the layout


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_that_is_one_array(version: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    values = [rng.normal(size=(6, 4)) for _ in range(2)]
    for number, array in enumerate(values):
        zarr.create_array(tmp_path / f"stores/{number}.zarr", data=array, chunks=(3, 4), zarr_format=version)
    for path in ("", "/"):
        source = {"kind": "zarr", "samples": "rows", "fields": {"image": path}}
        (batch,) = epochs({**source, "url": str(tmp_path / "stores/1.zarr")}, {"batch": {"size": 6}})
        assert sorted(batch["image"].tolist()) == sorted(values[1].tolist())
        whole = {**source, "samples": "whole", "url": str(tmp_path / "stores")}
        (batch,) = epochs(whole, {"batch": {"size": 2}}, order={"shuffle": "none"})
        np.testing.assert_array_equal(batch["image"], values)
        assert batch["__key__"] == ["0.zarr", "1.zarr"]
    with pytest.raises(ConfigError, match="field -> path of an array"):
        Pipeline.hdf5("x", samples="rows", fields={"x": "/"}).read().batch(1).config  # noqa: B018


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_of_any_name(version: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """A folder that holds the arrays is a store; one of stores that is a group is not."""
    values = rng.normal(size=(6, 4))
    zarr.open_group(tmp_path, mode="w", zarr_format=version)
    for number in range(2):
        zarr.create_array(tmp_path / f"{number}", name="data/image", data=values, zarr_format=version)
    (batch,) = epochs(source_of("zarr", tmp_path / "1", "rows", ["image"]), {"batch": {"size": 6}})
    assert sorted(batch["image"].tolist()) == sorted(values.tolist())
    assert sorted(batch["__key__"]) == [*"012345"]
    (batch,) = epochs(source_of("zarr", tmp_path / "1", "whole", ["image"]), {"batch": {"size": 1}})
    assert batch["__key__"] == ["1"]
    (batch,) = epochs(source_of("zarr", tmp_path, "whole", ["image"]), {"batch": {"size": 2}})
    assert sorted(batch["__key__"]) == ["0", "1"]


@pytest.mark.parametrize("crop", [None, "image", "label"])
def test_chunks_of_one_field_are_not_those_of_another(
    crop: str | None, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels in one chunk, and images in chunks of 4: each is read once, though all the images of a chunk of labels would be
    more than is held, and whether or not windows of rows are cut."""
    image, label = rng.integers(0, 256, (64, 10, 10), np.uint8), rng.integers(0, 9, (64, 4, 4), np.uint8)
    zarr.create_array(tmp_path / "x.zarr", name="data/image", data=image, chunks=(4, 10, 10))
    zarr.create_array(tmp_path / "x.zarr", name="data/label", data=label, chunks=(64, 4, 4))
    reads: list[str] = []
    whole = FileConnector.read_into

    def counted(self: FileConnector, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        reads.append(key)
        whole(self, key, start, buffer, etag=etag)

    monkeypatch.setattr(FileConnector, "read_into", counted)
    source = {**source_of("zarr", tmp_path / "x.zarr", "rows"), "memory": f"{label.nbytes + 800}B"}
    cut = [{"random_volume_crop": {"size": [3, 3], "fields": [crop]}}] if crop else []
    order = {"shuffle": "block", "block": {"block": "400B", "window": 1, "lanes": 1}}
    batches = epochs(source, *cut, {"batch": {"size": 8}}, order=order)
    found = [key for key in reads if "/c/" in key]
    assert len(found) <= 16 + 1 + 6  # and, for the sample that tells the layout, again
    others = epochs(source, {"call": {"function": f"{__name__}:leave"}}, *cut, {"batch": {"size": 8}}, order=order)
    for one, other in zip(batches, others, strict=True):
        for name, values in (("image", image), ("label", label)):
            assert torch.equal(one[name], other[name])
            if name != crop:
                np.testing.assert_array_equal(one[name], values[[int(key) for key in one["__key__"]]])


@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
def test_of_a_bucket(kind: str, tmp_path: Path, rng: np.random.Generator, seaweed: Any, s3_keys: Any) -> None:
    values = {"data/image": rng.normal(size=(9, 5)), "data/label": np.arange(9)}
    (tmp_path / "store").mkdir()
    path = write(kind, tmp_path / "store/x", values, rng)
    upload(seaweed, path.parent, f"containers-{kind}", "made/")
    for url in (f"s3://containers-{kind}/made", f"s3://containers-{kind}/made/{path.name}"):
        source = {**source_of(kind, url, "rows"), "s3": {"endpoint": seaweed.endpoint}}
        batches = epochs(source, {"batch": {"size": 3}}, overrides=EXECUTORS["thread"])
        images = torch.cat([batch["image"] for batch in batches])
        labels = torch.cat([batch["label"] for batch in batches])
        np.testing.assert_array_equal(images[labels.argsort()], values["data/image"])


@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
class TestContainers(SourceContract):
    stages = ({"random_volume_crop": {"size": [3, 2], "fields": ["image"]}},)

    @pytest.fixture
    def described(self, kind: str, tmp_path: Path, rng: np.random.Generator) -> Mapping[str, Any]:
        for part, num in enumerate((25, 35)):
            arrays = {"data/image": rng.integers(0, 99, (num, 7, 5)), "data/label": rng.normal(size=num)}
            write(kind, tmp_path / f"{part}", arrays, rng)
        return source_of(kind, tmp_path, "rows")
