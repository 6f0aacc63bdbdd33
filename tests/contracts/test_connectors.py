"""What every connector promises, for each of them: listing order, prefixes, ranges, errors, threads."""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from seaweed import Seaweed

import loaderkit
from loaderkit.checkpoint.discovery.archive import TarConnector
from loaderkit.connectors.backoff import RetryPolicy
from loaderkit.connectors.base import (
    BulkReads,
    ByteRange,
    Connector,
    Ranges,
    Writes,
    bulk_of,
    modified_s_of,
    traits_of,
    writes_of,
)
from loaderkit.connectors.config import CacheArgs, S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.connectors.layers.cache import CacheConnector
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.connectors.layers.retry import RetryConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.ranges import RangeSlice, gather_into
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import ConnectorError, ObjectChangedError, ObjectNotFoundError, ShortReadError
from loaderkit.sources.formats.tar_index import scan_tar


class Store:
    """A connector with objects in it. `place` turns a test's key into the connector's, `replace` changes an object."""

    def __init__(
        self, connector: Connector, place: Callable[[str], str], replace: Callable[[str, bytes], object]
    ) -> None:
        self.connector = connector
        self.place = place
        self.replace = replace

    def gather(self, key: str, starts: list[int], length: int, etag: str | None = None) -> bytes:
        buffer = bytearray(len(starts) * length)
        place, where = self.place(key), np.array(starts, np.int64)
        gather_into(self.connector, place, where, length, memoryview(buffer), etag=etag)
        return bytes(buffer)

    def read(self, key: str, start: int, num_bytes: int, etag: str | None = None) -> bytes:
        buffer = bytearray(num_bytes)
        self.connector.read_into(self.place(key), start, memoryview(buffer), etag=etag)
        return bytes(buffer)


def tar_bytes(objects: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in objects.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def plain_store(connector: Connector, writes: Writes, objects: Mapping[str, bytes]) -> Store:
    for key, data in objects.items():
        writes.put(key, data)
    return Store(connector, lambda key: key, writes.put)


def tar_store(inner: Connector, writes: Writes, objects: Mapping[str, bytes]) -> Store:
    writes.put("shards/a.tar", tar_bytes(objects))
    connector = TarConnector(inner, lambda info: scan_tar(inner, info))

    def replace(key: str, data: bytes) -> None:
        writes.put("shards/a.tar", tar_bytes({**objects, key: data}))

    return Store(connector, lambda key: f"shards/a.tar/{key}", replace)


Factory = Callable[[Mapping[str, bytes]], Store]
KINDS = [
    "file",
    "memory",
    "tar-over-file",
    "tar-over-memory",
    "retry-over-file",
    "timed-over-file",
    "cache-over-memory",
    "ahead-over-memory",
    "plain-over-memory",
    "retry-over-plain-over-memory",
    "cache-over-plain-over-memory",
    "ahead-over-plain-over-memory",
    "fsspec-memory",
    "fsspec-file",
    "s3",
    "cache-over-s3",
    "tar-over-s3",
]
# Drawn examples cost the server some seconds; what is over it is shown by the other tests.
DRAWN = [kind for kind in KINDS if not kind.endswith("-over-s3")]
SERVER: list[Seaweed] = []
NUMBERS = count()
NOT_EVERYWHERE = {"\udce9": ("s3", "fsspec"), "a\nb": ("fsspec-memory",)}  # what a store cannot call an object


@pytest.fixture(autouse=True, scope="session")
def _server(seaweed: Seaweed) -> None:
    SERVER[:] = [seaweed]
    seaweed.boto().create_bucket(Bucket="contracts")


@pytest.fixture(autouse=True)
def _keys(s3_keys: None) -> None:
    pass


class Plain:
    """A connector as others may write it: nothing but what `Connector` asks for."""

    def __init__(self, inner: Connector) -> None:
        self.list, self.stat, self.read_into, self.describe = inner.list, inner.stat, inner.read_into, inner.describe
        self.close = inner.close


def no_pieces(epoch: int, position: int) -> Iterator[RangeSlice]:
    """A forecast that knows of nothing."""
    return iter(())


def simple(kind: str, directory: str) -> Connector:
    """A connector of one store, with nothing in it."""
    if kind in ("file", "memory"):
        return FileConnector(directory) if kind == "file" else MemoryConnector()
    if kind == "fsspec-memory":
        return FsspecConnector(f"memory://{next(NUMBERS)}")
    if kind == "fsspec-file":
        return FsspecConnector(f"file://{directory}/files")
    # A folder for each, since a bucket costs the server a tenth of a second.
    url = f"s3://contracts/a b+%20/{next(NUMBERS)}"
    return S3Connector(url, S3Args(endpoint=SERVER[0].endpoint, connections=8))


def made(kind: str, directory: str) -> tuple[Connector, Writes]:
    """A connector with nothing in it, and what writes to its store."""
    outer, is_layer, rest = kind.partition("-over-")
    if not is_layer:
        connector = simple(kind, directory)
        return connector, writes_of(connector)
    inner, writes = made(rest, directory)
    policy = RetryPolicy()
    layers: Mapping[str, Callable[[], Connector]] = {
        "plain": lambda: Plain(inner),
        "retry": lambda: RetryConnector(inner, policy),
        "timed": lambda: RetryConnector(inner, policy, 20.0),
        "cache": lambda: CacheConnector(inner, CacheArgs(dir=f"{directory}.cache", size=10_000_000)),
        "ahead": lambda: ReadAheadConnector(inner, no_pieces, memory_bytes=1 << 20, num_requests=2),
    }
    return layers[outer](), writes


@contextmanager
def opened(kind: str) -> Iterator[Factory]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        inner, writes = made(kind.removeprefix("tar-over-"), f"{directory}/root")
        Path(directory, "root").mkdir()
        stack.callback(inner.close)
        make = tar_store if kind.startswith("tar") else plain_store
        yield lambda objects: make(inner, writes, objects)


# Two more layers over the server take a minute.
@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.prove) if kind.endswith("-over-s3") else kind for kind in KINDS]
)
def factory(request: pytest.FixtureRequest) -> Iterator[Factory]:
    with opened(request.param) as make:
        yield make


# Few letters, so that keys share prefixes: "-" and "!" sort before "/", "0" after it, the others take 2 to 4 bytes.
PARTS = st.text(alphabet="a-!0.é\uffee\U0001f600", min_size=1, max_size=3).filter(lambda part: part not in (".", ".."))
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@st.composite
def key_sets(draw: st.DrawFn) -> list[str]:
    """Keys of which none is a directory of another: a file system could not hold both."""
    chosen: list[str] = []
    for key in draw(st.lists(KEYS, max_size=12, unique=True)):
        if not any(key.startswith(other + "/") or other.startswith(key + "/") for other in chosen):
            chosen.append(key)
    return chosen


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=num_examples(60))
@given(keys=key_sets(), prefix=st.one_of(st.just(""), KEYS, KEYS.map(lambda key: key[:2])))
@pytest.mark.matrix(8)
def test_listing_is_ordered_by_the_bytes_of_the_key(kind: str, keys: list[str], prefix: str) -> None:
    with opened(kind) as factory:
        store = factory({key: key.encode() for key in keys})
        wanted = sorted((key for key in keys if key.startswith(prefix)), key=lambda key: key.encode())
        if not keys:
            assert list(store.connector.list("")) == []
            return
        infos = list(store.connector.list(store.place(prefix)))
        assert [info.key for info in infos] == [store.place(key) for key in wanted]
        assert [info.size for info in infos] == [len(key.encode()) for key in wanted]
        assert [store.connector.stat(info.key) for info in infos] == infos


@pytest.mark.parametrize(
    "kind", ["file", "retry-over-file", "tar-over-file", "fsspec-file", "fsspec-memory", "s3", "memory"]
)
def test_when_an_object_was_written(kind: str) -> None:
    before_s = time.time()
    with opened(kind) as factory:
        store = factory({"a": b"1"})
        modified_s = modified_s_of(store.connector, store.place("a"))
        if kind == "memory":
            assert modified_s is None
            return
        assert modified_s is not None
        assert before_s - 2 <= modified_s <= time.time() + 2  # by clocks that may give whole seconds


def test_prefix_is_a_string_not_a_directory(factory: Factory) -> None:
    store = factory({"ab/c": b"1", "abc": b"2", "ab-c": b"3", "b": b"4"})

    def listed(prefix: str) -> list[str]:
        return [info.key.removeprefix(store.place("")) for info in store.connector.list(store.place(prefix))]

    assert listed("ab") == ["ab-c", "ab/c", "abc"]
    assert listed("ab/") == ["ab/c"]
    assert listed("abc") == ["abc"]
    assert listed("abcd") == []
    assert listed("../") == []


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=num_examples(40))
@given(data=st.binary(max_size=2000), ends=st.tuples(st.integers(0, 2000), st.integers(0, 2000)))
def test_any_range_is_the_slice(kind: str, data: bytes, ends: tuple[int, int]) -> None:
    start, end = sorted(min(place, len(data)) for place in ends)
    with opened(kind) as factory:
        store = factory({"x/data.bin": data, "y": b"neighbour"})
        etag = store.connector.stat(store.place("x/data.bin")).etag
        assert store.read("x/data.bin", start, end - start) == data[start:end]
        assert store.read("x/data.bin", start, end - start, etag) == data[start:end]


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=num_examples(40))
@given(
    data=st.binary(min_size=40, max_size=400),
    length=st.integers(1, 9),
    places=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=12),
)
@pytest.mark.matrix(8)
def test_gathering_is_reading_one_by_one(kind: str, data: bytes, length: int, places: list[tuple[int, int]]) -> None:
    # Of each place a few neighbours, which may be read together.
    starts = [place + n * length for place, num in places for n in range(num) if place + (n + 1) * length <= len(data)]
    with opened(kind) as factory:
        store = factory({"x/data.bin": data, "y": b"neighbour"})
        etag = store.connector.stat(store.place("x/data.bin")).etag
        one_by_one = [store.read("x/data.bin", start, length, etag) for start in starts]
        assert store.gather("x/data.bin", starts, length, etag) == b"".join(one_by_one)
        assert b"".join(one_by_one) == b"".join(data[start : start + length] for start in starts)


def test_gathering_fails_as_reading_does(factory: Factory) -> None:
    store = factory({"a": b"0123456789"})
    etag = store.connector.stat(store.place("a")).etag
    assert store.gather("a", [8, 0, 4], 2, etag) == b"890145"
    with pytest.raises(ShortReadError):
        store.gather("a", [0, 8], 3)
    with pytest.raises(ShortReadError):
        store.gather("a", [0, -2], 2)
    with pytest.raises(ObjectChangedError, match="start again"):
        store.replace("a", b"abcdefghijk")
        # A cache may still serve the object that was replaced, but never a mixture.
        assert store.gather("a", [0, 4], 2, etag) == b"0145"
        store.gather("a", [1, 5], 3, etag)
    for key in ("b", "../a", "a/b", "a\0"):
        with pytest.raises(ObjectNotFoundError):
            store.gather(key, [0], 2)


@pytest.mark.parametrize(("start", "num_bytes"), [(0, 11), (10, 1), (9, 2), (500, 4), (1 << 40, 1)])
def test_reading_past_the_end_is_an_error(factory: Factory, start: int, num_bytes: int) -> None:
    store = factory({"a": b"0123456789", "b": b"x" * 5000})
    with pytest.raises(ShortReadError, match=f"{num_bytes}.*requested at offset {start}"):
        store.read("a", start, num_bytes)


def test_reading_before_the_start_is_an_error(factory: Factory) -> None:
    store = factory({"a": b"0123456789"})
    for start in (-1, -5, -512):
        with pytest.raises(ShortReadError):
            store.read("a", start, 4)


def test_missing_keys(factory: Factory) -> None:
    store = factory({"dir/a": b"0"})
    for key in ("b", "dir/b", "dir", "dir/a/b", "x/y/z", "dir/a\0", "n" * 5000, "\ud800"):
        with pytest.raises(ObjectNotFoundError):
            store.read(key, 0, 1)
        with pytest.raises(ObjectNotFoundError):
            store.connector.stat(store.place(key))


def test_keys_do_not_lead_out(factory: Factory) -> None:
    store = factory({"dir/a": b"0", "b": b"1"})
    for key in ("../etc/passwd", "/etc/passwd", "dir/../b", "..", ".", "", "dir/", "./b", "dir//a", "dir/./a"):
        with pytest.raises(ObjectNotFoundError):
            store.read(key, 0, 1)
        with pytest.raises(ObjectNotFoundError):
            store.connector.stat(store.place(key))


def test_a_replaced_object_is_noticed(factory: Factory) -> None:
    store = factory({"a": b"old old old"})
    old = store.connector.stat(store.place("a"))
    store.replace("a", b"new")
    with pytest.raises(ObjectChangedError, match="start again"):
        store.read("a", 0, 3, old.etag)
    new = store.connector.stat(store.place("a"))
    assert new.etag != old.etag
    assert store.read("a", 0, 3, new.etag) == b"new"
    with pytest.raises(ObjectChangedError):
        store.read("a", 0, 3, old.etag)


@pytest.mark.parametrize(
    "key",
    [
        "with space",
        "a+b%20c",
        "%2e%2e",
        "naïve/日本語.jpg",
        "café",
        "-x",
        "~",
        "a\nb",
        "q?x=1&y#z",
        "\udce9",
        "x.tar/y",
    ],
)
@pytest.mark.matrix(60)
def test_unusual_keys(factory: Factory, key: str, request: pytest.FixtureRequest) -> None:
    if any(word in request.node.callspec.params["factory"] for word in NOT_EVERYWHERE.get(key, ())):
        pytest.skip("the store cannot call an object so")
    store = factory({key: b"data"})
    assert [info.key for info in store.connector.list(store.place(""))] == [store.place(key)]
    assert store.read(key, 1, 2) == b"at"
    assert store.place(key).split("/")[-1] in store.connector.describe(store.place(key))


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=num_examples(80))
@given(
    data=st.binary(min_size=1, max_size=60).map(lambda seed: seed * 700),
    wanted=st.lists(
        st.tuples(
            st.sampled_from(["a", "a", "b", "none", "../a", "a\0", "\ud800"]),
            st.integers(0, 43000),
            st.sampled_from([0, 1, 7, 500, 9000]),
            st.sampled_from(["as listed", "unknown", "old"]),
        ),
        max_size=12,
    ),
    in_order=st.booleans(),
)
@pytest.mark.matrix(8)
def test_reading_many_is_reading_each(
    kind: str, data: bytes, wanted: list[tuple[str, int, int, str]], in_order: bool
) -> None:
    """Ranges in any order, overlapping or with gaps; what one of them lacks is that one's error, the same as alone."""
    with opened(kind) as factory:
        store = factory({"a": data, "b": data[::-1]})
        read_many = bulk_of(store.connector).read_many
        if read_many is None:
            return
        listed = {key: store.connector.stat(store.place(key)).etag for key in ("a", "b")}
        ranges = []
        for key, start, length, etag in sorted(wanted) if in_order else wanted:
            tag = {"as listed": listed.get(key, ""), "unknown": None, "old": "0-0"}[etag]
            ranges.append(ByteRange(store.place(key), start, length, tag))
        offsets = [8 + sum(found.length + 3 for found in ranges[:number]) for number in range(len(ranges))]
        buffer = bytearray(8 + sum(found.length + 3 for found in ranges))
        columns = Ranges(*([found[i] for found in ranges] for i in range(4)))  # type: ignore[arg-type]
        errors = read_many(columns, offsets, memoryview(buffer))
        assert errors.keys() <= {*range(len(ranges))}
        for number, (found, offset) in enumerate(zip(ranges, offsets, strict=True)):
            error = errors.get(number)
            alone = bytearray(found.length)
            try:
                store.connector.read_into(found.key, found.start, memoryview(alone), etag=found.etag)
            except ConnectorError as expected:
                assert (type(error), str(error)) == (type(expected), str(expected))  # noqa: PT017 - two ways are compared
            else:
                assert error is None
                assert buffer[offset : offset + found.length] == alone


def test_a_connector_that_reads_in_its_own_way_is_not_passed_by(tmp_path: Path) -> None:
    class Shouting(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            super().read_into(key, start, buffer, etag=etag)
            buffer[:] = bytes(buffer).upper()

    (tmp_path / "a.txt").write_text("quiet")
    (tmp_path / "r.bin").write_bytes(b"abcd" * 8)
    shouting = {"file": Shouting(tmp_path)}
    with loaderkit.build(
        loaderkit.Pipeline.files(tmp_path, include="*.txt").read().batch(1), connectors=shouting
    ) as found:
        assert next(iter(found))["txt"] == [b"QUIET"]
    records = loaderkit.Pipeline.array(tmp_path / "r.bin", dtype="uint8", shape=[4]).read().batch(8)
    with loaderkit.build(records, connectors=shouting) as found:
        assert bytes(next(iter(found))["data"].numpy()) == b"ABCD" * 8


def test_layers_pass_traits_on_and_assume_little_of_a_connector_that_declares_nothing(tmp_path: Path) -> None:
    memory = MemoryConnector()
    plain = Plain(memory)
    assert (traits_of(plain).is_remote, traits_of(plain).coalesce_gap, traits_of(plain).part_size) == (False, 2**20, 0)
    assert bulk_of(plain) == BulkReads()
    s3 = S3Connector("s3://anywhere")
    policy, args = RetryPolicy(), CacheArgs(dir=str(tmp_path), size=10_000_000)
    for inner in (plain, memory, s3):
        expected = traits_of(inner)
        assert RetryConnector(inner, policy).traits == expected
        assert TarConnector(inner, lambda info: []).traits == expected
        assert ReadAheadConnector(inner, no_pieces, memory_bytes=1, num_requests=1).traits == expected
        assert CacheConnector(inner, args).traits == replace(expected, part_size=0)
    assert s3.traits.is_remote
    assert s3.traits.store != ""


@pytest.mark.matrix(6)
def test_many_threads(factory: Factory) -> None:
    objects = {f"d{i % 7}/{i}": bytes([i]) * (i + 1) for i in range(100)}
    store = factory(objects)
    etags = {info.key: info.etag for info in store.connector.list(store.place(""))}

    def check(i: int) -> bool:
        key, data = list(objects.items())[i % 100]
        return store.read(key, 0, len(data), etags[store.place(key)]) == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(2000)))


def test_close_twice(factory: Factory) -> None:
    store = factory({"a": b""})
    store.connector.close()
    store.connector.close()
