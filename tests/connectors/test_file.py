from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConnectorError, ObjectNotFoundError, ShortReadError


def keys(root: Path, prefix: str = "") -> list[str]:
    return [info.key for info in FileConnector(root).list(prefix)]


def test_missing_root(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"no directory.*nowhere"):
        keys(tmp_path / "nowhere")


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectNotFoundError):
        keys(tmp_path / "file")


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "a" / "x")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    assert keys(tmp_path) == ["a/x", "b/x", "c"]
    assert FileConnector(tmp_path).stat("c").size == 3
    with pytest.raises(ObjectNotFoundError):
        FileConnector(tmp_path).stat("self")


def test_only_regular_files_count(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert keys(tmp_path) == [".hidden"]
    for name in ("pipe", "empty"):
        with pytest.raises(ObjectNotFoundError, match="not a file"):
            FileConnector(tmp_path).read_into(name, 0, memoryview(bytearray(1)))


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    for name in (b"\xe9.jpg", b"a.jpg", b"\xff"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(name)
    connector = FileConnector(tmp_path)
    found = [info.key for info in connector.list("")]
    assert [os.fsencode(key) for key in found] == [b"a.jpg", b"\xe9.jpg", b"\xff"]
    buffer = bytearray(5)
    connector.read_into(found[1], 0, memoryview(buffer))
    assert bytes(buffer) == b"\xe9.jpg"


def test_a_file_that_vanished_or_became_a_directory(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    connector.write("x", b"data")
    (info,) = connector.list("")
    (tmp_path / "x").unlink()
    with pytest.raises(ObjectNotFoundError, match="moved or deleted"):
        connector.read_into("x", 0, memoryview(bytearray(4)), etag=info.etag)
    (tmp_path / "x").mkdir()
    with pytest.raises(ObjectNotFoundError, match="is a directory"):
        connector.read_into("x", 0, memoryview(bytearray(4)), etag=info.etag)


def test_a_directory_that_vanishes_while_listing(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    for key in ("a/1", "b/1", "c/1"):
        connector.write(key, b"")
    listing = connector.list("")
    assert next(listing).key == "a/1"
    (tmp_path / "b" / "1").unlink()
    (tmp_path / "b").rmdir()
    assert [info.key for info in listing] == ["c/1"]


def test_truncated_since(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    connector.write("x", b"0123456789")
    os.truncate(tmp_path / "x", 4)
    with pytest.raises(ShortReadError, match="after 4 of the 10 bytes"):
        connector.read_into("x", 0, memoryview(bytearray(10)))


def test_errors_leave_no_descriptor_open(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    connector.write("x", b"0123456789")
    (tmp_path / "dir").mkdir()

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for key, start, etag in [("x", 5, None), ("x", 0, "other"), ("dir", 0, None), ("no", 0, None), ("x", -1, None)]:
        for _ in range(20):
            with pytest.raises(ConnectorError):
                connector.read_into(key, start, memoryview(bytearray(10)), etag=etag)
    listing = connector.list("")
    next(listing)
    assert num_open() == before


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    connector.write("dir/x", b"1")
    with pytest.raises(ConnectorError):
        connector.write("dir", b"2")
    with pytest.raises(ObjectNotFoundError):
        connector.write("../y", b"2")
    assert keys(tmp_path) == ["dir/x"]
    assert keys(tmp_path.parent, tmp_path.name) == [f"{tmp_path.name}/dir/x"]


def test_deep_directories(tmp_path: Path) -> None:
    key = "d/" * 1500 + "x"
    depth = os.open(tmp_path, os.O_RDONLY)
    # Step by step: os.makedirs calls itself once a level.
    for _ in range(1500):
        os.mkdir("d", dir_fd=depth)
        below = os.open("d", os.O_RDONLY, dir_fd=depth)
        os.close(depth)
        depth = below
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=depth))
    os.close(depth)
    try:
        assert keys(tmp_path) == [key]
        assert FileConnector(tmp_path).stat(key).size == 0
    finally:  # pytest's own cleaning calls itself once a level, too
        (tmp_path / key).unlink()
        for level in range(1500, 0, -1):
            os.rmdir(f"{tmp_path}/{'d/' * level}")
