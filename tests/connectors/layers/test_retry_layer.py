"""A connector whose reads are tried again, and given up where they hang."""

from __future__ import annotations

import errno
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderkit
from loaderkit.connectors.base import BulkReads, ObjectInfo, Ranges, bulk_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.errors import (
    RequestTimeoutError,
    TemporaryError,
)


class Flaky(MemoryConnector):
    """Fails as it is told to, before it does what it is asked."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.failures: list[Callable[[], None]] = []

    def fail(self) -> None:
        if self.failures:
            self.failures.pop()()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list(prefix)):
            if number == 1500:
                self.fail()
            yield info

    def stat(self, key: str) -> ObjectInfo:
        self.fail()
        return super().stat(key)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.fail()
        super().read_into(key, start, buffer, etag=etag)


def away() -> None:
    raise TemporaryError("away")


class TestConnector:
    def test_everything_is_tried_again(self) -> None:
        inner = Flaky({f"{number:04}": b"abc" for number in range(2000)})
        connector = RetryConnector(inner, RetryPolicy(first_wait_s=0.001))
        inner.failures = [away, away]
        assert [info.key for info in connector.list("")] == [f"{number:04}" for number in range(2000)]
        inner.failures = [away]
        assert connector.stat("0001").size == 3
        inner.failures = [away, away]
        buffer = bytearray(3)
        connector.read_into("0001", 0, memoryview(buffer))
        assert buffer == b"abc"
        assert connector.counters() == {"num_retries": 5, "num_timeouts": 0}

    def test_a_listing_may_take_longer_than_a_read(self) -> None:
        inner = Flaky({f"{number:04}": b"abc" for number in range(2000)})
        connector = RetryConnector(inner, RetryPolicy(max_attempts=1), timeout_s=0.1)

        def take_long() -> None:
            threading.Event().wait(0.3)

        inner.failures = [take_long]
        assert len(list(connector.list(""))) == 2000
        assert connector.counters()["num_timeouts"] == 0
        connector.close()

    def test_what_hangs(self) -> None:
        inner = Flaky({"a": b"abc"})
        release = threading.Event()
        connector = RetryConnector(inner, RetryPolicy(total_s=30, first_wait_s=0.001), timeout_s=0.5)

        def hang() -> None:
            release.wait()

        inner.failures = [hang, hang]
        buffer = bytearray(3)
        connector.read_into("a", 0, memoryview(buffer))
        assert buffer == b"abc"
        assert connector.counters() == {"num_retries": 2, "num_timeouts": 2}
        inner.failures = [hang] * 3
        short = RetryConnector(inner, RetryPolicy(total_s=30, max_attempts=2, first_wait_s=0.001), timeout_s=0.5)
        with pytest.raises(RequestTimeoutError, match=r"memory://a: no answer within 0.5 s.*tried 2 times"):
            short.read_into("a", 0, memoryview(buffer))
        release.set()
        for one in (connector, short):
            one.close()

    def test_a_files_ways_to_read_many_are_kept(self, tmp_path: Path) -> None:
        connector = RetryConnector(FileConnector(tmp_path), RetryPolicy())
        assert bulk_of(connector).read_many is not None
        assert bulk_of(connector).gather_into is not None
        assert bulk_of(connector).scatter_into is not None
        assert bulk_of(RetryConnector(FileConnector(tmp_path), RetryPolicy(), 5.0)).read_many is None
        assert bulk_of(RetryConnector(MemoryConnector(), RetryPolicy())).read_many is None
        again = pickle.loads(pickle.dumps(connector))
        assert type(again) is type(connector)

    def test_what_fails_of_many_is_read_again_from_its_own_place(self, rng: random.Random) -> None:
        objects = {f"{number}": rng.randbytes(rng.randrange(50, 90)) for number in range(9)}
        failing = rng.sample(range(9), 4)

        class Many(MemoryConnector):
            def bulk(self) -> BulkReads:
                return BulkReads(read_many=self.read_many)

            def read_many(self, ranges: Ranges, offsets: list[int], buffer: memoryview) -> Mapping[int, Exception]:
                for number in range(len(offsets)):
                    if number not in failing:
                        part = buffer[offsets[number] : offsets[number] + ranges.lengths[number]]
                        self.read_into(ranges.keys[number], ranges.starts[number], part)
                return {number: TemporaryError("away") for number in failing}

        read_many = bulk_of(RetryConnector(Many(objects), RetryPolicy(first_wait_s=0.001))).read_many
        assert read_many is not None
        starts, lengths = ([rng.randrange(1, 25) for _ in objects] for _ in range(2))
        offsets = [sum(lengths[:number]) for number in range(9)]
        buffer = bytearray(sum(lengths))
        assert read_many(Ranges([*objects], starts, lengths, [None] * 9), offsets, memoryview(buffer)) == {}
        wanted = zip(objects.values(), starts, lengths, strict=True)
        assert buffer == b"".join(data[start : start + length] for data, start, length in wanted)

    def test_a_subclass_with_a_read_and_no_faster_ones_sees_every_read(self, tmp_path: Path) -> None:
        class Counting(RetryConnector):
            num_reads = 0

            def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
                self.num_reads += 1
                super().read_into(key, start, buffer, etag=etag)

            def bulk(self) -> BulkReads:
                return BulkReads()

        for number in range(12):
            (tmp_path / f"{number:02}.bin").write_bytes(bytes(10))
        connector = Counting(FileConnector(str(tmp_path)), RetryPolicy(5, 3))
        assert bulk_of(connector).read_many is None
        pipeline = {
            "source": {"kind": "files", "url": "store://", "include": "*.bin"},
            "order": {"epochs": 1},
            "stages": ["read", {"batch": {"size": 4}}],
        }
        with loaderkit.build(pipeline, connectors={"store": connector}) as loader:
            num_before = connector.num_reads
            assert sum(len(batch["__key__"]) for batch in loader) == 12
        assert connector.num_reads - num_before >= 12

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
    def test_files_on_a_network_disk(self, tmp_path: Path, number: int) -> None:
        (tmp_path / "a").write_bytes(b"abc")
        (tmp_path / "b").write_bytes(b"defg")

        class Disk(FileConnector):
            """As `FileConnector` is when the kernel says this."""

            left = 3

            def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
                if Disk.left:
                    Disk.left -= 1
                    raise self._translated(key, OSError(number, os.strerror(number)))
                super().read_into(key, start, buffer, etag=etag)

            def read_many(self, ranges: Ranges, offsets: Any, buffer: memoryview) -> Any:
                return {number: TemporaryError("x") for number in range(len(ranges.keys))}

            def gather_into(self, key: str, starts: Any, length: int, buffer: memoryview, *, etag: Any = None) -> None:
                self.read_into(key, 0, memoryview(bytearray(1)))
                super().gather_into(key, starts, length, buffer, etag=etag)

            def bulk(self) -> BulkReads:
                return BulkReads(self.read_many, self.gather_into)

        connector = RetryConnector(Disk(tmp_path), RetryPolicy(first_wait_s=0.001))
        bulk: Any = connector.bulk()
        buffer = bytearray(7)
        assert bulk.read_many(Ranges(["a", "b"], [0, 0], [3, 4], [None, None]), [0, 3], memoryview(buffer)) == {}
        assert buffer == b"abcdefg"
        assert connector.counters()["num_retries"] == 3
        Disk.left = 2
        bulk.gather_into("b", np.array([2, 0]), 2, memoryview(buffer)[:4])
        assert buffer[:4] == b"fgde"

    def test_in_a_pipeline(self, tmp_path: Path) -> None:
        inner = Flaky({f"{number}.txt": b"x" for number in range(8)})
        pipeline = {
            "source": {"kind": "files", "url": "memory://", "retry": {"total": "20s"}},
            "stages": ["read", {"batch": {"size": 4}}],
        }
        with loaderkit.build(pipeline, connectors={"memory": inner}) as loader:
            inner.failures = [away, away]
            assert len(list(loader)) == 2
            assert loader.stats().to_dict()["store"]["num_retries"] == 2
        inner.stat("0.txt")  # it was given, so it is not closed
