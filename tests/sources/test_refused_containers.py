"""`kind: zarr` and `kind: hdf5`: what is refused, damaged or is not there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from containers import epochs, source_of, write

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError, FormatError, SourceError, StageError


@pytest.fixture
def rng(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(64))


def refused(source: dict[str, Any], message: str, *stages: Any) -> None:
    with pytest.raises((FormatError, SourceError, StageError), match=message):
        epochs(source, *stages, {"batch": {"size": 1}})


def h5(path: Path, make: Callable[[h5py.File], Any]) -> Path:
    with h5py.File(path, "w") as file:
        make(file)
    return path


def test_hdf5_reads_no_other_file(tmp_path: Path) -> None:
    h5(tmp_path / "secret.h5", lambda file: file.create_dataset("data/image", data=np.arange(9)))
    (tmp_path / "raw").write_bytes(bytes(72))

    def external(file: h5py.File) -> None:
        file["data"] = h5py.ExternalLink("secret.h5", "data")

    def soft_external(file: h5py.File) -> None:
        file["there"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "data")
        file["data"] = h5py.SoftLink("/there")

    def virtual(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((9,), "<i8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "data/image", (9,))
        file.create_group("data").create_virtual_dataset("image", layout)

    def stored_outside(file: h5py.File) -> None:
        file.create_dataset("data/image", (9,), "<i8", external=[(str(tmp_path / "raw"), 0, 72)])

    for number, (make, message) in enumerate(
        [
            (external, "is a link to another file, which is not followed"),
            (soft_external, "is a link to another file, which is not followed"),
            (virtual, "lie in other files, which are not read"),
            (stored_outside, "lie in other files, which are not read"),
        ]
    ):
        path = h5(tmp_path / f"{number}.h5", make)
        for samples in ("rows", "whole"):
            refused(source_of("hdf5", path, samples, ["image"]), message)


@pytest.mark.parametrize("suffix", [".h5", ".hdf5", ".hdf", ".mat", ".MAT"])
def test_hdf5_of_other_extensions(tmp_path: Path, rng: np.random.Generator, suffix: str) -> None:
    """In a folder and alone; MATLAB's begins with a block of text. Files of the same extension in other formats are named."""
    values = rng.normal(size=(6, 4))
    (tmp_path / "notes.txt").write_text("no data")
    block = 512 if suffix.lower() == ".mat" else 0
    with h5py.File(tmp_path / f"a{suffix}", "w", userblock_size=block) as file:
        file["data/image"] = values
    if block:
        with open(tmp_path / f"a{suffix}", "r+b") as raw:
            raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\0\x02IM")
    for url in (tmp_path, tmp_path / f"a{suffix}"):
        (batch,) = epochs(source_of("hdf5", url, "rows", ["image"]), {"batch": {"size": 6}})
        np.testing.assert_array_equal(sorted(batch["image"].tolist()), sorted(values.tolist()))
    for begin, message in ((b"MATLAB 5.0 MAT-file", "-v7.3"), (b"\x0e\x03\x13\x01", "HDF4"), (b"CDF\x01", "NetCDF")):
        (tmp_path / f"b{suffix}").write_bytes(begin.ljust(2000))
        refused(source_of("hdf5", tmp_path, "rows", ["image"]), rf"b{suffix}.*{message}")


def test_hdf5_loads_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = h5(
        tmp_path / "x.h5",
        lambda file: file.create_dataset("data/image", (8, 8), "f4", chunks=(4, 4), compression="gzip"),
    )
    data = bytearray(path.read_bytes())
    message = b"\x01\x00\x08\x00\x01\x00\x01\x00deflate\x00"  # of the filter: its number, the length of its name, ...
    assert data.count(message) == 1
    begin = data.index(message)
    data[begin : begin + 2] = (32001).to_bytes(2, "little")
    path.write_bytes(data)
    refused(source_of("hdf5", path, "rows", ["image"]), "packed by the filter 32001 .*and none is loaded")


def test_hdf5_follows_links_inside_the_file(tmp_path: Path) -> None:
    def make(file: h5py.File) -> None:
        file["real/image"] = np.arange(6)
        file["data"] = h5py.SoftLink("/real")
        file["round"] = h5py.SoftLink("/round")

    path = h5(tmp_path / "x.h5", make)
    (batch,) = epochs(source_of("hdf5", path, "whole", ["image"]), {"batch": {"size": 1}})
    assert batch["image"].tolist() == [[*range(6)]]
    refused({**source_of("hdf5", path, "whole"), "fields": {"x": "round"}}, "follows more than 16 links")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda file: file.create_dataset("data/image", data=["a"], dtype=h5py.string_dtype()),
            "only numbers are read",
        ),
        (lambda file: file.create_dataset("data/image", data=np.zeros(3, "i4,f8")), "only numbers are read"),
        (lambda file: file.create_dataset("data/other", data=np.zeros(3)), "has no 'image' .* only other"),
        (lambda file: file.create_group("data/image"), "is a group, no data set"),
        (lambda file: file.create_dataset("data/image", data=h5py.Empty("f8")), "is empty"),
        (lambda file: file.create_dataset("data/image", data=3), "a single number, which has no rows"),
        (lambda file: file.create_dataset("data/image", (2, 2**40), "u1", chunks=(1, 99)), "at most 4 GiB"),
    ],
)
def test_hdf5_that_is_no_sample(make: Any, message: str, tmp_path: Path) -> None:
    refused(source_of("hdf5", h5(tmp_path / "x.h5", make), "rows", ["image"]), message)


HUGE_CHUNKS = {"name": "regular", "configuration": {"chunk_shape": [2**45]}}


def shards_of(codec: str) -> dict[str, Any]:
    return {"name": "sharding_indexed", "configuration": {"chunk_shape": [2], "codecs": [{"name": codec}]}}


def zarr_with(path: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A store whose metadata was changed."""
    version: Any = 3 if name == "zarr.json" else 2
    zarr.create_array(path, name="data/image", data=np.arange(8), chunks=(4,), zarr_format=version)
    described = json.loads((path / "data/image" / name).read_text())
    change(described)
    (path / "data/image" / name).write_text(json.dumps(described))
    return path


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (".zarray", {"dtype": "|O", "filters": [{"id": "pickle", "protocol": 5}]}, "only numbers are read, no objects"),
        (".zarray", {"filters": [{"id": "pickle", "protocol": 5}]}, "packed by 'pickle', which is not read"),
        (".zarray", {"compressor": {"id": "json2"}}, "packed by 'json2'"),
        (".zarray", {"dtype": [["a", "<i4"]]}, "only numbers are read"),
        (".zarray", {"compressor": 7}, "damaged .zarray"),
        ("zarr.json", {"data_type": "string"}, "of 'string', and only numbers are read"),
        ("zarr.json", {"codecs": [{"name": "numcodecs.pickle"}]}, "codec 'numcodecs.pickle', which is not read"),
        ("zarr.json", {"codecs": [shards_of("evil.codec")]}, "'evil.codec'"),
        ("zarr.json", {"node_type": "group"}, "is a group, no array"),
        ("zarr.json", {"shape": "x"}, "cannot be read as Zarr"),
        ("zarr.json", {"shape": [2**50], "chunk_grid": HUGE_CHUNKS}, "at most 4 GiB"),
    ],
)  # fmt: skip
def test_zarr_that_is_no_sample(name: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = zarr_with(tmp_path / "x.zarr", name, lambda described: described.update(changed))
    refused(source_of("zarr", path, "rows", ["image"]), message)


@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
def test_damaged_stores(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """One of rows is a bad shard, one that is a sample a bad sample; a damaged chunk is that of its rows."""
    arrays = {"data/image": rng.normal(size=(8, 50)), "data/label": np.arange(8)}
    paths = [write(kind, tmp_path / f"{number}", arrays, rng) for number in range(3)]
    broken = paths[1] if kind == "hdf5" else paths[1] / "data/image/zarr.json"
    broken.write_bytes(b"nothing")
    source = source_of(kind, tmp_path, "rows")
    refused(source, f"{paths[1].name}.*on_bad_shard: skip")
    batches = epochs(
        source, {"batch": {"size": 4}}, overrides={"errors.on_bad_shard": "skip", "errors.max_bad_shards": 1}
    )
    assert sum(len(batch["label"]) for batch in batches) == 16
    whole = source_of(kind, tmp_path, "whole")
    batches = epochs(whole, {"batch": {"size": 3}}, overrides={"errors.on_bad_sample": "skip"})
    assert sorted(key for batch in batches for key in batch["__key__"]) == [paths[0].name, paths[2].name]


def test_a_cut_chunk_is_bad_for_its_rows_alone(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", name="data/image", data=np.arange(32), chunks=(8,))
    (tmp_path / "x.zarr/data/image/c/2").write_bytes(b"cut")
    source = source_of("zarr", tmp_path / "x.zarr", "rows", ["image"])
    batches = epochs(source, {"batch": {"size": 4}}, overrides={"errors.on_bad_sample": "skip"})
    rows = sorted(int(row) for batch in batches for row in batch["image"])
    assert rows == [*range(16), *range(24, 32)]


def test_a_chunk_of_terabytes_is_not_read(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", name="data/image", data=np.arange(32), chunks=(8,))
    with (tmp_path / "x.zarr/data/image/c/2").open("wb") as file:
        file.truncate(2**33)  # which takes no room
    refused(source_of("zarr", tmp_path / "x.zarr", "rows", ["image"]), "for what needs 65604 at most")


def test_arrays_of_unequal_numbers_of_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write("zarr", tmp_path / "x", {"data/image": np.zeros((5, 2)), "data/label": np.zeros(4)}, rng)
    refused(source_of("zarr", path, "rows"), r"differ in how many rows they have \(image 5, label 4\)")


def test_a_window_larger_than_an_array(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write("hdf5", tmp_path / "x", {"data/image": np.ones((5, 4, 3)), "data/label": np.ones((5, 4, 3))}, rng)
    crop = {"size": [4, 4], "fields": ["image", "label"]}
    refused(source_of("hdf5", path, "rows"), "pad_if_needed: true, or a smaller `size`", {"random_volume_crop": crop})
    padded = {"random_volume_crop": {**crop, "pad_if_needed": True}}
    (batch,) = epochs(source_of("hdf5", path, "rows"), padded, {"batch": {"size": 5}})
    assert batch["image"].shape == (5, 4, 4)
    assert batch["image"].sum() == 60


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("no store")
    refused(source_of("zarr", tmp_path, "rows"), "there is no Zarr store below")
    refused(source_of("hdf5", tmp_path, "rows"), "there is no HDF5 file")
    refused(source_of("zarr", tmp_path / "y.zarr", "rows"), "has no array 'data/image'")
    with pytest.raises(ConfigError, match="samples"):
        loaderkit.build(
            {"source": {"kind": "zarr", "url": "x", "fields": {"x": "y"}}, "stages": ["read", {"batch": {"size": 1}}]}
        )
    with pytest.raises(ConfigError, match="field -> path of an array"):
        Pipeline.hdf5("x", samples="rows", fields={"x": "../y"}).read().batch(1).config  # noqa: B018


def test_hdf5_in_small_reads(tmp_path: Path) -> None:
    """The file that HDF5 sees is the object, wherever it reads."""
    from loaderkit.sources.containers.hdf5 import RangedFile

    data = np.random.default_rng(0).integers(0, 256, 700_000, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    connector = FileConnector(tmp_path)
    ranged, draw = RangedFile(connector, connector.stat("x")), random.Random(1)
    assert isinstance(connector.stat("x"), ObjectInfo)
    for _ in range(300):
        begin, num = draw.randrange(720_000), draw.choice([0, 1, 8, 512, 300_000])
        ranged.seek(begin)
        buffer = bytearray(num)
        read = ranged.readinto(buffer)
        assert bytes(buffer[:read]) == data[begin : begin + num]
        assert ranged.tell() == begin + read
