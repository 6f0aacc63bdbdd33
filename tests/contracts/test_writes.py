"""What the writing side of every connector promises: parts in any order, nothing half, replaced at once, gone after abort."""

from __future__ import annotations

import os
import pickle
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from power_cut import DroppingConnector
from seaweed import Seaweed

from loaderkit.checkpoint.discovery.archive import TarConnector
from loaderkit.connectors.base import Connector, ObjectWriter, Writes, counters_of, writes_of
from loaderkit.connectors.config import CacheArgs, S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.connectors.layers.cache import CacheConnector
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.ranges import RangeSlice
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import ConnectorError, ObjectChangedError, ObjectNotFoundError

BUCKET = "writes"
SERVER: list[Seaweed] = []
NUMBERS = count()


@pytest.fixture(autouse=True, scope="session")
def _server(seaweed: Seaweed) -> None:
    SERVER[:] = [seaweed]
    seaweed.boto().create_bucket(Bucket=BUCKET)


@pytest.fixture(autouse=True)
def _keys(s3_keys: None) -> None:
    pass


@dataclass
class Store:
    connector: Connector
    folder: Path | None = None  # of its files
    url: str = ""  # of the bucket

    @property
    def writes(self) -> Writes:
        return writes_of(self.connector)

    def listed(self) -> list[str]:
        return [info.key for info in self.connector.list("")]

    def read(self, key: str) -> bytes:
        info = self.connector.stat(key)
        buffers = [bytearray(info.size), bytearray(info.size)]
        for buffer, etag in zip(buffers, (None, info.etag), strict=True):
            self.connector.read_into(key, 0, memoryview(buffer), etag=etag)
        assert buffers[0] == buffers[1]
        return bytes(buffers[0])

    def debris(self) -> list[str]:
        """What is there beside objects: files and directories of any name, unfinished uploads."""
        found = [] if self.folder is None else [path.name for path in self.folder.rglob("*")]
        if self.url:
            prefix = self.url.removeprefix(f"s3://{BUCKET}/")
            uploads = SERVER[0].boto().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
            found += [upload["Key"] for upload in uploads]
        return found


def no_slices(epoch: int, position: int) -> Iterator[RangeSlice]:
    return iter(())


def made(kind: str, folder: Path) -> Store:
    files = folder / "files"
    if kind == "dropping":
        return Store(DroppingConnector(files, folder / "durable"), files)
    if kind == "fsspec-memory":
        return Store(FsspecConnector(f"memory://writes-{next(NUMBERS)}"))
    if kind == "fsspec-file":
        return Store(FsspecConnector(f"file://{files}"), files)
    if kind == "s3":
        url = f"s3://{BUCKET}/a b+%20/{next(NUMBERS)}/"
        return Store(S3Connector(url, S3Args(endpoint=SERVER[0].endpoint, connections=8)), url=url)
    outer, _, inner = kind.rpartition("-over-")
    connector: Connector = FileConnector(files) if inner == "file" else MemoryConnector()
    if outer == "retry":
        connector = RetryConnector(connector, RetryPolicy())
    if outer == "cache":
        connector = CacheConnector(connector, CacheArgs(dir=str(folder / "cache"), size=10**9))
    if outer == "ahead":
        connector = ReadAheadConnector(connector, no_slices, memory_bytes=1 << 20, num_requests=2)
    return Store(connector, files if inner == "file" else None)


KINDS = ["file", "memory", "fsspec-memory", "fsspec-file", "s3"]
LAYERS = ["retry-over-file", "cache-over-file", "ahead-over-memory", "dropping"]


@contextmanager
def opened(kind: str) -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = made(kind, Path(folder))
        try:
            yield store
        finally:
            store.connector.close()


@pytest.fixture(params=KINDS + LAYERS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with opened(request.param) as made:
        yield made


def some_bytes(seed: int, size: int, offset: int = 0) -> memoryview:
    """Random bytes that begin `offset` bytes after a multiple of 4,096."""
    memory = np.empty(size + offset + 8192, np.uint8)
    begin = -memory.ctypes.data % 4096 + offset
    data = memory[begin : begin + size]
    block = np.random.default_rng(seed).integers(0, 256, 100_003, np.uint8)  # so that no two parts are the same
    data[:] = np.resize(block, size)
    return data.data.cast("B") if size else memoryview(b"")


def write_all(writes: Writes, key: str, data: memoryview, order: Callable[[list[int]], object] = bool) -> ObjectWriter:
    """Write all parts, from three threads."""
    size, part_bytes = len(data), writes.part_bytes_of(len(data))
    writer = writes.create(key, size)
    starts = list(range(0, size, part_bytes))
    order(starts)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda start: writer.write(start, data[start : start + part_bytes]), starts))
    return writer


@pytest.mark.parametrize("kind", KINDS + LAYERS)
def test_parts_in_any_order_from_several_threads(kind: str) -> None:
    large = not kind.endswith("memory") or kind == "fsspec-memory"

    @settings(max_examples=5 if large else num_examples(40))
    @given(
        num_parts=st.integers(0, 3),
        more=st.sampled_from([0, 1, 511, 4096, 70_001, -1, -4096]),
        offset=st.sampled_from([0, 0, 1, 512]),
        seed=st.integers(0, 2**32),
    )
    def check(num_parts: int, more: int, offset: int, seed: int) -> None:
        with opened(kind) as store:
            size = max(0, num_parts * store.writes.part_bytes_of(0) + more)
            data = some_bytes(seed, size, offset)
            rng = random.Random(seed)

            def order(starts: list[int]) -> None:
                starts += rng.choices(starts, k=min(1, len(starts)))  # one of them twice
                rng.shuffle(starts)

            writer = write_all(store.writes, "a/b", data, order)
            with pytest.raises(ObjectNotFoundError):
                store.connector.stat("a/b")
            assert "a/b" not in store.listed()
            info = writer.commit()
            assert info == store.connector.stat("a/b")
            assert info.size == size
            assert store.read("a/b") == data
            writer.abort()
            assert store.listed() == ["a/b"]

    check()


def test_nothing_is_left_of_what_is_aborted(store: Store) -> None:
    store.writes.put("old", b"old")
    before = store.debris()
    for key in ("old", "new"):
        part_bytes = store.writes.part_bytes_of(0)
        data = some_bytes(1, 2 * part_bytes + 5)
        for num_written in range(3):
            writer = store.writes.create(key, len(data))
            for number in range(num_written):
                writer.write(number * part_bytes, data[number * part_bytes : (number + 1) * part_bytes])
            writer.abort()
            writer.abort()
        write_all(store.writes, key, data).abort()
        assert store.listed() == ["old"]
        assert store.debris() == before
    assert store.read("old") == b"old"


def test_a_part_is_missing_or_there_is_no_such_part(store: Store) -> None:
    part_bytes = store.writes.part_bytes_of(0)
    data = some_bytes(2, 2 * part_bytes + 5)
    writer = store.writes.create("a", len(data))
    for start, length in ((0, 1), (1, part_bytes), (-part_bytes, part_bytes), (2 * part_bytes, part_bytes), (0, 0)):
        with pytest.raises(ValueError, match="no part of"):
            writer.write(start, some_bytes(3, length))
    with pytest.raises(ValueError, match="no part of"):
        writer.write(3 * part_bytes, data[:5])
    for start in (2 * part_bytes, 0):
        writer.write(start, data[start : start + part_bytes])
    with pytest.raises(ConnectorError, match="2 of its 3 parts"):
        writer.commit()
    assert "a" not in store.listed()
    writer.write(part_bytes, data[part_bytes : 2 * part_bytes])
    writer.commit()
    assert store.read("a") == data


def test_an_object_is_replaced_at_once(store: Store) -> None:
    """Readers see one of the two contents whole, by `put` and by `commit`; no layer gives the old bytes afterwards."""
    size = 20_000
    store.writes.put("a", bytes(size))
    ended = threading.Event()

    def look() -> int:
        num_seen = 0
        while not ended.is_set():
            buffer = bytearray(size)
            try:
                store.connector.read_into("a", 0, memoryview(buffer))
            except ObjectChangedError:  # a cache asks for its etag first
                continue
            assert buffer.count(buffer[0]) == size
            num_seen += 1
        return num_seen

    with ThreadPoolExecutor(2) as pool:
        seen = [pool.submit(look) for _ in range(2)]
        try:
            for number in range(1, 11):
                content = bytes([number]) * size
                if number % 2:
                    info = store.writes.put("a", content)
                else:
                    info = write_all(store.writes, "a", memoryview(content)).commit()
                assert info == store.connector.stat("a")
                assert store.read("a") == content
        finally:
            ended.set()
        assert all(look.result() for look in seen)
    assert store.listed() == ["a"]


def test_an_object_of_another_size_and_of_none(store: Store) -> None:
    etags = {store.writes.put("a", content).etag for content in (b"", b"x", b"y", b"")}
    if not isinstance(store.connector, FsspecConnector):  # whose times may be coarse
        assert len(etags) >= 3
    assert store.read("a") == b""


def test_delete(store: Store) -> None:
    store.writes.put("a/b/c", b"1")
    store.writes.put("a/d", bytearray(b"22"))
    store.writes.delete("a/b/c")
    store.writes.delete("a/b/c")
    store.writes.delete("none/of/it")
    store.writes.sync("a")
    store.writes.sync("none")
    assert store.listed() == ["a/d"]


def test_rename_is_whole_or_not_at_all(store: Store) -> None:
    objects = {"old/a": b"1", "old/b/c": b"22", "older/a": b"333", "taken/a": b"4444"}
    for key, data in objects.items():
        store.writes.put(key, data)
    renamed = store.writes.rename("old/", "x/new")
    assert renamed == (type(store.connector).__name__ not in ("FsspecConnector", "S3Connector"))
    moved = {key.replace("old/", "x/new/") if renamed else key: data for key, data in objects.items()}
    assert {key: store.read(key) for key in store.listed()} == moved
    if renamed:
        with pytest.raises(ConnectorError, match="there are"):
            store.writes.rename("x/new", "taken")
        with pytest.raises(ObjectNotFoundError):
            store.writes.rename("none", "other")
        assert {key: store.read(key) for key in store.listed()} == moved


def test_clear_removes_what_is_no_object(store: Store) -> None:
    store.writes.put("a/b/c", b"1")
    store.writes.put("other", b"2")
    before = store.debris()
    died = store.writes.create("a/x", 100)
    died.write(0, memoryview(bytes(100)))
    store.writes.clear("a")
    assert store.listed() == ["a/b/c", "other"]
    assert store.debris() == before
    store.writes.delete("a/b/c")
    store.writes.clear("a/")
    store.writes.clear("a")
    assert store.listed() == ["other"]
    assert store.debris() == [name for name in before if name == "other"]
    died.abort()


def test_clear_of_one_directory_leaves_those_in_it_alone(store: Store) -> None:
    """And what was in flight there can be committed no more, if any of it was in the store."""
    store.writes.put("a/b/c", b"1")
    before = store.debris()
    here, below = (store.writes.create(key, 100) for key in ("a/x", "a/b/x"))
    for writer in (here, below):
        writer.write(0, memoryview(bytes(100)))
    has_begun = len(store.debris()) == len(before) + 2
    store.writes.clear("a", deep=False)
    below.commit()
    if has_begun:
        with pytest.raises(ConnectorError):
            here.commit()
        assert store.listed() == ["a/b/c", "a/b/x"]
    here.abort()
    assert store.read("a/b/x") == bytes(100)


@pytest.mark.parametrize("key", ["../x", "/x", "a/../../x", "..", ".", "", "a//b", "a/", "./a", "a\0b", "\ud800"])
def test_keys_do_not_lead_out(store: Store, key: str) -> None:
    if key in ("a\0b", "\ud800") and not isinstance(store.connector, (FileConnector, FsspecConnector, S3Connector)):
        pytest.skip("memory may call an object so")
    with pytest.raises(ConnectorError, match="no key"):
        store.writes.put(key, b"1")
    with pytest.raises(ConnectorError, match="no key"):
        store.writes.create(key, 3)
    assert store.debris() == []


def test_what_is_written_is_counted(store: Store) -> None:
    write_all(store.writes, "a", some_bytes(4, 300_000)).commit()
    store.writes.put("b", bytes(700))
    store.writes.sync("")
    counts = counters_of(store.connector)
    assert counts["written_bytes"] == 300_700
    assert min(counts["writing_s"], counts["committing_s"]) > 0
    assert (counts["syncing_s"] > 0) == isinstance(store.connector, (FileConnector, CacheConnector, RetryConnector))


def test_no_descriptor_is_left(store: Store) -> None:
    data = some_bytes(5, 70_000)
    write_all(store.writes, "warm", data).commit()  # clients keep connections
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(5):
        write_all(store.writes, f"a{number}", data).commit()
        write_all(store.writes, "b", data).abort()
        store.writes.put("c", b"1")
        store.writes.sync("")
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize("kind", ["file", "s3", "retry-over-file", "fsspec-file"])
def test_another_process_writes_too(kind: str) -> None:
    with opened(kind) as store:
        store.writes.put("a", b"1")
        there = pickle.loads(pickle.dumps(store.connector))
        writes_of(there).put("b", b"2")
        there.close()
        assert store.listed() == ["a", "b"]


class Plain:
    """A connector as others may write it: nothing but what `Connector` asks for."""

    def __init__(self, inner: Connector) -> None:
        self.list, self.stat, self.read_into, self.describe = inner.list, inner.stat, inner.read_into, inner.describe
        self.close = inner.close


def test_a_connector_that_cannot_write_says_so() -> None:
    memory = MemoryConnector()
    readers: list[Connector] = [Plain(memory), TarConnector(memory, lambda info: []), FsspecConnector("https://a/b")]
    readers.append(RetryConnector(Plain(memory), RetryPolicy()))
    for connector in readers:
        with pytest.raises(ConnectorError, match=r"(memory://|https://a/b).* cannot be written to"):
            writes_of(connector)


def test_the_layers_of_reading_forget_what_was_written() -> None:
    """Bytes that were read ahead, are being, and will be; also with the etag of the new object."""
    memory = MemoryConnector({"a": bytes(1000), "b": bytes(1000), "d/c": bytes(1000)})

    def slices(epoch: int, position: int) -> Iterator[RangeSlice]:
        for number, key in enumerate(("a", "b", "d/c")):
            yield RangeSlice(key, 0, 1000, None, number, number, 2000)

    ahead = ReadAheadConnector(memory, slices, memory_bytes=1 << 20, num_requests=1)
    writes, buffer = writes_of(ahead), bytearray(1000)
    ahead.read_into("a", 0, memoryview(buffer))
    writes.put("a", b"x" * 1000)
    writer = writes.create("b", 1000)
    writer.write(0, memoryview(b"y" * 1000))
    writer.commit()
    writes.rename("d", "e")
    writes.put("d/c", b"z" * 1000)
    for key, letter in (("a", b"x"), ("b", b"y"), ("d/c", b"z")):
        ahead.read_into(key, 0, memoryview(buffer))
        assert buffer == letter * 1000
    assert counters_of(ahead)["held_bytes"] == 0
    ahead.close()
