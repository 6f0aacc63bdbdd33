"""Files that hold an array each, from end to end: what `loaderkit.build` delivers is what NumPy has."""

from __future__ import annotations

import io
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import executor_of
from numpy.typing import NDArray
from recorded_arrays import INLINE, TYPES, Recording, random_array, recorded, same_bits

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import StageError
from loaderkit.sources.arrays_in_place import LEAST_BYTES

SIDE = 384  # float32 [384, 384]: 576 KiB
BIG = SIDE * SIDE * 4
assert BIG >= LEAST_BYTES


def volume(index: int, dtype: str = "float32", side: int = SIDE) -> NDArray[Any]:
    return np.random.default_rng(index).standard_normal((side, side)).astype(dtype)


def write_npy(folder: Path, num: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    for index in range(num):
        np.save(folder / f"{index}.npy", volume(index))
    return folder


def write_npz(folder: Path, num: int = 5, save: Any = np.savez) -> Path:
    folder.mkdir(exist_ok=True)
    for index in range(num):
        save(folder / f"{index}.npz", scan=volume(index), mask=volume(index) > 0, dose=np.float64(index))
    return folder


def payload_reads(connector: Recording) -> list[int]:
    return [length for _, _, length in connector.reads if length >= LEAST_BYTES // 4]


def files(folder: Path) -> Pipeline:
    return Pipeline.files(folder).shuffle("none").read().decode()


def test_large_npy_files_are_read_into_their_slots(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "d")
    loader, connector = recorded(files(folder).batch(2), folder)
    with loader:
        for number, batch in enumerate(loader):
            wanted = [volume(2 * number + n) for n in range(len(batch["npy"]))]
            assert same_bits(batch["npy"], np.stack(wanted))
    assert payload_reads(connector) == [BIG] * 5, (
        "of the first sample, which tells the layout, only the header is read twice"
    )
    assert {start for _, start, length in connector.reads if length == BIG} == {128}


def test_stored_members_of_npz_are_read_into_their_slots(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "d")
    loader, connector = recorded(files(folder).batch(2), folder)
    with loader:
        for number, batch in enumerate(loader):
            for n in range(len(batch["scan"])):
                with np.load(folder / f"{2 * number + n}.npz") as wanted:
                    assert batch.keys() == {*wanted.files, "__key__"}
                    assert all(same_bits(batch[name][n], wanted[name]) for name in wanted.files)
    assert (
        payload_reads(connector)[1:] == [BIG, SIDE * SIDE + 128] * 5
    )  # the mask is small: its 144 KiB take the other way


@pytest.mark.parametrize("kind", ["npy", "npz", "packed", "fortran", "swapped"])
@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_both_ways_give_the_same_bytes(tmp_path: Path, kind: str, executor: str) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for index in range(4):
        array = volume(index)
        if kind == "npz":
            np.savez(folder / f"{index}.npz", x=array, y=np.arange(3))
        elif kind == "packed":
            np.savez_compressed(folder / f"{index}.npz", x=array, y=np.arange(3))
        else:
            changed = {"fortran": np.asfortranarray(array), "swapped": array.astype(">f4")}.get(kind, array)
            np.save(folder / f"{index}.npy", changed)
    found = []
    for way in (files(folder).batch(2), files(folder).call(lambda sample: None).batch(2)):
        with loaderkit.build(way, overrides={"prefetch.executor": executor}) as loader:
            found.append([{name: v for name, v in batch.items() if name != "__key__"} for batch in loader])
    for straight, ordinary in zip(*found, strict=True):
        assert straight.keys() == ordinary.keys()
        assert all(same_bits(straight[name], ordinary[name].numpy()) for name in straight)
    name = "x" if kind in ("npz", "packed") else "npy"
    assert same_bits(torch.cat([batch[name] for batch in found[0]]), np.stack([volume(i) for i in range(4)]))


def test_fields_of_other_stages_do_not_matter(tmp_path: Path) -> None:
    """Samples of a picture and a volume: what stages do to the picture leaves the volume its short way."""
    folder = write_tar(tmp_path / "d")
    pipeline = Pipeline.tar(folder, fields={"image": "png", "scan": "npy"}).shuffle("none").read().decode()
    for way, is_short in [
        (pipeline.center_crop(8, fields=["image"]), True),
        (pipeline.center_crop(8), False),
        (pipeline.center_crop(8, fields=["image"]).call(lambda sample: None), False),
    ]:
        loader, connector = recorded(way.batch(3), folder)
        with loader:
            (batch,) = loader
            assert batch["image"].shape == (3, 3, 8, 8)
            assert same_bits(batch["scan"], np.stack([volume(i) for i in range(3)]))
        assert (BIG in payload_reads(connector)) == is_short
    only = Pipeline.tar(folder, fields={"image": "png", "scan": "npy"}).read().decode(fields=["image"]).batch(3)
    with loaderkit.build(only) as loader:
        (batch,) = loader
        assert all(value[:6] == b"\x93NUMPY" for value in batch["scan"])
    named = Pipeline.tar(folder, fields={"scan": "npy"}).shuffle("none").read().decode(fields=["scan"]).batch(3)
    loader, connector = recorded(named, folder)
    with loader:
        (batch,) = loader
        assert same_bits(batch["scan"], np.stack([volume(i) for i in range(3)]))
    assert payload_reads(connector) == [BIG] * 3


def write_tar(folder: Path) -> Path:
    from PIL import Image

    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for index in range(3):
            picture = io.BytesIO()
            Image.new("RGB", (16, 12)).save(picture, "PNG")
            for name, data in ((f"{index}.npy", _npy(volume(index))), (f"{index}.png", picture.getvalue())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_np_load(tmp_path: Path, save: Any) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for index in range(4):
        members = {dtype: random_array(dtype, 3, 2, seed=index) for dtype in TYPES}
        save(folder / f"{index}.npz", **members, text=np.array(["a", "bc"]), scalar=np.int8(index))
    for way in (files(folder).batch(4), files(folder).call(lambda sample: None).batch(4)):
        with loaderkit.build(way) as loader:
            (batch,) = loader
        for index in range(4):
            with np.load(folder / f"{index}.npz") as wanted:
                assert set(wanted.files) == batch.keys() - {"__key__"}
                for name in set(wanted.files) - {"text"}:
                    assert same_bits(batch[name][index], wanted[name])
                assert batch["text"][index].tolist() == ["a", "bc"]


def test_names_that_come_twice(tmp_path: Path) -> None:
    folder = tmp_path / "d" / "class"
    folder.mkdir(parents=True)
    for index in range(2):
        np.savez(folder / f"{index}.npz", label=volume(index), npz=np.arange(2))
    pipeline = Pipeline.files(folder.parent, label="parent").read().decode().batch(2)
    with loaderkit.build(pipeline) as loader, pytest.raises(StageError, match=r"an array called 'label'.*rename"):
        next(iter(loader))
    with loaderkit.build(Pipeline.files(folder).read().decode().batch(2)) as loader:
        assert next(iter(loader)).keys() == {"label", "npz", "__key__"}


def misfits() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    yield (
        "shape",
        lambda path: np.save(path, volume(1, side=SIDE + 1)),
        r"float32 \[385, 385\].*holds float32 \[384, 384\]",
    )
    yield "dtype", lambda path: np.save(path, volume(1, "float64")), r"float64 \[384, 384\].*holds float32"
    yield "flat", lambda path: np.save(path, volume(1).reshape(-1)), r"float32 \[147456\]"
    yield "cut", lambda path: path.write_bytes(_npy(volume(1))[:-1]), "truncated .npy"
    yield "cut in the header", lambda path: path.write_bytes(_npy(volume(1))[:100]), "truncated .npy"
    yield "zeros", lambda path: path.write_bytes(bytes(BIG)), "not an .npy file"
    yield "empty", lambda path: path.write_bytes(b""), "not an .npy file"


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(("damage", "message"), [pytest.param(d, m, id=name) for name, d, m in misfits()])
def test_misfits_and_damage_are_the_samples_error(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = write_npy(tmp_path / "d", 6)
    damage(folder / "3.npy")
    for way in (files(folder).batch(3), files(folder).call(lambda sample: None).batch(3)):
        with loaderkit.build(way, overrides=INLINE) as loader:
            stream = iter(loader)
            next(stream)
            with pytest.raises(StageError, match=rf"sample '3.npy' in .*3.npy: .*{message}"):
                next(stream)
        for policy in ("skip", "replace"):
            with loaderkit.build(way, overrides={**INLINE, "errors.on_bad_sample": policy}) as loader:
                keys = []
                for batch in loader:
                    wanted = [volume(int(key[0])) for key in batch["__key__"]]
                    assert same_bits(batch["npy"], np.stack(wanted))
                    keys += batch["__key__"]
            assert len(keys) == (5 if policy == "skip" else 6)
            assert "3.npy" not in keys


@pytest.mark.parametrize("name", ["scan", "mask", "dose"])
def test_a_flipped_bit_in_an_archive(name: str, tmp_path: Path, rng: random.Random) -> None:
    """Of an array that goes straight into its slot, and of others."""
    folder = write_npz(tmp_path / "d")
    path = folder / "3.npz"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    info = infos[f"{name}.npy"]
    lengths = struct.unpack_from("<HH", data, info.header_offset + 26)  # of the name and what is behind it
    end = info.header_offset + 30 + sum(lengths) + info.file_size
    data[end - 1 - rng.randrange(info.file_size - 128)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with (
        loaderkit.build(files(folder).batch(1), overrides=INLINE) as loader,
        pytest.raises(StageError, match=rf"3\.npz.*array '{name}'.*CRC-32"),
    ):
        list(loader)


def test_a_file_that_is_cut_while_training(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "d", 6)
    with loaderkit.build(files(folder).batch(3), overrides={**INLINE, "errors.on_bad_sample": "skip"}) as loader:
        stream = iter(loader)
        assert next(stream)["__key__"] == ["0.npy", "1.npy", "2.npy"]
        for index in (3, 5):
            (folder / f"{index}.npy").write_bytes(_npy(volume(index))[: BIG // 2])
        batch = next(stream)
        assert batch["__key__"] == ["4.npy"]
        assert same_bits(batch["npy"], volume(4)[None])


def test_an_image_field_takes_no_array(tmp_path: Path) -> None:
    """The slots of a picture look like those of a uint8 array, but only a picture may stand there: on either way."""
    from PIL import Image

    folder = tmp_path / "d"
    folder.mkdir()
    side = 1 + int((LEAST_BYTES / 3) ** 0.5)
    Image.new("RGB", (side, side)).save(folder / "0.png")
    np.save(folder / "1.npy", np.zeros((3, side, side), np.uint8))
    pipeline = Pipeline.files(folder, fields={"image": "png;npy"}).shuffle("none").read().decode().batch(2)
    with loaderkit.build(pipeline) as loader, pytest.raises(StageError, match=r"'1.npy'.*array uint8"):
        next(iter(loader))


def test_ragged_and_padded_arrays(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    arrays = [random_array("float32", 200_000 + index, seed=index) for index in range(4)]
    for index, array in enumerate(arrays):
        np.save(folder / f"{index}.npy", array)
    with loaderkit.build(files(folder).batch(4, ragged={"npy": "list"})) as loader:
        (batch,) = loader
        assert all(same_bits(found, wanted) for found, wanted in zip(batch["npy"], arrays, strict=True))
    with loaderkit.build(files(folder).batch(4, ragged={"npy": "pad"})) as loader:
        (batch,) = loader
        assert batch["npy_sizes"].tolist() == [len(array) for array in arrays]


def test_arrays_without_a_slab_own_their_memory(tmp_path: Path) -> None:
    """Texts are in no slab: what a batch holds must not be the chunk's memory, which the next chunk writes over."""
    folder = tmp_path / "d"
    folder.mkdir()
    for index in range(8):
        np.save(folder / f"{index}.npy", np.array([str(index)] * 3))
    with loaderkit.build(files(folder).batch(2), overrides=INLINE) as loader:
        found = [value.tolist() for batch in list(loader) for value in batch["npy"]]
    assert found == [[str(index)] * 3 for index in range(8)]


def test_the_probe_is_not_kept(tmp_path: Path) -> None:
    """The first sample is read whole to see what it is; the memory for that is gone when batches are made."""
    folder = write_npy(tmp_path / "d", 4)
    with executor_of(files(folder).batch(2), **INLINE) as engine:
        for _ in range(2):
            engine.next()
        assert len(engine.scratch.get("read", b"")) < 1000


@pytest.mark.parametrize("memory", ["64MiB", "1MiB"])
@pytest.mark.parametrize("shuffle", ["none", "global"])
def test_from_a_remote_store_each_array_is_read_once(memory: str, shuffle: Any) -> None:
    """Ahead, in one request for a file; or, where that has no memory for a file, its header and its numbers."""
    arrays = [random_array("float32", 300, 500 + index, seed=index) for index in range(6)]
    connector = Remote({f"{index}.npy": _npy(array) for index, array in enumerate(arrays)})
    pipeline = Pipeline.files("s3://bucket/", read_ahead={"memory": memory}).shuffle(shuffle).read().decode()
    pipeline = pipeline.batch(2, ragged={"npy": "list"}).epochs(1)
    with loaderkit.build(pipeline, connectors={"s3": connector}, overrides={"prefetch.executor": "thread"}) as loader:
        for batch in loader:
            for key, found in zip(batch["__key__"], batch["npy"], strict=True):
                assert same_bits(found, arrays[int(key[0])])
    payloads = [key for key, _, length in connector.reads if length >= LEAST_BYTES]
    assert sorted(payloads) == [f"{index}.npy" for index in range(6)]


class Remote(MemoryConnector):
    """Notes what is read: (key, start, length)."""

    traits = ConnectorTraits(is_remote=True)

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)
