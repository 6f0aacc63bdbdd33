"""Chunks of Zarr and HDF5 by every codec: what zarr and h5py themselves read, and what says more than it has room for."""

from __future__ import annotations

import bz2
import json
import lzma
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs.numcodecs as packed
from executors import EXECUTORS
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import loaderkit
from loaderkit.errors import LoaderkitError
from loaderkit.sources.containers.unpacking import UNPACK

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
INLINE = EXECUTORS["inline"]
BOMB_BYTES = 64 << 20
ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "zlib": zlib.compress, "gzip": numcodecs.GZip().encode, "bz2": bz2.compress, "lzma": lzma.compress,
    "zstd": numcodecs.Zstd().encode, "lz4": numcodecs.LZ4().encode, "blosc": numcodecs.Blosc().encode,
}  # fmt: skip
COMPRESSORS_2 = [
    numcodecs.Zlib(), numcodecs.GZip(), numcodecs.BZ2(), numcodecs.LZMA(), numcodecs.Zstd(), numcodecs.LZ4(),
    *(numcodecs.Blosc(cname=name) for name in ("lz4", "lz4hc", "blosclz", "zstd", "zlib")),
]  # fmt: skip
FILTERS_2 = [
    [], [numcodecs.Shuffle(4)], [numcodecs.Delta("<f4", "<f8")], [numcodecs.FixedScaleOffset(0, 1000, "<f4", "<i8")],
    [numcodecs.Zlib(), numcodecs.CRC32()], [numcodecs.AsType("<f8", "<f4")], [numcodecs.Fletcher32()],
]  # fmt: skip


def compressors_3() -> list[list[Any]]:
    return [
        [GzipCodec()], [ZstdCodec()], [BloscCodec(typesize=4)], [ZstdCodec(), Crc32cCodec(), GzipCodec()], [packed.LZ4()],
        [packed.Zlib(), packed.BZ2(), packed.LZMA(), packed.Shuffle()], [packed.Blosc(), packed.Zstd()], [packed.GZip()],
    ]  # fmt: skip


def whole(path: Path) -> np.ndarray[Any, Any]:
    """The array x of a store as loaderkit reads it."""
    kind = "hdf5" if path.suffix == ".h5" else "zarr"
    source = {"kind": kind, "url": str(path), "samples": "whole", "fields": {"x": "x"}}
    description = {"source": source, "stages": ["read", {"batch": {"size": 1}}], "order": {"epochs": 1}}
    with loaderkit.build(description, overrides=INLINE) as loader:
        (batch,) = loader
    return np.asarray(batch["x"][0])


def values(rng: random.Random) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(rng.getrandbits(64))
    return np.repeat(draw.integers(0, 999, (9, 10)), 5, 1).astype(np.float32) / 8


# numcodecs decodes differences of another dtype into memory that it has not set, and NumPy converts what was there.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_codecs_of_zarr_2(tmp_path: Path, rng: random.Random) -> None:
    given = values(rng)
    cases = [(one, []) for one in COMPRESSORS_2] + [(numcodecs.Blosc(), one) for one in FILTERS_2]
    for number, (compressor, filters) in enumerate(cases):
        path = tmp_path / f"{number}.zarr"
        zarr.create_array(
            path, name="x", data=given, chunks=(4, 20), compressors=compressor, filters=filters, zarr_format=2
        )
        np.testing.assert_array_equal(whole(path), zarr.open_array(path, path="x", mode="r")[...])
        np.testing.assert_allclose(whole(path), given, atol=1e-3)


@pytest.mark.parametrize("shards", [None, (8, 40)])
def test_codecs_of_zarr_3(shards: Any, tmp_path: Path, rng: random.Random) -> None:
    given = values(rng)
    for number, compressors in enumerate(compressors_3()):
        path = tmp_path / f"{number}.zarr"
        zarr.create_array(path, name="x", data=given, chunks=(4, 20), shards=shards, compressors=compressors)
        np.testing.assert_array_equal(whole(path), given)
    filters = [packed.Delta(dtype="<f4"), packed.FixedScaleOffset(offset=0, scale=8, dtype="<f4", astype="<i8")]
    for one in filters:
        path = tmp_path / f"{type(one).__name__}.zarr"
        zarr.create_array(path, name="x", data=given, chunks=(4, 20), shards=shards, filters=[one])
        np.testing.assert_array_equal(whole(path), zarr.open_array(path, path="x", mode="r")[...])


HDF5: list[dict[str, Any]] = [
    {"compression": "gzip"}, {"compression": "gzip", "shuffle": True, "fletcher32": True}, {"compression": "lzf"},
    {"compression": "lzf", "shuffle": True, "fletcher32": True}, {"shuffle": True}, {"fletcher32": True},
    {"compression": "szip"}, {"scaleoffset": 2}, {"scaleoffset": 2, "compression": "gzip", "shuffle": True},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<u2", "|b1", "<c8", ">i8"])
def test_filters_of_hdf5(kind: str, tmp_path: Path, rng: random.Random) -> None:
    given = values(rng).astype(kind)
    with h5py.File(tmp_path / "twelve.h5", "w") as file:  # bits of 16: no type of NumPy's, which HDF5 converts
        twelve = h5py.h5t.STD_I16LE.copy()
        twelve.set_precision(12)
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((4, 20))
        made.set_deflate(4)
        h5py.h5d.create(file.id, b"x", twelve, h5py.h5s.create_simple(given.shape), made)
        file["x"][...] = np.real(given).astype("<i2")
    np.testing.assert_array_equal(whole(tmp_path / "twelve.h5"), np.real(given).astype("<i2"))
    for number, filters in enumerate(HDF5):
        path = tmp_path / f"{number}.h5"
        if "scaleoffset" in filters and kind[1] not in "uif":
            continue
        if filters.get("compression") == "szip" and kind[1] not in "uif":
            continue
        with h5py.File(path, "w") as file:
            data = file.create_dataset("x", given.shape, kind, chunks=(4, 20), fillvalue=given[0, 0], **filters)
            data[:7, 3:33] = given[:7, 3:33]  # and some chunks are never written
            data.id.write_direct_chunk(
                (8, 40), given[8:, 40:].tobytes().ljust(80 * given.itemsize, b"\0"), filter_mask=0xF
            )
        with h5py.File(path) as file:
            expected = file["x"][...]
        np.testing.assert_array_equal(whole(path), expected)


# ---------------------------------------------------------------------------------------------------------------- bombs


def refused(path: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LoaderkitError, match=message):
            whole(path)
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", UNPACK)
def test_a_bomb_of_zarr(name: str, tmp_path: Path) -> None:
    bomb = bytes(ENCODE[name](bytes(BOMB_BYTES)))
    assert len(bomb) < BOMB_BYTES / 200
    chunk = (4, 1 << 14)
    given = np.zeros((4, 1 << 14), np.float32)
    codec = numcodecs.get_codec({"id": name})
    zarr.create_array(tmp_path / "2.zarr", name="x", data=given, chunks=chunk, compressors=codec, zarr_format=2)
    (tmp_path / "2.zarr/x/0.0").write_bytes(bomb)
    native = {"gzip": GzipCodec(), "zstd": ZstdCodec(), "blosc": BloscCodec(typesize=4)}
    for_3 = native.get(name) or getattr(packed, type(codec).__name__)()
    zarr.create_array(tmp_path / "3.zarr", name="x", data=given, chunks=chunk, compressors=for_3)
    (tmp_path / "3.zarr/x/c").mkdir(exist_ok=True, parents=True)
    (tmp_path / "3.zarr/x/c/0").mkdir(exist_ok=True)
    (tmp_path / "3.zarr/x/c/0/0").write_bytes(bomb)
    for path in (tmp_path / "2.zarr", tmp_path / "3.zarr"):
        refused(path, r"unpacks to more than \d+ bytes|bytes for what needs \d+ at most")


@pytest.mark.parametrize("name", UNPACK)
def test_a_cut_chunk_is_refused(name: str, tmp_path: Path, rng: random.Random) -> None:
    """c-blosc reads on behind it, and ends the process."""
    given = np.random.default_rng(rng.randrange(2**32)).integers(0, 1 << 30, 1 << 14).astype("i4")
    codec = numcodecs.get_codec({"id": name})
    for_3 = {"gzip": GzipCodec(), "zstd": ZstdCodec(), "blosc": BloscCodec(typesize=4)}.get(name)
    for version, compressor in ((2, codec), (3, for_3 or getattr(packed, type(codec).__name__)())):
        path = tmp_path / f"{version}.zarr"
        zarr.create_array(path, name="x", data=given, chunks=given.shape, compressors=compressor, zarr_format=version)
        chunk = path / ("x/0" if version == 2 else "x/c/0")
        data = chunk.read_bytes()
        for place in (1, 20, 4000, *rng.sample(range(2, len(data)), 5)):
            chunk.write_bytes(data[:place])
            refused(path, "zarr")


def test_a_bomb_in_a_shard(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(BOMB_BYTES))
    kwargs: dict[str, Any] = {"compressors": [packed.Zlib()], "chunks": (1 << 12,), "shards": (1 << 16,)}
    zarr.create_array(tmp_path / "x.zarr", name="x", data=np.zeros(1 << 16), fill_value=1, **kwargs)
    file = tmp_path / "x.zarr/x/c/0"
    index = np.frombuffer(file.read_bytes()[-260:-4], "<u8").copy()
    index[:] = 2**64 - 1  # no chunk
    index[:2] = 0, len(bomb)
    checked = index.tobytes() + zlib_crc32c(index.tobytes())
    file.write_bytes(bomb + checked)
    refused(tmp_path / "x.zarr", r"unpacks to more than \d+ bytes")


def zlib_crc32c(data: bytes) -> bytes:
    return bytes(numcodecs.CRC32C(location="end").encode(np.frombuffer(data, np.uint8)))[-4:]


def streamed_zstd(num_blocks: int, last: int = 0) -> bytes:
    """A frame that does not say how long it is: blocks of one byte, 128 KiB times each."""
    blocks = [(1 if number == num_blocks - 1 else 0) | 1 << 1 | (128 << 10) << 3 for number in range(num_blocks)]
    return b"\x28\xb5\x2f\xfd\0\x58" + b"".join(block.to_bytes(3, "little") + b"\7" for block in blocks)


def test_zstd_that_does_not_say_how_long_it_is() -> None:
    unpack = UNPACK["zstd"]
    assert bytes(unpack(memoryview(streamed_zstd(3)), 3 << 17)) == b"\7" * (3 << 17)
    for num, most in ((3, (3 << 17) - 1), (5000, 1000), (5000, 300 << 20)):
        with pytest.raises(LoaderkitError, match="unpacks to more than"):
            unpack(memoryview(streamed_zstd(num)), most)


@pytest.mark.parametrize("name", UNPACK)
def test_bytes_that_are_cut_or_changed(name: str, rng: random.Random) -> None:
    """Each is unpacked as it was, or refused; and never longer than the bound."""
    given = bytes(rng.choices(range(4), k=3000))
    packed = bytes(ENCODE[name](given))
    assert bytes(UNPACK[name](memoryview(packed), len(given))) == given
    with pytest.raises(LoaderkitError):
        UNPACK[name](memoryview(packed), len(given) - 1)
    for _ in range(200):
        changed = bytearray(packed[: rng.randrange(1, len(packed) + 1)])
        for _ in range(rng.randrange(3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            unpacked = UNPACK[name](memoryview(changed), 3000)
        except (LoaderkitError, ValueError, RuntimeError, OSError, EOFError, zlib.error, lzma.LZMAError):
            continue
        assert len(unpacked) <= 3000


def test_a_bomb_of_hdf5(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"compression": "gzip"}, {"compression": "gzip", "scaleoffset": 2}]
    for number, filters in enumerate(cases):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            data = file.create_dataset("x", (4, 1 << 14), "f4", chunks=(4, 1 << 14), **filters)
            data.id.write_direct_chunk((0, 0), zlib.compress(bytes(BOMB_BYTES)))
        refused(tmp_path / f"{number}.h5", r"unpacks to more than \d+ bytes")
    with h5py.File(tmp_path / "szip.h5", "w") as file:
        data = file.create_dataset("x", (64, 64), "f4", chunks=(64, 64), compression="szip")
        data.id.write_direct_chunk((0, 0), (1 << 31).to_bytes(4, "little") + bytes(99))
    refused(tmp_path / "szip.h5", "says that it has more than 16384 bytes")
    with h5py.File(tmp_path / "long.h5", "w") as file:
        data = file.create_dataset("x", (8, 8), "f4", chunks=(8, 8), compression="lzf")
        data.id.write_direct_chunk((0, 0), bytes(1 << 20))
    refused(tmp_path / "long.h5", "is 1048576 bytes packed, and 256 unpacked")
    with h5py.File(tmp_path / "short.h5", "w") as file:
        data = file.create_dataset("x", (8, 8), "f4", chunks=(8, 8), compression="gzip")
        data.id.write_direct_chunk((0, 0), zlib.compress(bytes(99)))
    refused(tmp_path / "short.h5", "has 99 bytes, and needs 256")


def test_a_filter_that_says_too_much(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (9, 7), "i4", chunks=(9, 7), compression="lzf")
    data = (tmp_path / "x.h5").read_bytes()
    said = (4).to_bytes(4, "little") + (0x105).to_bytes(4, "little") + (252).to_bytes(4, "little")
    assert data.count(said) == 1
    (tmp_path / "x.h5").write_bytes(data.replace(said, said[:8] + (1 << 31).to_bytes(4, "little")))
    refused(tmp_path / "x.h5", "says that a chunk has 2147483648 bytes, and it has 252")


# ----------------------------------------------------------------------------------------------------- absurd metadata


def described(path: Path, **changes: Any) -> Path:
    version = 2 if "chunks" in changes or "filters" in changes or "compressor" in changes else 3
    zarr.create_array(path, name="x", data=np.arange(8), chunks=(4,), zarr_format=version)
    file = path / "x" / ("zarr.json" if version == 3 else ".zarray")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def grid(*shape: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": [*shape]}}


def shard(*shape: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [*shape], "codecs": [{"name": "bytes"}], **more},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [2**70]}, "which no store holds"),
        ({"shape": [2**28], "chunk_grid": grid(4)}, "lies in 67108864 chunks|lies in .* chunks"),
        ({"shape": [2**40], "chunk_grid": grid(2**30), "codecs": [shard(1)]}, "has shards of 1073741824 chunks"),
        ({"chunk_grid": grid(2**20), "codecs": [shard(1, index_location="start")]}, "has shards of 1048576 chunks"),
        ({"chunk_grid": grid(2**30), "codecs": [shard(2**20), {"name": "crc32c"}]}, "at most 4 GiB"),
        ({"chunk_grid": grid(0)}, r"has chunks of shape \[0\]"),
        ({"chunk_grid": grid("4")}, "has chunks of shape"),
        ({"chunk_grid": {"name": "odd"}}, "chunk grid 'odd'"),
        ({"chunks": [2**40]}, "at most 4 GiB"),
        ({"filters": [{"id": "delta", "dtype": "<i8", "astype": "V1000000"}]}, "whose astype is 'V1000000'"),
        ({"filters": [{"id": "astype", "encode_dtype": "<i8", "decode_dtype": "U9999999"}]}, "whose decode_dtype is"),
        ({"compressor": {"id": "lzma", "format": 3, "filters": []}}, "lzma without a header"),
    ],
)  # fmt: skip
def test_absurd_arrays(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(described(tmp_path / "x.zarr", **changes), message)


def test_absurd_numbers_of_rows(tmp_path: Path) -> None:
    for number, (shape, chunk, message) in enumerate(
        [(2**45, 2**20, "has 35184372088832 rows"), (2**30, 2, "has 1073741824 rows in chunks of 2")]
    ):
        path = described(tmp_path / f"{number}.zarr", shape=[shape], chunk_grid=grid(chunk))
        source = {"kind": "zarr", "url": str(path), "samples": "rows", "fields": {"x": "x"}}
        with pytest.raises(LoaderkitError, match=message):
            loaderkit.build({"source": source, "stages": ["read", {"batch": {"size": 1}}]})
    path = described(tmp_path / "many.zarr", shape=[2**40], chunk_grid=grid(2**20))
    (path / "x/c/0").unlink()
    source = {"kind": "zarr", "url": str(path), "samples": "rows", "fields": {"x": "x"}}
    stages = ["read", {"batch": {"size": 4}}]
    order = {"shuffle": "block", "block": {"block": "8B", "window": 1, "lanes": 1}}
    with loaderkit.build({"source": source, "stages": stages, "order": order}, overrides=INLINE) as loader:
        assert next(iter(loader))["x"].shape == (4,)
