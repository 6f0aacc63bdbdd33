from __future__ import annotations

import gc
import io
import json
import os
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import (
    ConfigError,
    ConnectorError,
    FormatError,
    LoaderkitError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    StageError,
    TooManyBadSamplesError,
)

pytestmark = pytest.mark.matrix(8)

NUM = 24
THREADS = ["inline", "thread"]


def picture(index: int, kind: str = "JPEG") -> bytes:
    """32 x 32 pixels of one grey level that tells which sample it is, with so much noise that they outweigh the header."""
    rng = np.random.default_rng(index)
    pixels = np.clip(40 + 6 * index + rng.integers(-9, 10, (32, 32, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, kind, quality=95)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 good pictures in two class folders: a/00.jpg, b/01.jpg, a/02.jpg, ..."""
    root = tmp_path / "data"
    for index in range(NUM):
        place = root / "ab"[index % 2] / f"{index:02}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture(index))
    return root


def descriptors() -> set[str]:
    return {
        f"{number} -> {target}"
        for number in os.listdir("/proc/self/fd")
        if (target := link_of(number)) and not target.startswith(("/dev/", "anon_inode:"))
    }


def link_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the descriptor of the listing itself
        return ""


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """After every test: no thread of ours, no descriptor more than before. Errors alone must have cleaned up, so tests
    call `close` only where that is what they are about."""
    before = set(threading.enumerate())
    open_before = descriptors()
    yield
    assert set(threading.enumerate()) <= before
    gc.collect()
    assert descriptors() <= open_before


def files(folder: Path, executor: str = "thread", *, kind: str = "jpg", **errors: Any) -> Pipeline:
    made = (
        Pipeline.files(folder, include=f"**/*.{kind}", label="parent")
        .shuffle("none")
        .read()
        .decode()
        .batch(6)
        .prefetch(executor=executor, concurrency=2)
    )
    return made.errors(**errors) if errors else made


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loaderkit")]


def failure(loader: loaderkit.Loader) -> StageError:
    """Iterate into the error. Afterwards nothing may run, although nobody closed the loader."""
    with pytest.raises(StageError) as caught:
        list(loader)
    assert threads_of_ours() == []
    error = caught.value
    del caught
    return error


def assert_names(error: StageError, stage: str, key: str, origin: Path | str, *said: str) -> None:
    message = str(error)
    assert error.stage == stage
    assert error.key == key
    assert str(origin) in error.origin
    assert message.startswith(f"{stage} failed for sample {key!r} in {error.origin}: ")
    for part in said:
        assert part.lower() in message.lower()
    assert "\n" not in message


# ------------------------------------------------------------------------------------------- what is found at building


def test_an_empty_directory(tmp_path: Path) -> None:
    for made in (Pipeline.files(tmp_path), Pipeline.tar(tmp_path)):
        with pytest.raises(SourceError) as caught:
            loaderkit.build(made.read().batch(4))
        assert str(tmp_path) in str(caught.value)
        assert (
            "no file at all" in str(caught.value) or "no archive" in str(caught.value) or "empty" in str(caught.value)
        )


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    for made in (Pipeline.files(tmp_path / "absent"), Pipeline.tar(tmp_path / "absent")):
        with pytest.raises((SourceError, ConnectorError), match="absent"):
            loaderkit.build(made.read().batch(4))


def test_a_glob_without_a_match(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"\*\.webp.*24 files are there, such as 'a/00\.jpg'"):
        loaderkit.build(Pipeline.files(folder, include="**/*.webp").read().batch(4))
    with pytest.raises(SourceError, match=r"\*\.tar"):
        loaderkit.build(Pipeline.tar(folder).read().batch(4))


def test_an_unreadable_directory_or_file(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    place = folder / "a" / "00.jpg"
    place.chmod(0)
    error = failure(loaderkit.build(files(folder)))
    assert_names(error, "read", "a/00.jpg", place, "denied")


def test_too_few_samples_for_a_batch(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"24 samples do not fill one batch of 25"):
        loaderkit.build(Pipeline.files(folder).read().batch(25, drop_last=True))


# --------------------------------------------------------------------------------------------------- damaged samples


def zero_bytes(place: Path) -> str:
    place.write_bytes(b"")
    return "0 bytes"


def text_in_it(place: Path) -> str:
    place.write_bytes(b"this is not a picture\n")
    return "not an image"


def cut_in_half(place: Path) -> str:
    data = place.read_bytes()
    place.write_bytes(data[: len(data) * 3 // 4])
    return "truncated"


def only_a_header(place: Path) -> str:
    place.write_bytes(place.read_bytes()[:2])
    return "2 bytes"


DAMAGES = [zero_bytes, text_in_it, cut_in_half, only_a_header]


@pytest.mark.parametrize("executor", THREADS)
@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_picture(damage: Callable[[Path], str], kind: str, executor: str, folder: Path) -> None:
    if kind == "png":
        for index, place in enumerate(sorted(folder.rglob("*.jpg"), key=lambda path: path.name)):
            place.unlink()
            place.with_suffix(".png").write_bytes(picture(index, "PNG"))
    place = folder / "b" / f"13.{kind}"
    said = damage(place)
    error = failure(loaderkit.build(files(folder, executor, kind=kind)))
    assert_names(error, "decode", f"b/13.{kind}", place, said)
    # Canonical order: a/00 ... a/22, then b/01, ..., so b/13 is the 12 + 6th.
    assert (error.epoch, error.position) == (0, 18)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("executor", THREADS)
def test_batches_before_the_damage_arrive(executor: str, folder: Path) -> None:
    cut_in_half(folder / "b" / "13.jpg")
    loader = loaderkit.build(files(folder, executor))
    found = []
    with pytest.raises(StageError):
        for batch in loader:
            found.append(batch["__key__"])  # noqa: PERF401
    assert [len(keys) for keys in found] == [6, 6, 6]
    assert threads_of_ours() == []
    assert loader.state_dict()["position"] == 18


@pytest.mark.parametrize("executor", THREADS)
def test_mended_data_can_be_gone_on_with(executor: str, folder: Path) -> None:
    """After the error the loader still stands at the same place: a retry after repair delivers what was missing."""
    place = folder / "b" / "13.jpg"
    good = place.read_bytes()
    before = place.stat()
    place.write_bytes(bytes(len(good)))
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    loader = loaderkit.build(files(folder, executor))
    with pytest.raises(StageError):
        list(loader)
    state = loader.state_dict()
    place.write_bytes(good)
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    with loaderkit.build(files(folder, executor)) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
        assert [batch["__key__"][0] for batch in again] == ["b/13.jpg"]


@pytest.mark.parametrize("executor", THREADS)
def test_a_file_that_vanishes_after_listing(executor: str, folder: Path) -> None:
    loader = loaderkit.build(files(folder, executor))
    place = folder / "a" / "04.jpg"
    place.unlink()
    error = failure(loader)
    assert_names(error, "read", "a/04.jpg", place)
    assert isinstance(error.__cause__, ObjectNotFoundError)


@pytest.mark.parametrize("executor", THREADS)
@pytest.mark.parametrize("change", ["longer", "shorter", "same size"])
def test_a_file_replaced_after_listing(change: str, executor: str, folder: Path) -> None:
    loader = loaderkit.build(files(folder, executor))
    place = folder / "a" / "04.jpg"
    data = place.read_bytes()
    place.write_bytes({"longer": data + b"x", "shorter": data[:-1], "same size": data}[change])
    os.utime(place, ns=(1, 1))
    error = failure(loader)
    assert_names(error, "read", "a/04.jpg", place, "replaced")
    assert isinstance(error.__cause__, ObjectChangedError)


# --------------------------------------------------------------------------------------------------------------- tar


def write_tar(path: Path, names: list[str]) -> list[tuple[int, int]]:
    """A tar of pictures; (offset of data, size) of every member."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for index, name in enumerate(names):
            data = picture(index)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with tarfile.open(path) as archive:
        return [(member.offset_data, member.size) for member in archive]


def tars(folder: Path, executor: str = "thread", **errors: Any) -> Pipeline:
    made = Pipeline.tar(folder).shuffle("none").read().decode().batch(4).prefetch(executor=executor, concurrency=2)
    return made.errors(**errors) if errors else made


@pytest.mark.parametrize("place", ["header", "member", "padding"])
def test_a_tar_cut_short(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shards = tmp_path / "shards"
    shards.mkdir()
    write_tar(shards / "shard-0.tar", [f"{i:02}.jpg" for i in range(8)])
    path = shards / "shard-1.tar"
    members = write_tar(path, [f"{i:02}.jpg" for i in range(8)])
    start, size = members[5]
    end = {"header": start - 200, "member": start + size // 2, "padding": start + size - 1}[place]
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises((FormatError, SourceError, StageError)) as caught:
        list(loaderkit.build(tars(shards)))
    assert str(path) in str(caught.value)
    # Told either by its own name, or by the place where the archive ends.
    assert any(word in str(caught.value) for word in ("05.jpg", str(end), "cut", "truncated", "ends"))
    assert threads_of_ours() == []


@pytest.mark.parametrize("executor", THREADS)
def test_a_damaged_member(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "shard-0003.tar"
    members = write_tar(path, [f"n01440764/{i:02}.jpg" for i in range(8)])
    data = bytearray(path.read_bytes())
    start, size = members[5]
    data[start + size * 3 // 4 : start + size] = (b"\xff\xd9" * size)[: size - size * 3 // 4]
    path.write_bytes(data)
    error = failure(loaderkit.build(tars(tmp_path, executor)))
    assert_names(error, "decode", "n01440764/05", path, "truncated JPEG")
    assert str(error).startswith(f"decode failed for sample 'n01440764/05' in {path}: truncated JPEG (")


@pytest.mark.parametrize("executor", THREADS)
def test_a_tar_replaced_after_listing(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.tar"
    write_tar(path, [f"{i:02}.jpg" for i in range(8)])
    loader = loaderkit.build(tars(tmp_path, executor))
    write_tar(path, [f"{i:02}.jpg" for i in range(1, 9)])
    os.utime(path, ns=(1, 1))
    error = failure(loader)
    assert_names(error, "read", "00", path, "replaced")


# ------------------------------------------------------------------------------------------------------ call, dataset


class UnluckyError(Exception):
    """The user's own."""


def raise_for_seven(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        raise UnluckyError("seven")


def key_error(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        _ = sample["depth"]


def other_shape(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"].endswith("07.jpg"):
        sample["image"] = sample["image"][:, :10]
    return sample


def no_dict(sample: dict[str, Any]) -> Any:
    return sample["image"] if sample["__key__"].endswith("07.jpg") else sample


def other_fields(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "extra": 1} if sample["__key__"].endswith("07.jpg") else sample


def leave(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        sys.exit("a library gave up")


def end_generator(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        raise GeneratorExit


def called(folder: Path, function: Callable[..., Any], executor: str, **errors: Any) -> Pipeline:
    made = (
        Pipeline.files(folder, label="parent")
        .shuffle("none")
        .read()
        .decode()
        .call(function, name="mine")
        .batch(6)
        .prefetch(executor=executor, concurrency=2)
    )
    return made.errors(**errors) if errors else made


@pytest.mark.parametrize("executor", THREADS)
@pytest.mark.parametrize(
    ("function", "stage", "said", "cause"),
    [
        (raise_for_seven, "mine", "seven", UnluckyError),
        (key_error, "mine", "KeyError('depth')", KeyError),
        (leave, "mine", "SystemExit('a library gave up')", SystemExit),
        (end_generator, "mine", "GeneratorExit()", GeneratorExit),
        (no_dict, "mine", "returned Tensor; it must return a dict", TypeError),
        (other_shape, "batch", "[3, 10, 32]", ValueError),
        (other_fields, "batch", "'extra'", ValueError),
    ],
)
def test_a_call_that_fails_on_a_sample(
    function: Callable[..., Any], stage: str, said: str, cause: type[BaseException], executor: str, folder: Path
) -> None:
    error = failure(loaderkit.build(called(folder, function, executor)))
    assert_names(error, stage, "b/07.jpg", folder / "b" / "07.jpg", said)
    assert type(error.__cause__) is cause
    if stage == "batch":
        assert "'a/00.jpg'" in str(error), "both samples should be named"


def fail_on_batch(batch: dict[str, Any]) -> None:
    if "b/07.jpg" in batch["__key__"]:
        raise UnluckyError("seven")


@pytest.mark.parametrize("executor", THREADS)
def test_a_call_that_fails_on_a_batch(executor: str, folder: Path) -> None:
    made = files(folder, executor).call(fail_on_batch, name="late")
    error = failure(loaderkit.build(made))
    assert error.stage == "late"
    assert "batch 2 of epoch 0" in str(error)
    assert "seven" in str(error)
    assert isinstance(error.__cause__, UnluckyError)


def leave_on_batch(batch: dict[str, Any]) -> None:
    if "b/07.jpg" in batch["__key__"]:
        sys.exit(0)


@pytest.mark.parametrize("executor", THREADS)
def test_a_call_that_leaves_on_a_batch(executor: str, folder: Path) -> None:
    error = failure(loaderkit.build(files(folder, executor).call(leave_on_batch, name="late")))
    assert error.stage == "late"
    assert "SystemExit(0)" in str(error)


def test_what_leaves_is_skipped_like_any_bad_sample(folder: Path) -> None:
    with loaderkit.build(called(folder, leave, "thread", on_bad_sample="skip")) as loader:
        assert "b/07.jpg" not in [key for batch in loader for key in batch["__key__"]]


def test_a_call_that_cannot_be_imported(folder: Path) -> None:
    for path in ("no_such_module:f", "json:no_such_function", "json:decoder"):
        with pytest.raises(ConfigError, match=rf"mine.*{path}"):
            loaderkit.build(Pipeline.files(folder).read().call(path, name="mine").batch(4))


class Items:
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise UnluckyError(f"item {index}")
        return {"x": index, "image": torch.full((3, 4, 4), index, dtype=torch.uint8)}


@pytest.mark.parametrize("executor", THREADS)
def test_a_data_set_object_that_raises(executor: str) -> None:
    made = Pipeline.dataset(Items(bad=(13,))).shuffle("none").read().batch(6).prefetch(executor=executor)
    error = failure(loaderkit.build(made))
    assert_names(error, "read", "13", "Items", "item 13")
    assert isinstance(error.__cause__, UnluckyError)


class Leaving(Items):
    def __getitem__(self, index: int) -> Any:
        return sys.exit() if index == 13 else super().__getitem__(index)


class LeavingTogether(Leaving):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("executor", [*THREADS, "process"])
@pytest.mark.parametrize("items", [Leaving, LeavingTogether])
def test_a_data_set_object_that_leaves(items: type[Items], executor: str) -> None:
    made = Pipeline.dataset(items()).shuffle("none").read().batch(6).prefetch(executor=executor)
    error = failure(loaderkit.build(made))
    assert_names(error, "read", "13", items.__name__, "SystemExit")
    assert isinstance(error.__cause__, SystemExit)


def test_data_set_objects_of_no_use() -> None:
    class Empty(Items):
        def __len__(self) -> int:
            return 0

    with pytest.raises(SourceError, match="Empty"):
        loaderkit.build(Pipeline.dataset(Empty()).read().batch(4))
    with pytest.raises(LoaderkitError, match="no_such_module"):
        loaderkit.build(Pipeline.dataset("no_such_module:make").read().batch(4))


def raising_factory() -> Items:
    raise UnluckyError("no data today")


def leaving_factory() -> Items:
    sys.exit(3)


class Sized(Items):
    def __init__(self, size: Any) -> None:
        self.size = size

    def __len__(self) -> int:
        if self.size is None:
            raise UnluckyError("who knows")
        return self.size  # type: ignore[no-any-return]


READY = Items()
OWN = "test_bad_input"


@pytest.mark.parametrize(
    ("name", "args", "said", "cause"),
    [
        (f"{OWN}:raising_factory", {}, r"called with \(\), failed: UnluckyError: no data today", UnluckyError),
        (f"{OWN}:leaving_factory", {}, "SystemExit: 3", SystemExit),
        (f"{OWN}:Sized", {"sise": 3}, r"called with \(sise=3\), failed: TypeError.*'sise'", TypeError),
        (f"{OWN}:Sized", {"size": -1}, r"len\(\) of the Sized failed \(ValueError", ValueError),
        (f"{OWN}:Sized", {"size": 2.5}, r"len\(\) of the Sized failed \(TypeError", TypeError),
        (f"{OWN}:Sized", {"size": None}, r"len\(\) of the Sized failed \(UnluckyError: who knows", UnluckyError),
        (f"{OWN}:READY", {"num": 3}, r"source\.args: .* is a ready Items.*num", type(None)),
        (".mod:x", {}, "cannot be imported: TypeError", TypeError),
        ("raising_module:make", {}, "cannot be imported: ValueError: not today", ValueError),
        ("broken_module:make", {}, "cannot be imported: SyntaxError", SyntaxError),
        ("leaving_module:make", {}, "cannot be imported: SystemExit", SystemExit),
    ],
)
def test_objects_that_cannot_be_made(
    name: str,
    args: dict[str, Any],
    said: str,
    cause: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kind of error, with the cause chained, whatever the user's code raises."""
    (tmp_path / "raising_module.py").write_text("raise ValueError('not today')")
    (tmp_path / "broken_module.py").write_text("def make(:")
    (tmp_path / "leaving_module.py").write_text("import sys; sys.exit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        loaderkit.build(Pipeline.dataset(name, args=args).read().batch(4))
    assert "source." in str(caught.value)
    assert name in str(caught.value) or "Sized" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)
    if "module" in name or name.startswith("."):
        with pytest.raises(ConfigError, match=r"stages\.mine\.function.*cannot be imported"):
            loaderkit.build(Pipeline.dataset(READY).read().call(name, name="mine").batch(4))


@pytest.mark.parametrize("executor", THREADS)
def test_every_sample_is_bad(executor: str, folder: Path) -> None:
    for place in folder.rglob("*.jpg"):
        zero_bytes(place)
    for policy in ("raise", "skip", "replace"):
        made = files(folder, executor, on_bad_sample=policy, max_bad_samples=1000)
        error = failure(loaderkit.build(made))
        assert "0 bytes" in str(error)


# ------------------------------------------------------------------------------------------------- skip and replace


def damaged(folder: Path, indices: list[int]) -> list[str]:
    keys = []
    for number, index in enumerate(indices):
        place = folder / "ab"[index % 2] / f"{index:02}.jpg"
        DAMAGES[number % len(DAMAGES)](place)
        keys.append(str(place.relative_to(folder)))
    return keys


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_failed(loader: loaderkit.Loader) -> dict[str, int]:
    return {row["name"]: row["num_failed"] for row in loader.stats().to_dict()["stages"]}


@pytest.mark.parametrize("executor", THREADS)
def test_skip(executor: str, folder: Path, tmp_path: Path) -> None:
    keys = [str(place.relative_to(folder)) for place in sorted(folder.rglob("*.jpg"))]
    bad = damaged(folder, [3, 4, 5, 19])
    quarantine = tmp_path / "bad.jsonl"
    made = files(folder, executor, on_bad_sample="skip", quarantine=str(quarantine)).epochs(2)
    with loaderkit.build(made) as loader:
        for epoch in range(2):
            batches = list(loader)
            found = [key for batch in batches for key in batch["__key__"]]
            assert found == [key for key in keys if key not in bad]
            assert [len(batch["image"]) for batch in batches] == [len(batch["__key__"]) for batch in batches]
            for batch in batches:
                for key, image, label in zip(batch["__key__"], batch["image"], batch["label"], strict=True):
                    index = int(key[2:4])
                    assert image.float().mean().item() == pytest.approx(40 + 6 * index, abs=4)
                    assert label.item() == "ab".index(key[0])
            assert len(lines_of(quarantine)) == 4 * (epoch + 1)
        assert num_failed(loader)["decode"] == 8
        assert num_failed(loader)["read"] == 0
    lines = lines_of(quarantine)
    assert all(line.keys() == {"key", "source", "stage", "error", "epoch", "position"} for line in lines)
    assert [line["key"] for line in lines] == sorted(bad) * 2
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4
    assert [line["position"] for line in lines] == [keys.index(key) for key in sorted(bad)] * 2
    for line in lines:
        assert line["stage"] == "decode"
        assert line["source"] == str(folder / line["key"])
        assert line["key"] in line["error"]


def test_skip_in_other_stages(folder: Path, tmp_path: Path) -> None:
    quarantine = tmp_path / "bad.jsonl"
    for function, stage in ((raise_for_seven, "mine"), (other_shape, "batch"), (no_dict, "mine")):
        quarantine.unlink(missing_ok=True)
        made = called(folder, function, "thread", on_bad_sample="skip", quarantine=str(quarantine)).epochs(1)
        with loaderkit.build(made) as loader:
            found = [key for batch in loader for key in batch["__key__"]]
            assert len(found) == NUM - 1
            assert "b/07.jpg" not in found
            assert num_failed(loader)[stage] == 1
        (line,) = lines_of(quarantine)
        assert (line["key"], line["stage"]) == ("b/07.jpg", stage)


def test_skip_of_what_vanished(folder: Path, tmp_path: Path) -> None:
    made = files(folder, on_bad_sample="skip", quarantine=str(tmp_path / "bad.jsonl")).epochs(1)
    with loaderkit.build(made) as loader:
        (folder / "a" / "04.jpg").unlink()
        found = [key for batch in loader for key in batch["__key__"]]
        assert len(found) == NUM - 1
        assert num_failed(loader)["read"] == 1
    (line,) = lines_of(tmp_path / "bad.jsonl")
    assert line["stage"] == "read"


@pytest.mark.parametrize("executor", THREADS)
def test_skip_of_a_whole_batch(executor: str, folder: Path) -> None:
    """Batch 1 of the canonical order is a/12 ... a/22."""
    damaged(folder, [12, 14, 16, 18, 20, 22])
    loader = loaderkit.build(files(folder, executor, on_bad_sample="skip"))
    iterator = iter(loader)
    assert len(next(iterator)["__key__"]) == 6
    with pytest.raises(StageError, match=r"all 6 samples of batch 1 of epoch 0 were bad"):
        next(iterator)
    assert threads_of_ours() == []


def test_skip_of_what_cannot_be_padded() -> None:
    class Mixed(Items):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.zeros(index, dtype=torch.int64 if index == 7 else torch.float32)}

    made = Pipeline.dataset(Mixed()).shuffle("none").read().batch(6, ragged={"x": "pad"}).errors(on_bad_sample="skip")
    with loaderkit.build(made.epochs(1)) as loader:
        assert [key for batch in loader for key in batch["__key__"]] == [str(n) for n in range(NUM) if n != 7]


def test_skip_with_padding_and_lists(folder: Path) -> None:
    class Words(Items):
        def __getitem__(self, index: int) -> Any:
            if index in self.bad:
                raise UnluckyError("bad")
            return {"x": torch.arange(index), "t": str(index), "r": torch.arange(index)}

    made = (
        Pipeline.dataset(Words(bad=(2, 5)))
        .shuffle("none")
        .read()
        .batch(6, ragged={"x": "pad", "r": "list"})
        .errors(on_bad_sample="skip")
    )
    with loaderkit.build(made) as loader:
        batch = next(iter(loader))
    assert batch["t"] == ["0", "1", "3", "4"]
    assert batch["x_sizes"].tolist() == [0, 1, 3, 4]
    assert batch["x"].tolist() == [[0] * 4, [0] * 4, [0, 1, 2, 0], [0, 1, 2, 3]]
    assert [tensor.tolist() for tensor in batch["r"]] == [[], [0], [0, 1, 2], [0, 1, 2, 3]]


def replacing(folder: Path, executor: str, workers: int, batches: int = 4, **errors: Any) -> Pipeline:
    return (
        Pipeline.files(folder, label="parent")
        .shuffle(seed=5)
        .epochs(3)
        .read()
        .decode()
        .random_resized_crop(8)
        .random_horizontal_flip()
        .color_jitter(brightness=0.3, hue=0.1)
        .batch(6)
        .normalize()
        .prefetch(executor=executor, concurrency=workers, batches=batches)
        .errors(on_bad_sample="replace", **errors)
    )


def digest(batch: dict[str, Any]) -> tuple[Any, ...]:
    return (batch["__key__"], batch["label"].tolist(), batch["image"].numpy().tobytes())


BAD = [3, 4, 5, 9, 14, 19]


def test_replace(folder: Path, tmp_path: Path) -> None:
    bad = damaged(folder, BAD)
    quarantine = tmp_path / "bad.jsonl"
    with loaderkit.build(replacing(folder, "thread", 2, quarantine=str(quarantine))) as loader:
        for epoch in range(3):
            batches = list(loader)
            assert [len(batch["__key__"]) for batch in batches] == [6] * 4
            found = [key for batch in batches for key in batch["__key__"]]
            assert not set(found) & set(bad)
            # What is good comes exactly where it would have come; only bad places hold another.
            assert len(set(found)) >= NUM - len(BAD)
            assert all(batch["label"].tolist() == ["ab".index(key[0]) for key in batch["__key__"]] for batch in batches)
            lines = [line for line in lines_of(quarantine) if line["epoch"] == epoch]
            assert sorted(line["key"] for line in lines) == sorted(bad)
            own = [line for line in lines if line["stage"] == "decode"]
            assert len(own) == len(lines)
        assert num_failed(loader)["decode"] >= 3 * len(BAD)


def test_replace_leaves_good_slots_as_they_were(folder: Path) -> None:
    with loaderkit.build(replacing(folder, "thread", 2)) as loader:
        whole = list(loader)
    bad = damaged(folder, BAD)
    with loaderkit.build(replacing(folder, "thread", 2)) as loader:
        found = list(loader)
    for one, other in zip(whole, found, strict=True):
        for slot, key in enumerate(one["__key__"]):
            if key not in bad:
                assert other["__key__"][slot] == key
                assert torch.equal(other["image"][slot], one["image"][slot])
            else:
                assert other["__key__"][slot] not in bad


def test_a_replacement_is_randomised_by_its_own_index(folder: Path) -> None:
    """The same sample in the same epoch looks the same, whether it stands in its own place or replaces another."""
    damaged(folder, BAD)
    seen: dict[str, bytes] = {}
    num_repeated = 0
    with loaderkit.build(replacing(folder, "inline", 1)) as loader:
        for batch in loader:
            for key, image in zip(batch["__key__"], batch["image"], strict=True):
                content = image.numpy().tobytes()
                num_repeated += key in seen
                assert seen.setdefault(key, content) == content
    assert num_repeated >= len(BAD) - 1


@pytest.mark.parametrize(
    ("executor", "workers", "batches"),
    [
        ("inline", 1, 4),
        ("thread", 1, 1),
        ("thread", 2, 4),
        ("thread", 8, 16),
    ],
)
def test_replaced_batches_are_the_same_however_they_are_made(
    executor: str, workers: int, batches: int, folder: Path, tmp_path: Path
) -> None:
    damaged(folder, BAD)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with loaderkit.build(replacing(folder, "inline", 1, 1, quarantine=str(first))) as loader:
        expected = [[digest(batch) for batch in loader] for _ in range(3)]
    with loaderkit.build(replacing(folder, executor, workers, batches, quarantine=str(second))) as loader:
        found = [[digest(batch) for batch in loader] for _ in range(3)]
    assert found == expected
    assert lines_of(first) == lines_of(second)
    assert expected[0] != expected[1]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_resuming_with_bad_samples(policy: str, folder: Path) -> None:
    damaged(folder, BAD)
    made = replacing(folder, "thread", 2).errors(on_bad_sample=policy)
    with loaderkit.build(made) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(digest(batch))
            states.append(json.dumps(loader.state_dict()))
    for number, state in enumerate(states):
        with loaderkit.build(made) as loader:
            loader.load_state_dict(json.loads(state))
            assert [digest(batch) for batch in loader] == whole[number + 1 :]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_ranks_share_out_bad_samples(policy: str, folder: Path, tmp_path: Path) -> None:
    bad = damaged(folder, BAD)
    quarantine = tmp_path / "bad.jsonl"
    made = replacing(folder, "thread", 2, quarantine=str(quarantine)).errors(on_bad_sample=policy)
    found: list[str] = []
    for rank in range(3):
        with loaderkit.build(made, rank=rank, world_size=3) as loader:
            for batch in loader:
                found += batch["__key__"]
    good = {f"{'ab'[i % 2]}/{i:02}.jpg" for i in range(NUM)} - set(bad)
    assert set(found) == good
    lines = lines_of(quarantine)
    assert {line["key"] for line in lines} == set(bad)
    if policy == "skip":
        assert sorted(found) == sorted(good)
        assert len(lines) == len(bad)


# ----------------------------------------------------------------------------------------------- bounds, quarantine


@pytest.mark.parametrize("executor", THREADS)
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_max_bad_samples(policy: str, executor: str, folder: Path, tmp_path: Path) -> None:
    damaged(folder, BAD)
    quarantine = tmp_path / "bad.jsonl"
    made = files(folder, executor, on_bad_sample=policy, max_bad_samples=len(BAD))
    with loaderkit.build(made) as loader:
        for _ in range(3):  # counted anew in every epoch
            list(loader)
    made = files(folder, executor, on_bad_sample=policy, max_bad_samples=len(BAD) - 1, quarantine=str(quarantine))
    loader = loaderkit.build(made)
    with pytest.raises(TooManyBadSamplesError, match=r"max_bad_samples = 5") as caught:
        list(loader)
    assert caught.value.key is not None
    assert caught.value.key in str(caught.value)
    assert caught.value.stage == "decode"
    assert isinstance(caught.value.__cause__, StageError)
    assert threads_of_ours() == []
    assert len(lines_of(quarantine)) == len(BAD)
    loader.close()


def test_no_bad_sample_may_be_allowed(folder: Path) -> None:
    with loaderkit.build(files(folder, on_bad_sample="skip", max_bad_samples=0)) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == NUM
    damaged(folder, [3])
    with pytest.raises(TooManyBadSamplesError):
        list(loaderkit.build(files(folder, on_bad_sample="skip", max_bad_samples=0)))


def test_what_was_read_ahead_is_not_counted(folder: Path, tmp_path: Path) -> None:
    """Only delivered batches count: the quarantine file is the same however far was read ahead."""
    damaged(folder, [1, 3, 5])  # batch 2 of the canonical order
    quarantine = tmp_path / "bad.jsonl"
    made = files(folder, on_bad_sample="skip", quarantine=str(quarantine)).prefetch(batches=16)
    with loaderkit.build(made) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
            assert lines_of(quarantine) == []
        next(iterator)
        assert len(lines_of(quarantine)) == 3


def test_with_raise_the_bad_sample_is_written_down_too(folder: Path, tmp_path: Path) -> None:
    (key,) = damaged(folder, [3])
    quarantine = tmp_path / "bad.jsonl"
    loader = loaderkit.build(files(folder, quarantine=str(quarantine)))
    failure(loader)
    assert [line["key"] for line in lines_of(quarantine)] == [key]
    loader.close()


def test_quarantine_lines_are_added(folder: Path, tmp_path: Path) -> None:
    damaged(folder, [3])
    quarantine = tmp_path / "bad.jsonl"
    quarantine.write_text('{"key": "earlier"}\n')
    made = files(folder, on_bad_sample="skip", quarantine=str(quarantine))
    with loaderkit.build(made) as loader:
        list(loader)
    assert [line["key"] for line in lines_of(quarantine)] == ["earlier", "b/03.jpg"]


@pytest.mark.parametrize("place", ["directory", "absent folder", "a file as folder"])
def test_a_quarantine_that_cannot_be_written(place: str, folder: Path, tmp_path: Path) -> None:
    path = {
        "directory": tmp_path,
        "absent folder": tmp_path / "absent" / "bad.jsonl",
        "a file as folder": folder / "a" / "00.jpg" / "bad.jsonl",
    }[place]
    with pytest.raises(ConfigError, match=r"errors\.quarantine.*cannot be written") as caught:
        loaderkit.build(files(folder, on_bad_sample="skip", quarantine=str(path)))
    assert str(path) in str(caught.value)


def test_keys_that_are_no_utf8(tmp_path: Path) -> None:
    """File names are bytes: one that is no UTF-8 must be reported and written down like any other."""
    root = tmp_path / "data"
    root.mkdir()
    for index in range(8):
        (root / f"{index}.jpg").write_bytes(picture(index))
    with open(os.fsencode(root) + b"/bad-\xff.jpg", "wb") as file:
        file.write(b"no picture")
    quarantine = tmp_path / "bad.jsonl"
    made = Pipeline.files(root).shuffle("none").read().decode().batch(3)
    error = failure(loaderkit.build(made))
    assert error.key == "bad-\udcff.jpg"
    assert "bad-\\udcff.jpg" in str(error)
    assert str(error).encode()
    with loaderkit.build(made.errors(on_bad_sample="skip", quarantine=str(quarantine))) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 8
    (line,) = lines_of(quarantine)
    assert line["key"] == "bad-\udcff.jpg"


# ------------------------------------------------------------------------------------------------------------- again


@pytest.mark.parametrize("executor", THREADS)
def test_many_failures_leave_nothing(executor: str, folder: Path) -> None:
    damaged(folder, [4])
    for _ in range(20):
        failure(loaderkit.build(files(folder, executor)))
    loader = loaderkit.build(files(folder, executor))
    for _ in range(10):
        with pytest.raises(StageError):
            list(loader)
        assert threads_of_ours() == []
        loader.set_epoch(0)


def test_a_quarantine_on_a_full_disk(tmp_path: Path) -> None:
    """A bad sample that cannot be written down is not passed over in silence, and nothing is left running."""
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    Pillow.new("RGB", (8, 8)).save(tmp_path / "good.jpg")
    pipeline = loaderkit.Pipeline.files(tmp_path, include="*.jpg").read().decode().batch(2)
    loader = loaderkit.build(pipeline.errors(on_bad_sample="skip", quarantine="/dev/full"))
    with pytest.raises(
        loaderkit.errors.ConnectorError, match=r"/dev/full cannot be written \(No space left.*'bad.jpg'"
    ):
        next(iter(loader))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]
    loader.close()
