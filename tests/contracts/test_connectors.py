"""What every connector promises, for each of them: listing order, prefixes, ranges, errors, threads."""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from num_examples import num_examples
from seaweed import Seaweed

import loaderkit
from loaderkit.checkpoint.discovery.archive import TarConnector
from loaderkit.connectors.base import (
    BulkReads,
    Connector,
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
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.ranges import RangeSlice
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.connectors.s3 import S3Connector
from loaderkit.sources.formats.tar_index import scan_tar
from loaderkit.testing import ConnectorContract, Store


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
    return Store(connector, replace=writes.put, is_sent=isinstance(connector, SENT))


def tar_store(inner: Connector, writes: Writes, objects: Mapping[str, bytes]) -> Store:
    writes.put("shards/a.tar", tar_bytes(objects))
    connector = TarConnector(inner, lambda info: scan_tar(inner, info))

    def replace(key: str, data: bytes) -> None:
        writes.put("shards/a.tar", tar_bytes({**objects, key: data}))

    return Store(connector, lambda key: f"shards/a.tar/{key}", replace, is_sent=False)


MakeStore = Callable[[Mapping[str, bytes]], Store]
SENT = (CacheConnector, FileConnector, FsspecConnector, MemoryConnector, RetryConnector, S3Connector)
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
def opened(kind: str) -> Iterator[MakeStore]:
    """A function that makes a store of its own for each set of objects."""
    with ExitStack() as stack:

        def make(objects: Mapping[str, bytes]) -> Store:
            stack.close()
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            Path(directory, "root").mkdir()
            inner, writes = made(kind.removeprefix("tar-over-"), f"{directory}/root")
            stack.callback(inner.close)
            return (tar_store if kind.startswith("tar") else plain_store)(inner, writes, objects)

        yield make


class TestConnectors(ConnectorContract):
    # Two more layers over the server take a minute.
    @pytest.fixture(
        params=[pytest.param(kind, marks=pytest.mark.prove) if kind.endswith("-over-s3") else kind for kind in KINDS]
    )
    def make_store(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        unnamable = [key for key, kinds in NOT_EVERYWHERE.items() if any(word in request.param for word in kinds)]
        keys = [key for key in ConnectorContract.unusual_keys if key not in unnamable]
        monkeypatch.setattr(type(self), "unusual_keys", keys, raising=False)
        with opened(request.param) as make:
            yield make

    def num_examples(self, most: int) -> int:
        return max(1, num_examples(most))

    @pytest.mark.matrix(8)
    def test_listing_is_ordered_by_the_bytes_of_the_key(self, make_store: MakeStore) -> None:
        super().test_listing_is_ordered_by_the_bytes_of_the_key(make_store)

    @pytest.mark.matrix(8)
    def test_gathering_is_reading_one_by_one(self, make_store: MakeStore) -> None:
        super().test_gathering_is_reading_one_by_one(make_store)

    @pytest.mark.matrix(8)
    def test_reading_many_is_reading_each(self, make_store: MakeStore) -> None:
        super().test_reading_many_is_reading_each(make_store)

    @pytest.mark.matrix(6)
    def test_unusual_keys(self, make_store: MakeStore) -> None:
        super().test_unusual_keys(make_store)

    @pytest.mark.matrix(6)
    def test_many_threads(self, make_store: MakeStore) -> None:
        super().test_many_threads(make_store)


@pytest.mark.parametrize(
    "kind", ["file", "retry-over-file", "tar-over-file", "fsspec-file", "fsspec-memory", "s3", "memory"]
)
def test_when_an_object_was_written(kind: str) -> None:
    before_s = time.time()
    with opened(kind) as make_store:
        store = make_store({"a": b"1"})
        modified_s = modified_s_of(store.connector, store.place("a"))
        if kind == "memory":
            assert modified_s is None
            return
        assert modified_s is not None
        assert before_s - 2 <= modified_s <= time.time() + 2  # by clocks that may give whole seconds


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
