from __future__ import annotations

import builtins
import errno
import io
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.hashing import address_of_hash
from loaderkit.connectors.base import BulkReads, Hashed, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.errors import ConnectorError, ObjectChangedError, ObjectNotFoundError, ShortReadError


def keys(root: Path, prefix: str = "") -> list[str]:
    return [info.key for info in FileConnector(root).list(prefix)]


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(ObjectNotFoundError, match=r"a part of its path is a file, not a directory; check the path"):
        writes_of(FileConnector(str(tmp_path / "a"))).put("b", b"1")


def test_missing_root(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"no directory.*nowhere"):
        keys(tmp_path / "nowhere")


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.tgz").write_bytes(b"")
    with pytest.raises(ObjectNotFoundError, match=r"x\.tgz' is a file, and a directory is wanted.*`include`"):
        keys(tmp_path / "x.tgz")
    with pytest.raises(ObjectNotFoundError, match="a part of its path is a file"):
        keys(tmp_path / "x.tgz" / "a")


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "a" / "x")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / ".hidden").symlink_to(tmp_path / "missing")
    with pytest.warns(UserWarning, match=r"links that lead nowhere are left out \(2, such as 'nowhere'\)"):
        assert keys(tmp_path) == ["a/x", "b/x", "c"]
    assert FileConnector(tmp_path).stat("c").size == 3
    with pytest.raises(ObjectNotFoundError):
        FileConnector(tmp_path).stat("self")


def test_only_regular_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # its path may have 107 bytes
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
    writes_of(connector).put("x", b"data")
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
        writes_of(connector).put(key, b"")
    listing = connector.list("")
    assert next(listing).key == "a/1"
    (tmp_path / "b" / "1").unlink()
    (tmp_path / "b").rmdir()
    assert [info.key for info in listing] == ["c/1"]


@given(st.integers(0, 2**23), st.integers(0, 2**23 + 5000), st.integers(0, 5 * 2**20), st.integers(0, 70))
def test_past_the_page_cache_as_through_it(size: int, start: int, length: int, offset: int) -> None:
    """At places, lengths and in memory of any alignment; beyond the file's end with the same words."""
    content = np.random.default_rng(size).bytes(size)
    plain, around = bytearray(length + offset), bytearray(length + offset)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x").write_bytes(content)
        connector = FileConnector(folder)
        try:
            connector.read_into("x", start, memoryview(plain)[offset:])
        except ShortReadError as error:
            with pytest.raises(ShortReadError, match=re.escape(str(error))):
                connector.read_direct("x", start, memoryview(around)[offset:])
            return
        connector.read_direct("x", start, memoryview(around)[offset:])
    assert around == plain
    assert around[offset:] == content[start : start + length]


@pytest.mark.parametrize("key", ["pipe", "folder", "none", "old", "../old"])
def test_what_is_refused_is_refused_past_the_page_cache(tmp_path: Path, key: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_bytes(b"abc")
    connector = FileConnector(tmp_path)
    for start, etag in ((0, "1-3"), (-1, None)):
        with pytest.raises(ConnectorError) as plain:
            connector.read_into(key, start, memoryview(bytearray(3)), etag=etag)
        with pytest.raises(type(plain.value), match=re.escape(str(plain.value))):
            connector.read_direct(key, start, memoryview(bytearray(3)), etag=etag)


def test_truncated_since(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    writes_of(connector).put("x", b"0123456789")
    os.truncate(tmp_path / "x", 4)
    with pytest.raises(ShortReadError, match="after 4 of the 10 bytes"):
        connector.read_into("x", 0, memoryview(bytearray(10)))


class TestGathering:
    @staticmethod
    def gathered(root: Path, starts: list[int], length: int, key: str = "x", etag: str | None = None) -> bytes:
        buffer = bytearray(len(starts) * length)
        FileConnector(root).gather_into(key, np.array(starts, np.int64), length, memoryview(buffer), etag=etag)
        return bytes(buffer)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(length=st.integers(1, 50), numbers=st.lists(st.integers(0, 19), max_size=40))
    def test_any_records_in_any_order(self, tmp_path: Path, length: int, numbers: list[int]) -> None:
        data = bytes(n % 251 for n in range(1000))
        (tmp_path / "x").write_bytes(data)
        etag = FileConnector(tmp_path).stat("x").etag
        wanted = b"".join(data[n * length : (n + 1) * length] for n in numbers)
        assert self.gathered(tmp_path, [n * length for n in numbers], length, etag=etag) == wanted

    def test_errors_are_those_of_reading(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"0123456789")
        (tmp_path / "dir").mkdir()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ShortReadError, match="ended after 1 of the 3 bytes requested at offset 9: its size is 10"):
            self.gathered(tmp_path, [0, 3, 9], 3)
        with pytest.raises(ShortReadError, match="ended after 2 of the 4 bytes requested at offset 8"):
            self.gathered(tmp_path, [0, 4, 8], 4)  # three neighbours, read together
        with pytest.raises(ShortReadError, match="ended after 0 of the 1 bytes"):
            self.gathered(tmp_path, [0, 1 << 60], 1)
        with pytest.raises(ShortReadError, match=r"the offset -1 is negative"):
            self.gathered(tmp_path, [0, 1, -1], 1)
        with pytest.raises(ShortReadError, match="the offset -2 is negative"):
            self.gathered(tmp_path, [-2, 0], 2)
        with pytest.raises(ObjectChangedError):
            self.gathered(tmp_path, [0], 1, etag="other")
        with pytest.raises(ObjectNotFoundError, match="is a directory"):
            self.gathered(tmp_path, [0], 1, "dir")
        with pytest.raises(ObjectNotFoundError, match="no file"):
            self.gathered(tmp_path, [0], 1, "no")
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ObjectNotFoundError, match="not a file"):
            self.gathered(tmp_path, [0], 1, "pipe")
        assert len(os.listdir("/proc/self/fd")) == before

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        length=st.integers(1, 50),
        batches=st.lists(st.lists(st.integers(-3, 103), max_size=8), min_size=1, max_size=12),
        change=st.sampled_from(["none", "other bytes", "longer", "shorter", "gone", "a directory"]),
        when=st.integers(0, 11),
    )
    def test_the_file_is_asked_anew_every_time(
        self, tmp_path: Path, length: int, batches: list[list[int]], change: str, when: int
    ) -> None:
        """The same bytes and the same errors as of a new connector, whatever becomes of the file."""
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        path = root / "x"
        path.write_bytes(bytes(n % 251 for n in range(100)))
        etag = FileConnector(root).stat("x").etag
        connector = FileConnector(root)
        _outcome(connector, np.array([0], np.int64), 1, etag)
        for number, numbers in enumerate(batches):
            if number == when:
                _alter(path, change)
            starts = np.array(numbers, np.int64)
            found, wanted = (
                _outcome(one, starts, length, etag if number % 2 else None) for one in (connector, FileConnector(root))
            )
            assert found == wanted

    def test_nothing_and_too_little_room(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"0123456789")
        assert self.gathered(tmp_path, [], 3) == b""
        with pytest.raises(ValueError, match="do not fill a buffer of 5"):
            FileConnector(tmp_path).gather_into("x", np.zeros(2, np.int64), 3, memoryview(bytearray(5)))

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(ranges=st.lists(st.tuples(st.integers(-1, 60), st.integers(0, 30), st.integers(0, 4)), max_size=20))
    def test_scattered_ranges_are_read_as_one_by_one(self, tmp_path: Path, ranges: list[tuple[int, int, int]]) -> None:
        """(start, length, gap behind it in the buffer) of each; some begin before the file, some end behind it."""
        data = bytes(range(70))
        (tmp_path / "x").write_bytes(data)
        connector = FileConnector(tmp_path)
        starts, lengths, gaps = np.array(ranges, np.int64).reshape(-1, 3).T.copy()
        offsets = np.cumsum(lengths + gaps) - lengths
        found, wanted = (bytearray(b"." * int((lengths + gaps).sum())) for _ in range(2))
        message = ""
        for start, length, offset in zip(starts.tolist(), lengths.tolist(), offsets.tolist(), strict=True):
            try:
                connector.read_into("x", start, memoryview(wanted)[offset : offset + length])
            except ConnectorError as error:
                if length:
                    message = str(error)
                    break
        etag = connector.stat("x").etag
        if message:
            with pytest.raises(ShortReadError, match=re.escape(message)):
                connector.scatter_into("x", starts, lengths, offsets, memoryview(found), etag=etag)
        else:
            connector.scatter_into("x", starts, lengths, offsets, memoryview(found), etag=etag)
            assert found == wanted

    def test_a_scattered_range_of_nothing_may_begin_anywhere(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"0123456789")
        starts, lengths, offsets = np.array([[-1, 3, 99, 5], [0, 2, 0, 1], [0, 0, 2, 2]], np.int64)
        found = bytearray(3)
        FileConnector(tmp_path).scatter_into("x", starts, lengths, offsets, memoryview(found))
        assert found == b"345"

    def test_scattered_ranges_of_no_such_file(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"0123456789")
        zero = np.zeros(1, np.int64)
        for key, etag, kind in (("x", "other", ObjectChangedError), ("y", None, ObjectNotFoundError)):
            with pytest.raises(kind):
                FileConnector(tmp_path).scatter_into(key, zero, zero + 4, zero, memoryview(bytearray(4)), etag=etag)


def _alter(path: Path, change: str) -> None:
    if change in ("gone", "a directory"):
        path.unlink()
    if change == "a directory":
        path.mkdir()
    if change in ("other bytes", "longer", "shorter"):
        path.write_bytes(bytes({"other bytes": 100, "longer": 103, "shorter": 60}[change]))
        os.utime(path, (1, 1))  # whatever the time of change is counted in


def _outcome(connector: FileConnector, starts: NDArray[np.int64], length: int, etag: str | None) -> bytes | str:
    """What was read, or what was said instead."""
    buffer = bytearray(len(starts) * length)
    try:
        connector.gather_into("x", starts, length, memoryview(buffer), etag=etag)
    except ConnectorError as error:
        return f"{type(error).__name__}: {error}"
    return bytes(buffer)


def test_the_c_module_refuses_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    path = str(tmp_path / "x")
    gather: Any = native.gather_ranges
    for starts, length, room in [
        (np.zeros(2, np.int32), 4, 4),
        (np.zeros(2, np.float64), 4, 8),
        (np.zeros((2, 1), np.int64), 4, 8),
        (np.zeros(4, np.int64)[::2], 4, 8),
        (np.zeros(2, np.int64), 0, 0),
        (np.zeros(2, np.int64), -4, 8),
        (np.zeros(2, np.int64), 4, 9),
        (np.zeros(2, np.int64), 4, 12),
        (np.zeros(2, np.int64), 1 << 62, 8),
        (b"12345678", 8, 8),
    ]:
        with pytest.raises((ValueError, BufferError)):
            gather(path, starts, length, bytearray(room))
    for start, size, offset in ((0, 4, 1), (0, 5, 0), (0, -1, 0), (0, 1, -1), (0, 2**62, 2**62)):
        with pytest.raises(IndexError):
            native.scatter_ranges(
                path, np.array([start]), np.array([size]), np.array([offset]), memoryview(bytearray(4))
            )


def test_errors_leave_no_descriptor_open(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    writes_of(connector).put("x", b"0123456789")
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
    writes_of(connector).put("dir/x", b"1")
    with pytest.raises(ConnectorError):
        writes_of(connector).put("dir", b"2")
    with pytest.raises(ObjectNotFoundError):
        writes_of(connector).put("../y", b"2")
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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_mounted_bucket_cannot_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    connector = FileConnector(tmp_path)
    for data in (b"first", b"second"):
        writes_of(connector).put("d/a.idx", data)
        assert (tmp_path / "d" / "a.idx").read_bytes() == data
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["a.idx"]


def test_a_mounted_bucket_that_is_full_keeps_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        monkeypatch.setattr(builtins, "open", full)
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def full(path: str, mode: str) -> Any:
        if mode == "rb":
            return io.FileIO(path)
        Path(path).write_bytes(b"par")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConnectorError, match="No space left"):
        writes_of(FileConnector(tmp_path)).put("a.idx", b"parts")
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_fails_otherwise_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    connector = FileConnector(tmp_path)
    writes_of(connector).put("a", b"old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConnectorError):
        writes_of(connector).put("a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


class TestHashing:
    """Blocks that are hashed as they are read are those of the library, and what is wrong is said as ever."""

    @given(st.binary(max_size=5000), st.integers(0, 6000), st.integers(0, 6000), st.integers(1, 3000), st.booleans())
    def test_as_the_library_hashes(
        self, content: bytes, start: int, length: int, block_bytes: int, direct: bool
    ) -> None:
        address = address_of_hash()
        assert address is not None, "the library that is installed for the tests shows its function"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "x").write_bytes(content)
            connector = FileConnector(folder)
            plain, hashed = bytearray(length), bytearray(length)

            def ask() -> Hashed | None:
                how: dict[str, Any] = {"block_bytes": block_bytes, "address": address, "direct": direct}
                return connector.read_hashed("x", start, memoryview(hashed), **how)

            try:
                connector.read_into("x", start, memoryview(plain))
            except ConnectorError as error:
                with pytest.raises(type(error), match=re.escape(str(error))):
                    ask()
                return
            found = ask()
            assert found is not None
            assert hashed == plain == content[start : start + length]
            blocks = [plain[lo : lo + block_bytes] for lo in range(0, length, block_bytes)]
            assert found.hashes == [xxhash.xxh3_64_intdigest(block) for block in blocks]
            assert found.took_s >= 0

    @given(st.integers(0, 2**23), st.integers(0, 2**22), st.sampled_from([4096, 3000, 2**18, 2**22]), st.booleans())
    def test_blocks_of_many_steps(self, size: int, start: int, block_bytes: int, at_border: bool) -> None:
        start = min(start // block_bytes * block_bytes if at_border else start, size)
        content = np.random.default_rng(size).bytes(size)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "x").write_bytes(content)
            data = bytearray(size - start)
            how: dict[str, Any] = {"block_bytes": block_bytes, "address": address_of_hash(), "direct": True}
            found = FileConnector(folder).read_hashed("x", start, memoryview(data), **how)
        assert found is not None
        assert data == content[start:]
        blocks = [content[lo : lo + block_bytes] for lo in range(start, size, block_bytes)]
        assert found.hashes == [xxhash.xxh3_64_intdigest(block) for block in blocks]

    def test_a_connector_that_knows_no_way_around(self, tmp_path: Path) -> None:
        class Own(FileConnector):
            def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
                super().read_into(key, start, buffer, etag=etag)

            def bulk(self) -> BulkReads:
                return BulkReads(read_hashed=self.read_hashed)

        (tmp_path / "x").write_bytes(b"abc")
        files = RetryConnector(Own(tmp_path), RetryPolicy())
        data = memoryview(bytearray(3))
        read_hashed = files.bulk().read_hashed
        assert read_hashed is not None
        found = read_hashed("x", 0, data, block_bytes=4, address=address_of_hash() or 0, direct=True)
        assert found is not None
        assert found.hashes == [xxhash.xxh3_64_intdigest(b"abc")]
        assert files.bulk().read_direct is None
        files.close()

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "folder").mkdir()
        (tmp_path / "old").write_bytes(b"abc")
        connector = FileConnector(tmp_path)
        for key, etag in (("pipe", None), ("folder", None), ("none", None), ("old", "1-3")):
            with pytest.raises(ConnectorError) as plain:
                connector.read_into(key, 0, memoryview(bytearray(3)), etag=etag)
            with pytest.raises(type(plain.value), match=re.escape(str(plain.value))):
                connector.read_hashed(
                    key, 0, memoryview(bytearray(3)), block_bytes=2, address=address_of_hash() or 0, etag=etag
                )

    def test_retries_pass_it_on(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"abc")
        address = address_of_hash()
        assert address is not None
        files = RetryConnector(FileConnector(tmp_path), RetryPolicy())
        data = memoryview(bytearray(3))
        read_hashed = files.bulk().read_hashed
        assert read_hashed is not None
        found = read_hashed("x", 0, data, block_bytes=2, address=address)
        assert found is not None
        assert found.hashes == [xxhash.xxh3_64_intdigest(b"ab"), xxhash.xxh3_64_intdigest(b"c")]
        files.close()
