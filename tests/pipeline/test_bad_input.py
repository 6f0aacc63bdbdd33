from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_files import (  # noqa: F401 - fixtures
    DAMAGES,
    THREADS,
    _folder,
    _nothing_left_running,
    assert_names,
    cut_in_half,
    failure,
    files,
    picture,
    threads_of_ours,
)

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import (
    ConfigError,
    ConnectorError,
    FormatError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    StageError,
)

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


def tars(folder: Path, executor: Any = "thread", **errors: Any) -> Pipeline:
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
