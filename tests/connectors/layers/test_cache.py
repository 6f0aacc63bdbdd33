"""The cache: bounded, shared by processes, never wrong, whatever happens to its files, its disk or its writers."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.connectors.base import Connector, writes_of
from loaderkit.connectors.config import CacheArgs
from loaderkit.connectors.layers.cache import BLOCK_BYTES, CacheConnector
from loaderkit.connectors.layers.disk_cache import DiskCache, entry_name
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ObjectNotFoundError, ShortReadError
from loaderkit.sources.formats.tar_index import load_index, scan_tar, write_wds_index


class Counting(MemoryConnector):
    """Says which ranges were read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)


def cached(inner: Connector, folder: Path, size: int = 100_000_000, **args: Any) -> CacheConnector:
    return CacheConnector(inner, CacheArgs(dir=str(folder), size=size, **args))


def read(connector: Connector, key: str, start: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    connector.read_into(key, start, memoryview(buffer), etag=connector.stat(key).etag)
    return bytes(buffer)


def pieces(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("objects/*/*"))


def taken(folder: Path) -> int:
    return sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "usage")
    )


LARGE = random.Random(0).randbytes(3 * BLOCK_BYTES + 12_345)
OBJECTS = {"small": b"0123456789", "large": LARGE, "empty": b""}


class TestReading:
    def test_the_second_time_nothing_is_asked_for(self, tmp_path: Path) -> None:
        inner = Counting(OBJECTS)
        for attempt in range(2):
            connector = cached(inner, tmp_path)
            assert list(connector.list("")) == list(inner.list(""))
            assert read(connector, "small", 0, 10) == OBJECTS["small"]
            assert read(connector, "large", 0, len(LARGE)) == LARGE
            assert (len(inner.reads) > 0) is (attempt == 0)
            counters = connector.counters()
            assert (counters["cache_hit_bytes"] > 0) is (attempt == 1)
            inner.reads.clear()

    @settings(max_examples=num_examples(60))
    @given(st.lists(st.tuples(st.integers(0, len(LARGE)), st.integers(1, 3 * BLOCK_BYTES)), min_size=1, max_size=4))
    def test_any_ranges_of_a_large_object(self, ranges: list[tuple[int, int]]) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            inner = Counting(OBJECTS)
            connector = cached(inner, Path(folder))
            list(connector.list(""))
            for start, num_bytes in ranges:
                num_bytes = min(num_bytes, len(LARGE) - start)  # noqa: PLW2901
                assert read(connector, "large", start, num_bytes) == LARGE[start : start + num_bytes]
            fetched = Counter(
                block
                for _, start, num_bytes in inner.reads
                if num_bytes
                for block in range(start // BLOCK_BYTES, (start + num_bytes - 1) // BLOCK_BYTES + 1)
            )
            assert not [block for block, number in fetched.items() if number > 1]

    def test_errors_are_the_stores(self, tmp_path: Path) -> None:
        connector = cached(MemoryConnector(OBJECTS), tmp_path)
        with pytest.raises(ObjectNotFoundError):
            read(connector, "none", 0, 1)
        for key in ("small", "large"):
            with pytest.raises(ShortReadError):
                read(connector, key, len(OBJECTS[key]) - 1, 2)
            with pytest.raises(ShortReadError):
                connector.read_into(key, -1, memoryview(bytearray(1)))
        assert not pieces(tmp_path)

    def test_a_replaced_object_is_another_one(self, tmp_path: Path) -> None:
        inner = MemoryConnector(OBJECTS)
        connector = cached(inner, tmp_path)
        assert read(connector, "large", 5, 100) == LARGE[5:105]
        writes_of(inner).put("large", LARGE[::-1])
        assert read(connector, "large", 5, 100) == LARGE[::-1][5:105]

    def test_names_never_lead_out(self, tmp_path: Path) -> None:
        names = ["../../etc/passwd", "/etc/passwd", "..", "a/../../x", "\0", "x" * 5000, "\udcff", "objects", "lock"]
        inner = MemoryConnector({name: name.encode("utf-8", "surrogateescape") or b"." for name in names})
        folder = tmp_path / "inside" / "cache"
        connector = cached(inner, folder)
        for name in names:
            data = name.encode("utf-8", "surrogateescape")
            assert read(connector, name, 0, len(data)) == data
            assert read(connector, name, 0, len(data)) == data
        assert sorted(path.name for path in tmp_path.rglob("*") if not path.is_relative_to(folder)) == ["inside"]
        assert len(pieces(folder)) == len(names)
        assert all(len(path.name) == 64 and int(path.name, 16) for path in pieces(folder))

    def test_names_of_pieces_do_not_run_together(self) -> None:
        assert (
            len({entry_name(*parts) for parts in (("a", "b"), ("ab", ""), ("a\0", "b"), ("1:a", "b"), ("a", "1:b"))})
            == 5
        )

    def test_looking_at_an_index_does_not_fill_the_cache(self, tmp_path: Path) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for number in range(3):
                member = tarfile.TarInfo(f"{number}.bin")
                member.size = BLOCK_BYTES
                tar.addfile(member, io.BytesIO(bytes(BLOCK_BYTES)))
        inner = Counting({"s.tar": data.getvalue()})
        info = inner.stat("s.tar")
        writes_of(inner).put("s.idx", write_wds_index(scan_tar(inner, info)).encode())
        inner.reads.clear()
        connector = cached(inner, tmp_path / "cache")
        connector.stat("s.tar")
        assert len(load_index(connector, info, None)) == 3
        assert sum(num_bytes for _, _, num_bytes in inner.reads) < 64 << 10

    @pytest.mark.parametrize("num_bytes", [1000, 300_000, 2 * BLOCK_BYTES])
    def test_the_pass_that_indexes_an_archive_leaves_it_in_the_cache(self, tmp_path: Path, num_bytes: int) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for number in range(5):
                member = tarfile.TarInfo(f"{number}.bin")
                member.size = num_bytes // 5
                tar.addfile(member, io.BytesIO(bytes(member.size)))
        inner = Counting({"s.tar": data.getvalue()})
        connector = cached(inner, tmp_path / "cache")
        (info,) = connector.list("")
        index = scan_tar(connector, info)
        inner.reads.clear()
        assert len(index) == 5
        for start, size in zip(index.starts.tolist(), index.sizes.tolist(), strict=True):
            assert read(connector, "s.tar", start, size) == bytes(size)
        assert inner.reads == []


class TestDamage:
    @settings(max_examples=num_examples(40))
    @given(
        place=st.integers(0, 10**9), how=st.sampled_from(["flip", "cut", "grow", "empty", "zero"]), large=st.booleans()
    )
    def test_it_is_never_served(self, place: int, how: str, large: bool) -> None:
        import tempfile

        key = "large" if large else "small"
        data = OBJECTS[key]
        with tempfile.TemporaryDirectory() as folder:
            connector = cached(MemoryConnector(OBJECTS), Path(folder))
            assert read(connector, key, 0, len(data)) == data
            path = pieces(Path(folder))[place % len(pieces(Path(folder)))]
            content = bytearray(path.read_bytes())
            at = place % len(content)
            if how == "flip":
                content[at] ^= 1 << place % 8
            elif how == "cut":
                del content[at:]
            elif how == "grow":
                content += b"x"
            else:
                content = bytearray() if how == "empty" else bytearray(len(content))
            path.write_bytes(content)
            assert read(connector, key, 0, len(data)) == data
            assert connector.counters()["num_cache_damaged"] == 1
            assert read(connector, key, 0, len(data)) == data  # refetched, and kept
            assert connector.counters()["num_cache_damaged"] == 1

    def test_a_piece_under_anothers_name(self, tmp_path: Path) -> None:
        connector = cached(MemoryConnector({"a": b"aaaa", "b": b"bbbb"}), tmp_path)
        assert (read(connector, "a", 0, 4), read(connector, "b", 0, 4)) == (b"aaaa", b"bbbb")
        first, second = pieces(tmp_path)
        first.write_bytes(second.read_bytes())
        assert (read(connector, "a", 0, 4), read(connector, "b", 0, 4)) == (b"aaaa", b"bbbb")

    @pytest.mark.parametrize("thing", ["directory", "link"])
    def test_something_else_in_its_place(self, tmp_path: Path, thing: str) -> None:
        connector = cached(MemoryConnector(OBJECTS), tmp_path / "cache")
        read(connector, "small", 0, 10)
        (path,) = pieces(tmp_path / "cache")
        path.unlink()
        (tmp_path / "secret").write_text("do not touch")
        path.mkdir() if thing == "directory" else path.symlink_to(tmp_path / "secret")
        assert read(connector, "small", 0, 10) == OBJECTS["small"]
        assert (tmp_path / "secret").read_text() == "do not touch"

    def test_without_verify_only_sizes_are_looked_at(self, tmp_path: Path) -> None:
        connector = cached(MemoryConnector(OBJECTS), tmp_path, verify=False)
        read(connector, "small", 0, 10)
        (path,) = pieces(tmp_path)
        path.write_bytes(b"x" + path.read_bytes()[1:])
        assert read(connector, "small", 0, 10) == b"x123456789"


class TestBound:
    def test_the_least_recently_used_goes(self, tmp_path: Path) -> None:
        now_s = 1e9
        disk = DiskCache(tmp_path, 10_500, clock=lambda: now_s)
        names = [entry_name(number) for number in range(20)]
        for number, name in enumerate(names):
            now_s += 10
            assert disk.write(name, memoryview(bytes([number]) * 900))
            os.utime(tmp_path / "objects" / name[:2] / name, ns=(int(now_s * 1e9),) * 2)
            assert taken(tmp_path) <= 10_500
            now_s += 10
            assert disk.read(names[0], 900, 0, memoryview(bytearray(900)))  # used all the time
        assert disk.has(names[0])
        assert not disk.has(names[1])
        assert disk.has(names[-1])
        assert disk.num_evicted >= 9

    def test_what_is_too_large_is_not_kept(self, tmp_path: Path) -> None:
        connector = cached(MemoryConnector(OBJECTS), tmp_path, size=1000)
        assert read(connector, "large", 0, 5000) == LARGE[:5000]
        assert not pieces(tmp_path)

    def test_a_lost_account_is_made_again(self, tmp_path: Path) -> None:
        for content in (None, b"", b"-5", b"nonsense", b"99999999999999999999"):
            disk = DiskCache(tmp_path, 5_000)
            for number in range(9):
                disk.write(entry_name(str(content), number), memoryview(bytes(900)))
                if content is not None:
                    (tmp_path / "usage").write_bytes(content)
            disk.write(entry_name(str(content), "last"), memoryview(bytes(900)))
            assert taken(tmp_path) <= 5_000 or content == b"-5"
        assert DiskCache(tmp_path, 5_000).write(entry_name("new"), memoryview(bytes(900)))
        assert taken(tmp_path) <= 5_000

    def test_what_a_dead_writer_left_goes(self, tmp_path: Path) -> None:
        disk = DiskCache(tmp_path, 5_000)
        disk.write(entry_name(0), memoryview(bytes(900)))
        (tmp_path / "temporary" / "dead").write_bytes(bytes(3000))
        again = DiskCache(tmp_path, 5_000)
        assert again.write(entry_name(1), memoryview(bytes(900)))
        assert not list((tmp_path / "temporary").iterdir())
        assert len(pieces(tmp_path)) == 2


class TestDisks:
    def test_a_full_disk_is_done_without(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        # /dev/full answers every write with "no space left": the temporary folder is made of it.
        connector = cached(MemoryConnector(OBJECTS), tmp_path)
        limit = 2000
        import resource

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with caplog.at_level(logging.WARNING):
                for _ in range(3):
                    assert read(connector, "large", 0, len(LARGE)) == LARGE
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, old)
        assert [record.getMessage().count("continuing without it") for record in caplog.records] == [1]
        assert connector.counters()["num_cache_failures"] >= 1
        assert not pieces(tmp_path)
        assert not list((tmp_path / "temporary").iterdir())

    @pytest.mark.parametrize("broken", ["a file in its place", "a file in the place of objects", "a link for a lock"])
    def test_a_folder_that_is_none(self, tmp_path: Path, broken: str) -> None:
        folder = tmp_path / "cache"
        if broken == "a file in its place":
            folder.write_text("x")
        else:
            folder.mkdir()
            if broken == "a link for a lock":
                (folder / "lock").symlink_to(tmp_path / "elsewhere")
            else:
                (folder / "objects").write_text("x")
        connector = cached(MemoryConnector(OBJECTS), folder)
        for _ in range(2):
            assert read(connector, "large", 7, 100) == LARGE[7:107]
        assert not (tmp_path / "elsewhere").exists()


WORKER = """
import os, sys, time
from pathlib import Path
from loaderkit.connectors.layers.cache import CacheConnector
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.config import CacheArgs

class Logged(FileConnector):
    def read_into(self, key, start, buffer, *, etag=None):
        with open(log, "a") as file:
            file.write(f"{key} {start // (4 << 20)}\\n")
        print("fetches", flush=True)
        super().read_into(key, start, buffer, etag=etag)

store, cache, log, turns = sys.argv[1:]
connector = CacheConnector(Logged(store), CacheArgs(dir=cache, size=1 << 30))
infos = list(connector.list(""))
print("ready", flush=True)
sys.stdin.readline()
for turn in range(int(turns)):
    for info in infos:
        buffer = bytearray(info.size)
        connector.read_into(info.key, 0, memoryview(buffer), etag=info.etag)
        assert buffer == Path(store, info.key).read_bytes(), info.key
print(connector.counters(), flush=True)
"""


class TestProcesses:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Path:
        folder = tmp_path / "store"
        folder.mkdir()
        for number in range(40):
            size = 9_000_000 if number % 10 == 0 else 1000 + number
            (folder / f"{number:02}").write_bytes(random.Random(number).randbytes(size))
        return folder

    def start(self, store: Path, cache: Path, log: Path, probe: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(store), str(cache), str(log), str(probe)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def test_two_of_them_fetch_everything_once(self, store: Path, tmp_path: Path) -> None:
        log = tmp_path / "log"
        processes = [self.start(store, tmp_path / "cache", log, 1) for _ in range(2)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            process.communicate(timeout=60)
            assert process.returncode == 0
        fetched = Counter(log.read_text().splitlines())
        assert len({line.split()[0] for line in fetched}) == 40
        assert sum(fetched.values()) <= len(fetched) + 1

    @pytest.mark.prove
    def test_killed_at_any_point(self, store: Path, tmp_path: Path, rng: random.Random) -> None:
        cache, log = tmp_path / "cache", tmp_path / "log"
        for num_fetches in (1, rng.randint(2, 5)):  # of at least 48
            process = self.start(store, cache, log, 1000)
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout is not None
            for _ in range(num_fetches):
                assert process.stdout.readline() == "fetches\n"
            process.kill()  # while it fetches
            process.communicate()
            for path in pieces(cache)[:: 1 if num_fetches < 2 else 7]:
                path.touch()
        process = self.start(store, cache, log, 2)
        process.communicate("go\n", timeout=60)
        assert process.returncode == 0
        assert not list((cache / "temporary").iterdir())

    def test_threads_fetch_once(self, tmp_path: Path) -> None:
        inner = Counting(OBJECTS)
        connector = cached(inner, tmp_path)
        list(connector.list(""))
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: read(connector, "large", 0, len(LARGE)), range(16)))
        assert found == [LARGE] * 16
        assert sum(num_bytes for _, _, num_bytes in inner.reads) == len(LARGE)

    def test_a_hanging_fetch_delays_others_only_so_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loaderkit.connectors.layers.cache._WAIT_S", 0.05)
        connector = cached(MemoryConnector(OBJECTS), tmp_path)
        etag = connector.stat("small").etag
        name = connector.name_of("small", etag, 0, 10)
        with connector.disk.fetching(name, wait_s=0.0) as is_ours:
            assert is_ours
            assert read(connector, "small", 0, 10) == OBJECTS["small"]
        with connector.disk.fetching(name, wait_s=0.0) as is_ours:
            assert is_ours


@pytest.fixture(autouse=True)
def _no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
