"""fsspec's filesystems: over a real web server, what is missing, and that a URL's secrets stay in it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from buckets import epoch_of
from fsspec.implementations.memory import MemoryFileSystem

import loaderkit
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.errors import (
    AccessDeniedError,
    ConfigError,
    ConnectorError,
    MissingExtraError,
    ObjectChangedError,
    ObjectNotFoundError,
    TemporaryError,
    ThrottledError,
)


def test_a_pipeline(photos: Path, tmp_path: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.put(str(photos), "/photographs", recursive=True)
    wanted, _ = epoch_of({"kind": "files", "url": str(photos), "include": "**/*.jpg", "label": "parent"})
    source = {"kind": "files", "url": "fsspec+memory://photographs", "include": "**/*.jpg", "label": "parent"}
    found, store = epoch_of(source)
    assert found == wanted
    assert store["num_requests"] > 60
    cache = {"dir": str(tmp_path)}
    assert epoch_of({**source, "cache": cache})[0] == wanted
    found, store = epoch_of({**source, "cache": cache})
    assert (found, store["cache_hit_rate"]) == (wanted, 1.0)
    system.rm("/photographs", recursive=True)


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("az", "adlfs"), ("hf", "huggingface_hub")])
def test_the_package_of_a_scheme_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (package, "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"{scheme}:// needs the package {package}: pip install {package}"):
        loaderkit.build(
            {"source": {"kind": "files", "url": f"{scheme}://b/x"}, "stages": ["read", {"batch": {"size": 1}}]}
        )


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loaderkit\[fsspec\]'"):
        FsspecConnector("memory://x")


def test_unknown_schemes() -> None:
    for url in ("nonsense://x", "fsspec+nonsense://x"):
        with pytest.raises((ConfigError, MissingExtraError), match="nonsense"):
            loaderkit.build({"source": {"kind": "files", "url": url}, "stages": ["read", {"batch": {"size": 1}}]})


def test_a_chain_of_stores_has_to_be_meant(photos: Path, tmp_path: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as packed:
        for path in photos.rglob("*.jpg"):
            packed.write(path, path.relative_to(photos))
    system.put(str(tmp_path / "photos.zip"), "/photos.zip")
    source = {"kind": "files", "include": "**/*.jpg", "label": "parent"}
    wanted = epoch_of({**source, "url": str(photos)})[0]
    assert epoch_of({**source, "url": "fsspec+zip://::memory://photos.zip"})[0] == wanted
    system.rm("/photos.zip")
    for url in (f"http://host/x::file://{photos}", f"gs://b/::simplecache::file://{photos}", "https://u:secret@h/a::b"):
        with pytest.raises(ConfigError, match=r"write fsspec\+\w+://") as caught:
            loaderkit.build({"source": {**source, "url": url}, "stages": ["read", {"batch": {"size": 1}}]})
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("chain", ["reference://", "reference://::memory://", "simplecache::reference://::memory://"])
def test_reference_files_are_refused(chain: str, tmp_path: Path) -> None:
    """They are data, and would say what is read: here a file of this machine."""
    import fsspec

    (tmp_path / "secret").write_bytes(b"mine")
    system = fsspec.filesystem("memory")
    system.pipe("/refs.json", json.dumps({"a.jpg": [f"file://{tmp_path}/secret"]}).encode())
    with pytest.raises(ConfigError, match="a reference file is data"):
        FsspecConnector(f"{chain}refs.json" if chain.endswith("memory://") else f"{chain}?fo=refs.json")
    system.rm("/refs.json")


def test_what_is_not_below_the_url_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of links may lead anywhere; cut to size such a name would be that of another object."""
    connector = FsspecConnector("memory://below")
    writes_of(connector).put("a/b.jpg", b"abc")
    found = MemoryFileSystem().find("/below", detail=True)
    (details,) = found.values()
    more = {**found, "/other/b.jpg": details, "/belowx/b.jpg": details}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: more)
    assert [info.key for info in connector.list("")] == ["a/b.jpg"]
    writes_of(connector).delete("a/b.jpg")


def test_links_are_listed_and_those_that_lead_nowhere_said(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("d/a")
    (tmp_path / "nowhere").symlink_to("gone")
    connector = FsspecConnector(f"file://{tmp_path}")
    with pytest.warns(UserWarning, match=r"is left out \(1, such as 'nowhere'\)"):
        assert [(info.key, info.size) for info in connector.list("")] == [("d/a", 3), ("link", 3)]


def test_users_and_passwords_stay_inside() -> None:
    connector = FsspecConnector("memory://user:secret@place/x")
    assert "secret" not in connector.describe("a") + connector.traits.store
    with pytest.raises(ObjectNotFoundError) as caught:
        connector.stat("a")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_copy_for_another_process() -> None:
    connector = FsspecConnector("memory://copied")
    writes_of(connector).put("a", b"abc")
    buffer = bytearray(3)
    pickle.loads(pickle.dumps(connector)).read_into("a", 0, memoryview(buffer))
    assert buffer == b"abc"
    writes_of(connector).delete("a")


class TestWriting:
    """What fails leaves the object that was there, or none: never a part."""

    @pytest.fixture
    def connector(self) -> Iterator[FsspecConnector]:
        connector = FsspecConnector("memory://written")
        yield connector
        for info in list(connector.list("")):
            connector.delete(info.key)

    @pytest.mark.parametrize("is_replaced", [False, True])
    @pytest.mark.parametrize("how", ["fails", "fails half-way", "keeps a half"])
    def test_a_part(
        self, connector: FsspecConnector, monkeypatch: pytest.MonkeyPatch, how: str, is_replaced: bool
    ) -> None:
        if is_replaced:
            connector.put("d/a", b"old one")
        pipe_file = MemoryFileSystem.pipe_file

        def failing(system: MemoryFileSystem, path: str, value: bytes) -> None:
            if how != "fails":
                pipe_file(system, path, value[: len(value) // 2])
            if how != "keeps a half":
                raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(MemoryFileSystem, "pipe_file", failing)
        writer = connector.create("d/a", 6)
        writer.write(0, memoryview(b"newer!"))
        for write in (writer.commit, lambda: connector.put("d/a", b"newer!")):
            with pytest.raises(TemporaryError, match=r"memory://written/d/a: (broken|the store kept 3 of 6 bytes)"):
                write()
            left = {info.key: info.size for info in connector.list("")}
            assert left == ({"d/a": 7} if is_replaced and how == "fails" else {})
        monkeypatch.undo()
        assert writer.commit().size == 6

    def test_no_room_until_it_is_whole(self, connector: FsspecConnector, monkeypatch: pytest.MonkeyPatch) -> None:
        writer = connector.create("a", 6)

        def full(*arguments: object, **more: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(ConnectorError, match=r"memory://written/a: .*No space left.*TMPDIR"):
            writer.write(0, memoryview(b"newer!"))
        writer.abort()
        monkeypatch.setattr("tempfile.TemporaryFile", full)
        with pytest.raises(ConnectorError, match=r"memory://written/a: .*No space left.*TMPDIR"):
            connector.create("a", 6)

    def test_a_filesystem_that_only_reads(self, connector: FsspecConnector, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: object, **more: object) -> None:
            raise NotImplementedError

        monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
        with pytest.raises(ConnectorError, match="written/a: this filesystem of fsspec cannot do that"):
            connector.put("a", b"1")

    def test_a_file_is_not_moved_into_a_directory(self, tmp_path: Path) -> None:
        connector = FsspecConnector(f"file://{tmp_path}")
        connector.put("d/a", b"1")
        with pytest.raises(ConnectorError, match="d is a directory"):
            connector.put("d", b"2")
        assert [info.key for info in connector.list("")] == ["d/a"]


class AnswerError(Exception):
    """As libraries raise what a server answered."""

    def __init__(self, status: int) -> None:
        super().__init__("https://host/x?signature=secret")
        self.status = status


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AnswerError(404), ObjectNotFoundError),
        (AnswerError(403), AccessDeniedError),
        (AnswerError(429), ThrottledError),
        (AnswerError(503), ThrottledError),
        (AnswerError(500), TemporaryError),
        (ConnectionResetError("x"), TemporaryError),
        (TimeoutError("x"), TemporaryError),
        (PermissionError("x"), AccessDeniedError),
    ],
)
def test_errors(error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    connector = FsspecConnector("memory://errors")

    def fail(*arguments: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(kind) as caught:
        connector.read_into("a", 0, memoryview(bytearray(1)))
    assert "secret" not in str(caught.value)
    assert "memory://errors/a" in str(caught.value)


def test_a_server_that_knows_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = FsspecConnector("memory://ranges")
    writes_of(connector).put("a", b"abcdef")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda self, path, start, end: b"abcdef")
    with pytest.raises(OSError, match="6 bytes where 2 were requested: it does not support"):
        connector.read_into("a", 0, memoryview(bytearray(2)))


def test_replaced_objects() -> None:
    connector = FsspecConnector("memory://replaced")
    writes_of(connector).put("a", b"abc")
    etag = connector.stat("a").etag
    writes_of(connector).put("a", b"xyz")
    with pytest.raises(ObjectChangedError, match="start again"):
        connector.read_into("a", 0, memoryview(bytearray(3)), etag=etag)
