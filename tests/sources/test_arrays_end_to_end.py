"""Arrays from end to end: what `loaderkit.build` delivers is what NumPy has, on every way bytes can take to their slots."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import BulkReads, Ranges
from loaderkit.connectors.file import FileConnector
from loaderkit.engine.inline import InlineEngine
from loaderkit.errors import ConfigError, ConnectorError, StageError, StateError
from loaderkit.stages.read_arrays import LEAST_BYTES

INLINE = {"prefetch.executor": "inline"}
TYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


class Recording(FileConnector):
    """Notes what is read: (key, start, length) of every range, and the number of ranges of every `gather_into`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []
        self.gathered: list[int] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)

    def gather_into(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None:
        self.gathered.append(len(starts))
        super().gather_into(key, starts, length, buffer, etag=etag)

    def read_many(self, ranges: Ranges, offsets: Sequence[int], buffer: memoryview) -> Mapping[int, ConnectorError]:
        self.reads += zip(ranges.keys, ranges.starts, ranges.lengths, strict=True)
        return super().read_many(ranges, offsets, buffer)

    def bulk(self) -> BulkReads:
        return BulkReads(self.read_many, self.gather_into)


class Plain(FileConnector):
    """A connector that has neither `gather_into` nor `read_many`, as most have none."""

    def bulk(self) -> BulkReads:
        return BulkReads()


def recorded(pipeline: Pipeline, root: Path, **more: Any) -> tuple[loaderkit.Loader, Recording]:
    connector = Recording(root)
    loader = loaderkit.build(pipeline, connectors={"file": connector}, overrides={**INLINE, **more}, clock=lambda: 0.0)
    return loader, connector


def random_array(dtype: str, *shape: int, seed: int = 0) -> NDArray[Any]:
    """Random bits, so that there are all kinds of numbers in it; booleans are 0 or 1."""
    itemsize = np.dtype(dtype).itemsize
    count = int(np.prod(shape))
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count * itemsize, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def same_bits(found: Any, wanted: NDArray[Any]) -> bool:
    assert str(found.dtype) == f"torch.{wanted.dtype.name}"
    assert tuple(found.shape) == wanted.shape
    return bool(found.numpy().tobytes() == wanted.tobytes())


def touch(sample: dict[str, Any]) -> None:
    """A stage in between, so that records take the longer way."""
    assert isinstance(sample["data"], torch.Tensor)


def assert_delivers(loader: loaderkit.Loader, wanted: Callable[[int], NDArray[Any]]) -> list[str]:
    keys = []
    for batch in loader:
        assert same_bits(batch["data"], np.stack([wanted(int(key)) for key in batch["__key__"]]))
        keys += batch["__key__"]
    return keys


# ------------------------------------------------------------------------------------------------ one file of records


@pytest.mark.parametrize("order", ["native", "swapped", "raw"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type(tmp_path: Path, dtype: str, order: str) -> None:
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


# --------------------------------------------------------------------------------------- files that hold an array each

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
    whole = BIG + 128
    assert payload_reads(connector) == [whole, BIG, BIG, BIG, BIG, BIG]  # the probe is read whole, the rest is payload
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
    assert payload_reads(connector)[1:] == [BIG] * 3


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
    loader, _ = recorded(files(folder).batch(2), folder)
    with loader:
        list(loader)
        assert isinstance(loader._engine, InlineEngine)
        assert len(loader._engine._scratch.get("read", b"")) < 1000
