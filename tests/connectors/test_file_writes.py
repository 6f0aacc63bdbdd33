"""Writing files: what goes past the page cache, what is made durable and when, and what a full or broken disk leaves."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from power_cut import DroppingConnector

from loaderkit.connectors import file_writes
from loaderkit.connectors.base import ObjectWriter, Writes, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.connectors.writing import put_in_parts
from loaderkit.errors import AccessDeniedError, ConnectorError, ObjectNotFoundError

PART = 8 << 20
CONTENT = np.random.default_rng(1).integers(0, 256, PART + 5000, np.uint8).tobytes()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def aligned(data: bytes) -> memoryview:
    memory = np.empty(len(data) + 4096, np.uint8)
    begin = -memory.ctypes.data % 4096
    memory[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return memory[begin : begin + len(data)].data.cast("B")


def begun(writes: Writes, key: str, data: memoryview) -> ObjectWriter:
    writer = writes.create(key, len(data))
    for start in range(0, len(data), PART):
        writer.write(start, data[start : start + PART])
    return writer


class Calls:
    """Records calls of a function of `os`, and lets them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.real: Callable[..., Any] = getattr(os, name)
        self.arguments: list[Any] = []
        self.errors: list[int | None] = []  # of the next calls, the last first; none: they go on
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.arguments.append(arguments)
        number = self.errors.pop() if self.errors else None
        if number is not None:
            raise OSError(number, os.strerror(number))
        return self.real(*arguments, **more)


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


@pytest.fixture
def direct(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "try", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no O_DIRECT")
    finally:
        (tmp_path / "try").unlink()


class TestPastThePageCache:
    def lengths(self, writes: Calls) -> dict[bool, int]:
        return {
            way: sum(len(data) for fd, data, _ in writes.arguments if self.ways[fd] == way) for way in (True, False)
        }

    @pytest.fixture(autouse=True)
    def _watched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: None) -> None:
        self.ways: dict[int, bool] = {}
        self.pwrite = Calls(monkeypatch, "pwrite")
        real = self.pwrite.real

        def noting(fd: int, data: memoryview, start: int) -> int:
            self.ways[fd] = is_direct(fd)
            return int(real(fd, data, start))

        self.pwrite.real = noting

    def test_all_but_the_last_bytes(self, tmp_path: Path) -> None:
        begun(writes_of(FileConnector(tmp_path)), "a", aligned(CONTENT)).commit()
        assert files_of(tmp_path) == {"a": CONTENT}
        assert self.lengths(self.pwrite) == {True: PART + 4096, False: 904}

    def test_not_from_memory_that_is_not_aligned(self, tmp_path: Path) -> None:
        begun(writes_of(FileConnector(tmp_path)), "a", aligned(b"x" + CONTENT)[1:]).commit()
        assert files_of(tmp_path) == {"a": CONTENT}
        assert self.lengths(self.pwrite) == {True: 0, False: len(CONTENT)}

    def test_a_file_system_that_wants_more_gets_ordinary_writes(self, tmp_path: Path) -> None:
        self.pwrite.errors = [errno.EINVAL]
        begun(writes_of(FileConnector(tmp_path)), "a", aligned(CONTENT)).commit()
        assert files_of(tmp_path) == {"a": CONTENT}
        del self.pwrite.arguments[0]
        assert self.lengths(self.pwrite) == {True: 0, False: len(CONTENT)}

    @pytest.mark.parametrize("is_aligned", [True, False])
    def test_a_write_that_stops_early_is_continued(self, tmp_path: Path, is_aligned: bool) -> None:
        noting = self.pwrite.real

        def stopping(fd: int, data: memoryview, start: int) -> int:
            num_written = len(data) // 3 // 4096 * 4096 or len(data)
            noting(fd, data[:num_written], start)
            return num_written if is_aligned else max(1, num_written - 100)

        self.pwrite.real = stopping
        begun(writes_of(FileConnector(tmp_path)), "a", aligned(CONTENT)).commit()
        assert files_of(tmp_path) == {"a": CONTENT}


def test_a_file_system_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    begun(writes_of(FileConnector(tmp_path)), "a", aligned(CONTENT)).commit()
    assert files_of(tmp_path) == {"a": CONTENT}


class TestDurability:
    def test_bytes_at_commit_and_names_at_sync(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[str] = []
        for name in ("fsync", "fdatasync"):
            calls = Calls(monkeypatch, name)
            calls.real = lambda fd: synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))

        def then() -> list[str]:
            names, synced[:] = [re.sub(r"\.\w{16}\.tmp", "temporary", name) for name in synced], []
            return names

        writes = writes_of(FileConnector(tmp_path / "root"))
        writer = begun(writes, "a/b/c", memoryview(b"1"))
        assert then() == [".", "root", "root/a"]  # where directories were created
        writer.commit()
        assert then() == ["root/a/b/temporary"]
        writes.put("a/d", b"2")
        assert then() == ["root/a/temporary", "root/a"]
        writes.sync("a")
        assert then() == ["root/a/b", "root/a"]
        writes.rename("a", "x/y")
        assert sorted(then()) == ["root", "root", "root/x"]
        writes.delete("x/y/d")
        writes.delete("x/y/b/c")
        writes.clear("x/y/b")
        writes.sync("x/y/b")
        assert set(then()) == {"root/x/y"}
        writes.sync("")
        assert then() == ["root/x/y", "root/x", "root"]

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    def test_a_sync_that_failed_is_not_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """The kernel reports a page that could not be written once; a second fsync would succeed without it."""
        connector = RetryConnector(FileConnector(tmp_path), RetryPolicy())
        writer = begun(writes_of(connector), "a", memoryview(b"1"))
        fdatasync = Calls(monkeypatch, "fdatasync")
        fdatasync.errors = [number]
        with pytest.raises(ConnectorError, match=f"{tmp_path}/a.*{os.strerror(number)}.*write it again"):
            writer.commit()
        assert len(fdatasync.arguments) == 1
        writer.abort()
        assert files_of(tmp_path) == {}

    def test_directories_that_cannot_be_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        writes = writes_of(FileConnector(tmp_path))
        writes.put("a/b", b"1")
        fsync = Calls(monkeypatch, "fsync")
        fsync.errors = [errno.EINVAL]
        writes.sync("a")
        fsync.errors = [errno.EIO]
        with pytest.raises(ConnectorError, match=r"/a'.*Input/output error"):
            writes.sync("a")


class TestFailures:
    """A full or broken disk: the file is named, and nothing is left."""

    @pytest.fixture(params=["allocated", "written"])
    def _small_disk(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        """No file may be longer than 1 MiB, with and without `fallocate`."""
        if request.param == "written":
            monkeypatch.setattr("loaderkit.connectors.file_writes._allocate", lambda fd, size: None)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    @pytest.mark.usefixtures("_small_disk")
    def test_a_file_that_is_too_large(self, tmp_path: Path) -> None:
        writes = writes_of(RetryConnector(FileConnector(tmp_path), RetryPolicy()))
        writes.put("a", b"old")
        for data in (memoryview(CONTENT), aligned(CONTENT)):
            with pytest.raises(ConnectorError, match=f"{tmp_path}/a.*File too large"):
                put_in_parts(writes, "a", data)
        assert files_of(tmp_path) == {"a": b"old"}

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    def test_no_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        writes = writes_of(RetryConnector(FileConnector(tmp_path), RetryPolicy()))
        pwrite = Calls(monkeypatch, "pwrite")
        pwrite.errors = [number, None]
        with pytest.raises(ConnectorError, match=f"{tmp_path}/d/a.*{os.strerror(number)}"):
            put_in_parts(writes, "d/a", aligned(CONTENT))
        assert files_of(tmp_path) == {}

    def test_an_error_is_told_though_the_temporary_file_cannot_be_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Calls(monkeypatch, "pwrite").errors = [errno.ENOSPC]
        Calls(monkeypatch, "unlink").errors = [errno.EROFS]
        with pytest.raises(ConnectorError, match=os.strerror(errno.ENOSPC)):
            put_in_parts(writes_of(FileConnector(tmp_path)), "a", CONTENT)

    def test_what_may_pass_is_tried_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        connector = RetryConnector(FileConnector(tmp_path), RetryPolicy(first_wait_s=0.0))
        for name in ("pwrite", "replace", "unlink"):
            Calls(monkeypatch, name).errors = [errno.EIO]
        writes = writes_of(connector)
        put_in_parts(writes, "a", CONTENT)
        assert files_of(tmp_path) == {"a": CONTENT}
        writes.delete("a")
        assert files_of(tmp_path) == {}
        assert connector.counters()["num_retries"] == 3

    def test_a_server_that_renamed_and_says_that_it_did_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As NFS does when the first answer is lost. A temporary file that is gone otherwise is an error."""
        writes = writes_of(FileConnector(tmp_path))
        writes.put("a", b"old")
        replace = Calls(monkeypatch, "replace")
        real = replace.real
        replace.real = lambda old, new: (real(old, new), real(old, new))
        writes.put("a", b"new")
        assert files_of(tmp_path) == {"a": b"new"}
        replace.real = lambda old, new: real(f"{old}.gone", new)
        with pytest.raises(ObjectNotFoundError, match=f"{tmp_path}/a"):
            writes.put("a", b"newer")
        assert files_of(tmp_path) == {"a": b"new"}

    def test_names_that_are_taken(self, tmp_path: Path) -> None:
        writes = writes_of(FileConnector(tmp_path))
        writes.put("file", b"1")
        writes.put("directory/x", b"2")
        with pytest.raises(ConnectorError, match="directory"):
            writes.put("directory", b"3")
        with pytest.raises(ConnectorError, match="file/x"):
            writes.put("file/x", b"3")
        with pytest.raises(ConnectorError, match="file"):
            writes.rename("directory", "file")
        with pytest.raises(ObjectNotFoundError, match="no directory"):
            writes.rename("file", "other")
        assert files_of(tmp_path) == {"file": b"1", "directory/x": b"2"}

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
    def test_no_permission(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o555)
        with pytest.raises(AccessDeniedError, match=f"{tmp_path}/d/a"):
            writes_of(FileConnector(tmp_path)).put("d/a", b"1")

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EXDEV])
    def test_a_mount_that_cannot_rename(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        writes = writes_of(FileConnector(tmp_path))
        writes.put("old/a", b"1")
        Calls(monkeypatch, "rename").errors = [number]
        assert not writes.rename("old", "new")
        assert files_of(tmp_path) == {"old/a": b"1"}


@pytest.mark.parametrize("refused", [None, errno.EPERM, errno.EEXIST])
def test_files_of_a_mount_that_cannot_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """They are copied: over the old one, or where the mount refuses that, after it is removed."""
    modes = []

    def open_(path: str, mode: str) -> Any:
        modes.append(mode)
        if mode == "wb" and refused is not None and os.path.exists(path):
            raise OSError(refused, os.strerror(refused))
        return open(path, mode)

    monkeypatch.setattr(file_writes, "open", open_, raising=False)
    writes = writes_of(FileConnector(tmp_path))
    for content in (b"old", b"new"):
        Calls(monkeypatch, "replace").errors = [errno.EPERM]
        writes.put("d/a", content)
        assert files_of(tmp_path) == {"d/a": content}
    assert modes == ["rb", "wb", "rb", "wb", *(["rb", "xb"] if refused is not None else [])]


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_copy_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shown: bool) -> None:
    """Leaves the old file, where the mount does; never a part of the new one."""
    writes = writes_of(FileConnector(tmp_path))
    before = writes.put("a", b"old")
    old = os.stat(tmp_path / "a")

    def copy(source: Any, target: Any, length: int) -> None:
        if not is_shown:  # as a mount does that shows what is written when it is closed, and not after an error
            (tmp_path / "a").write_bytes(b"old")
            os.utime(tmp_path / "a", ns=(old.st_mtime_ns,) * 2)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    Calls(monkeypatch, "replace").errors = [errno.EPERM]
    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(ConnectorError, match=os.strerror(errno.EIO)):
        writes.put("a", b"new")
    assert files_of(tmp_path) == ({} if is_shown else {"a": b"old"})
    assert is_shown or FileConnector(tmp_path).stat("a") == before


def test_a_writer_that_is_killed_at_any_call(tmp_path: Path) -> None:
    """Leaves the old file or the new one whole, and what `clear` removes."""
    names = ("mkdir", "open", "pwrite", "fdatasync", "fsync", "utime", "replace", "stat")
    seen = set()
    for number in range(100):
        root = tmp_path / str(number)
        writes_of(FileConnector(root)).put("d/a", b"old")
        child = os.fork()
        if child == 0:
            left = iter(range(number))

            def counted(real: Callable[..., Any], left: Iterator[int] = left) -> Callable[..., Any]:
                return lambda *arguments, **more: (
                    real(*arguments, **more) if next(left, None) is not None else os._exit(9)
                )

            try:
                for name in names:
                    setattr(os, name, counted(getattr(os, name)))
                writes_of(FileConnector(root)).put("d/a", b"newer")
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        content = (root / "d" / "a").read_bytes()
        assert content in ((b"newer",) if status == 0 else (b"old", b"newer"))
        seen.add(content)
        writes_of(FileConnector(root)).clear("")
        assert files_of(root) == {"d/a": content}
        if status == 0:
            break
    assert number >= 6
    assert seen == {b"old", b"newer"}


def test_a_file_replaced_within_a_tick_of_the_clock_has_another_etag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's time of change moves every 4 ms; here it stands still."""
    writes = writes_of(FileConnector(tmp_path))
    fdatasync = Calls(monkeypatch, "fdatasync")
    fdatasync.real = lambda fd: os.utime(fd, ns=(10**18, 10**18))
    etags = {writes.put("a", content).etag for content in (b"1", b"2", b"1", b"3")}
    assert len(etags) == 4


@pytest.mark.parametrize("is_random", [False, True])
def test_a_power_cut_leaves_what_was_durable(tmp_path: Path, is_random: bool, rng: random.Random) -> None:
    connector = DroppingConnector(tmp_path / "root", tmp_path / "durable")
    writes = connector.writes()
    writes.put("put", b"1")
    writes.put("replaced", b"old")
    writes.put("deleted", b"2")
    begun(writes, "step/synced", memoryview(b"3")).commit()
    writes.sync("step")
    begun(writes, "step/named", memoryview(b"4")).commit()
    begun(writes, "replaced", memoryview(b"new")).commit()
    writes.delete("deleted")
    died = begun(writes, "died", memoryview(b"5"))
    assert writes.rename("step", "renamed")
    connector.cut(rng if is_random else None)
    died.abort()
    left = files_of(tmp_path / "root")
    assert left.pop("replaced") in ((b"old", b"new") if is_random else (b"old",))
    kept = {"put": b"1", "renamed/synced": b"3"}
    if is_random:
        assert kept.items() <= left.items() <= (kept | {"deleted": b"2", "renamed/named": b"4"}).items()
    else:
        assert left == kept | {"deleted": b"2"}
    assert files_of(tmp_path / "durable") == left | {"replaced": files_of(tmp_path / "root")["replaced"]}
