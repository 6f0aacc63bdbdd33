"""`kind: tar` and what `loaderkit pack` has written beside the archives: its plan while it is at work, its manifest then."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tar_archives import archive

from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import AccessDeniedError, SourceError
from loaderkit.sources.formats.tar_index import scan_tar
from loaderkit.sources.tar.source import TarArgs, TarSource

PLAN, MANIFEST = ".loaderkit-shards/plan.json", "loaderkit-shards.json"
INCLUDES: list[Any] = [
    "*.tar",
    "shard-*.tar",
    "shard-{000000..000003}.tar",
    ["shard-000000.tar", "shard-00000[1-3].tar"],
]


def source_over(connector: MemoryConnector, **args: Any) -> TarSource:
    return TarSource(connector, TarArgs.model_validate({"url": "data", **args}), lambda info: scan_tar(connector, info))


def shards_in(folder: str, *, num: int = 4, classes: Any = None) -> dict[str, bytes]:
    """As `loaderkit pack` leaves them."""
    shards = {f"shard-{number:06}.tar": archive([(f"{number}.txt", b"x" * 600 * number)]) for number in range(num)}
    described = [{"name": name, "num_bytes": len(data)} for name, data in shards.items()]
    manifest = json.dumps({"version": 1, "shards": described, "classes": classes}).encode()
    return {folder + name: data for name, data in {**shards, MANIFEST: manifest}.items()}


@pytest.fixture(params=["", "train/", "a/b/"])
def folder(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=range(len(INCLUDES)))
def include(request: Any, folder: str) -> list[str]:
    patterns = INCLUDES[request.param]
    return [folder + pattern for pattern in ([patterns] if isinstance(patterns, str) else patterns)]


def test_all_is_read_if_all_is_there(folder: str, include: list[str], rng: random.Random) -> None:
    classes = rng.choice([None, ["ant", "bee"]])
    source = source_over(MemoryConnector(shards_in(folder, classes=classes)), include=include)
    assert (len(source), source.classes) == (4, classes)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_an_unfinished_pack_is_named(folder: str, include: list[str], rng: random.Random, has_manifest: bool) -> None:
    """However many of its shards are there."""
    objects = shards_in(folder, num=4)
    if not has_manifest:
        del objects[folder + MANIFEST]
        for name in rng.sample(sorted(objects), rng.randrange(5)):
            del objects[name]
    with pytest.raises(SourceError, match=rf"the shards in memory://{folder} are being written, or .* was cut off"):
        source_over(MemoryConnector({**objects, folder + PLAN: b'{"version": 1}'}), include=include)


def test_what_is_missing_or_cut_is_named(folder: str, include: list[str], rng: random.Random) -> None:
    objects = shards_in(folder)
    name = f"{folder}shard-00000{rng.randrange(4)}.tar"
    if is_cut := rng.random() < 0.5:
        objects[name] = objects[name][:-512]
    else:
        del objects[name]
    there = rf"has {len(objects[name])} bytes" if is_cut else "is not there"
    with pytest.raises(
        SourceError, match=rf"memory://{name} {there}, and loaderkit-shards\.json beside it has it with"
    ):
        source_over(MemoryConnector(objects), include=include)


def test_what_is_added_is_named(folder: str, include: list[str], rng: random.Random) -> None:
    """An archive of an earlier run that had more shards, or of somebody's."""
    objects, added = shards_in(folder), rng.choice(["shard-000004.tar", "shard-0.tar", "val.tar"])
    connector = MemoryConnector({**objects, folder + added: objects[f"{folder}shard-000001.tar"]})
    wants_it = include[0] == f"{folder}*.tar" or (include[0] == f"{folder}shard-*.tar" and added != "val.tar")
    if not wants_it:
        assert len(source_over(connector, include=include)) == 4
        return
    with pytest.raises(SourceError, match=rf"memory://{folder}{added} is none of the shards in loaderkit-shards\.json"):
        source_over(connector, include=include)
    both = [f"{folder}shard-000001.tar", folder + added]
    with pytest.raises(SourceError, match="is none of the shards"):
        source_over(connector, include=both)
    assert len(source_over(connector, include=both[1])) == 1


def test_some_of_the_shards_are_read_if_some_are_asked_for(folder: str, rng: random.Random) -> None:
    objects = shards_in(folder, classes=["ant"])
    names = rng.sample([name for name in objects if name.endswith(".tar")], 2)
    for name in {*objects} - {*names, folder + MANIFEST}:
        del objects[name]
    source = source_over(MemoryConnector(objects), include=names)
    assert (len(source), source.classes) == (2, ["ant"])


def test_only_files_of_these_names_are_manifests() -> None:
    """Not those of other names, of other programs or of arrays."""
    objects = shards_in("")
    other = {"old-loaderkit-shards.json": shards_in("", num=9)[MANIFEST], f"old{PLAN}": b"{}"}
    assert len(source_over(MemoryConnector({**objects, **other}))) == 4
    del objects["shard-000003.tar"]
    for text in (b"", b"[]", b"\xff", b'{"shards": [3]}', b'{"shards": [], "array": "image.npy", "classes": ["ant"]}'):
        source = source_over(MemoryConnector({**objects, MANIFEST: text}))
        assert (len(source), source.classes) == (3, None)


@pytest.mark.parametrize("include", ["**/*.tar", "{train,val}/*.tar", ["train/shard-*.tar", "val/shard-00000?.tar"]])
def test_each_folder_has_its_own(include: Any) -> None:
    train, val = shards_in("train/", classes=["ant", "bee"]), shards_in("val/", num=2, classes=["ant", "bee"])
    source = source_over(MemoryConnector(train | val), include=include)
    assert (len(source), source.classes) == (6, ["ant", "bee"])
    others = shards_in("val/", num=2, classes=["ant", "cat"])
    assert source_over(MemoryConnector(train | others), include=include).classes is None
    del val["val/shard-000001.tar"]
    with pytest.raises(SourceError, match=r"memory://val/shard-000001\.tar is not there"):
        source_over(MemoryConnector(train | val), include=include)
    with pytest.raises(SourceError, match="the shards in memory://val/ are being written"):
        source_over(MemoryConnector(train | {f"val/{PLAN}": b"{}"}), include=include)


class NotListed(MemoryConnector):
    """Of a store that lists nothing, and that has no answer, or a page, for what it does not have."""

    def __init__(self, objects: dict[str, bytes], page: bytes | None = None) -> None:
        super().__init__(objects)
        self._page = page

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise AccessDeniedError("no")

    def stat(self, key: str) -> ObjectInfo:
        if not [info for info in super().list(key) if info.key == key]:
            if self._page is None:
                raise AccessDeniedError("no")
            self.put(key, self._page)
        return super().stat(key)


def test_a_store_that_is_not_listed(folder: str, rng: random.Random) -> None:
    include = folder + "shard-{000000..000003}.tar"
    objects = shards_in(folder, classes=["ant"])
    assert source_over(NotListed(objects), include=include).classes == ["ant"]
    with pytest.raises(SourceError, match="are being written"):
        source_over(NotListed({**objects, folder + PLAN: b'{"version": 1}'}), include=include)
    objects[f"{folder}shard-000003.tar"] += bytes(512)
    with pytest.raises(SourceError, match=r"shard-000003\.tar has \d+ bytes"):
        source_over(NotListed(objects), include=include)
    del objects[folder + MANIFEST]
    assert len(source_over(NotListed(objects), include=include)) == 4
    assert len(source_over(NotListed(objects, b"<html>No such page"), include=include)) == 4
