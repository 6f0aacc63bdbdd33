"""Reading ahead: what is held, for how long, in how much memory, and that what is read is right whatever the forecast says."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from waiting import LIMIT_S, join_threads, wait_for

import loaderkit
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.ranges import RangeRequest, RangeSlice, coalesce
from loaderkit.diagnosis.stats import Stats
from loaderkit.errors import ObjectChangedError, TemporaryError
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.schedule import BatchSampler, BlockOrder, GlobalOrder, SequentialOrder
from loaderkit.sampling.shard import Shard
from loaderkit.sources.files.source import FilesArgs, FilesSource
from loaderkit.sources.forecast import Forecast

DATA = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
_MADE: list[ReadAheadConnector] = []


class Watched(MemoryConnector):
    """Knows what is on its way, and can be made to wait or fail."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        self.begun.release()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        super().read_into(key, start, buffer, etag=etag)


def read(connector: ReadAheadConnector, key: str, start: int, num_bytes: int, etag: str | None) -> bytes:
    buffer = bytearray(num_bytes)
    connector.read_into(key, start, memoryview(buffer), etag=etag)
    return bytes(buffer)


def made(inner: Watched, pieces: list[RangeSlice], **more: int) -> ReadAheadConnector:
    def from_place(epoch: int, position: int) -> Iterator[RangeSlice]:
        return iter(pieces[position:])

    connector = ReadAheadConnector(inner, from_place, **{"memory_bytes": 50_000, "num_requests": 3, **more})
    _MADE.append(connector)
    return connector


@pytest.fixture
def inner() -> Watched:
    return Watched({"a": DATA, "b": DATA[::-1]})


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    try:
        join_threads("loaderkit-ahead")
    finally:
        while _MADE:  # a test that failed leaves nothing to the next
            _MADE.pop().stop()


def blocks_of(key: str, etag: str, size: int, num: int) -> list[RangeSlice]:
    return [RangeSlice(key, n * size, size, etag, 10 * n, 10 * n + 9, size) for n in range(num)]


class Remote(MemoryConnector):
    """A remote store that answers for the objects from `016.bin` on when its gate is opened."""

    traits = ConnectorTraits(is_remote=True)

    def __init__(self) -> None:
        super().__init__({f"{number:03}.bin": DATA[:5000] for number in range(64)})
        self.gate = threading.Event()

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if key >= "016":
            self.gate.wait()
        super().read_into(key, start, buffer, etag=etag)


@pytest.mark.parametrize("memory", ["1MiB", "2KiB"], ids=["read ahead", "read by the workers"])
def test_a_wait_for_bytes_is_charged_to_read_and_counts_once(memory: str) -> None:
    store = Remote()
    pipeline = {
        "source": {"kind": "files", "url": "memory://", "include": "*.bin", "read_ahead": {"memory": memory}},
        "order": {"shuffle": "none", "epochs": 1},
        "stages": ["read", {"batch": {"size": 8}}],
        "prefetch": {"executor": "thread", "concurrency": 2, "batches": 2},
    }
    is_ahead = memory == "1MiB"
    with loaderkit.build(pipeline, connectors={"memory": store}) as loader, ThreadPoolExecutor(1) as loop:
        batches = iter(loader)
        next(batches)
        first = loader.stats()
        remaining = loop.submit(lambda: [len(batch["__key__"]) for batch in batches])
        try:
            wait_for(lambda: is_for_read(loader.stats(since=first)))
            waiting = loader.stats(since=first)
        finally:
            store.gate.set()
        assert remaining.result() == [8] * 7
        ended = loader.stats(since=first)
    for stats in (waiting, ended):
        assert sum(stats.stall_s.values()) <= stats.wall_s * 1.001, "no wait counts twice"
        assert (stats.store["ahead_wait_s"] > 0) == is_ahead
    read = waiting.stages[0]
    assert read.busy_s > 2 * read.cpu_s, "a worker that waits is in `read`, and off the CPU"
    assert waiting.store["ahead_wait_s"] > read.busy_s / 2 or not is_ahead
    assert ended.store["ahead_wait_s"] <= ended.stages[0].busy_s, "it is a part of that time, not time beside it"
    assert ended.waits_s["read"] >= 0.99 * waiting.waits_s["read"], "once charged it stays charged"
    assert waiting.verdict().stage == "read"
    assert ("bytes being read ahead" in waiting.verdict().evidence) == is_ahead


def is_for_read(stats: Stats) -> bool:
    """True if `read` has more than nine tenths of the stall, and that is long enough to be no hand-off."""
    return stats.stall_s.get("read", 0.0) > max(0.1, 0.9 * sum(stats.stall_s.values()))


class TestReading:
    def test_the_time_readers_wait_is_counted(self, inner: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        etag, is_waiting, seconds = inner.stat("a").etag, threading.Event(), itertools.count()

        def clock() -> float:  # a reader looks at it when it begins to wait
            if threading.current_thread() is reader:
                is_waiting.set()
            return float(next(seconds))

        monkeypatch.setattr("loaderkit.connectors.layers.read_ahead.time", types.SimpleNamespace(perf_counter=clock))
        inner.gate.clear()
        connector = made(inner, blocks_of("a", etag, 1000, 3))
        reader = threading.Thread(target=read, args=(connector, "a", 0, 1000, etag))
        reader.start()
        assert is_waiting.wait(LIMIT_S)
        assert connector.counters()["ahead_wait_s"] > 0
        assert reader.is_alive(), "the wait counts while it lasts"
        inner.gate.set()
        reader.join()
        waited_s = connector.counters()["ahead_wait_s"]
        assert waited_s == connector.counters()["ahead_wait_s"] > 0
        assert connector.counters()["num_direct_reads"] == 0
        connector.stop()

    def test_a_block_is_fetched_once_and_dropped(self, inner: Watched) -> None:
        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 1000, 100))
        for place in range(0, 100_000, 100):
            assert read(connector, "a", place, 100, etag) == DATA[place : place + 100]
        counters = connector.counters()
        assert counters["num_direct_reads"] == 0
        assert counters["held_bytes"] == 0
        assert [num for _, _, num in inner.reads] == [1000] * 100
        connector.stop()

    def test_a_thread_that_does_not_start_is_not_waited_for(
        self, inner: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(thread: threading.Thread) -> None:
            raise KeyboardInterrupt

        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 1000, 100))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(threading.Thread, "start", refuse)
            read(connector, "a", 0, 100, etag)
        assert read(connector, "a", 0, 100, etag) == DATA[:100]
        connector.close()

    def test_memory_is_bounded(self, inner: Watched) -> None:
        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 10_000, 10), memory_bytes=25_000)
        inner.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(read, connector, "a", 0, 10_000, etag)
            inner.gate.set()
            assert first.result() == DATA[:10_000]
        for place in range(10_000, 100_000, 5_000):
            assert read(connector, "a", place, 5_000, etag) == DATA[place : place + 5_000]
            assert connector.counters()["held_bytes"] <= 25_000
        connector.stop()

    def test_what_is_not_forecast_is_read_directly(self, inner: Watched) -> None:
        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 1000, 3))
        assert read(connector, "b", 5, 10, inner.stat("b").etag) == DATA[::-1][5:15]
        assert read(connector, "a", 990, 20, etag) == DATA[990:1010]  # across two blocks
        assert read(connector, "a", 0, 10, None) == DATA[:10]
        with pytest.raises(ObjectChangedError):
            read(connector, "a", 0, 10, "another")
        connector.stop()

    def test_errors_are_raised_for_who_wants_the_bytes(self, inner: Watched) -> None:
        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 1000, 100))
        inner.error = TemporaryError("away for long")
        for place in range(0, 1000, 100):
            with pytest.raises(TemporaryError, match="away for long"):
                read(connector, "a", place, 100, etag)
        assert inner.reads.count(("a", 0, 1000)) == 1  # tried for a block, not for each sample in it
        assert not [num for _, _, num in inner.reads if num == 100]
        connector.stop()

    def test_stopping_wakes_who_waits(self, inner: Watched) -> None:
        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 1000, 100))
        assert read(connector, "b", 0, 1, None) == DATA[-1:]
        inner.gate.clear()
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(read, connector, "a", 60_000, 100, etag) for _ in range(4)]
            threading.Timer(0.05, inner.gate.set).start()
            connector.stop()
            for one in found:
                if one.exception() is None:
                    assert one.result() == DATA[60_000:60_100]
        connector.stop()

    def test_who_waits_for_a_piece_has_its_memory(self, inner: Watched) -> None:
        """Memory for one block, three readers that take turns at several: none may wait for memory that is never freed."""
        etag = inner.stat("a").etag
        for _ in range(20):
            connector = made(inner, blocks_of("a", etag, 1000, 6), memory_bytes=2000, num_requests=1)
            wanted = [(block, part) for part in range(10) for block in range(6)][:40]
            with ThreadPoolExecutor(3) as pool:
                calls = [
                    pool.submit(read, connector, "a", 1000 * block + 100 * part, 100, etag) for block, part in wanted
                ]
            found = [call.result() for call in calls]
            assert found == [DATA[1000 * block + 100 * part :][:100] for block, part in wanted]
            connector.stop()

    def test_a_seek_begins_elsewhere(self, inner: Watched) -> None:
        etag = inner.stat("a").etag
        connector = made(inner, blocks_of("a", etag, 1000, 100), memory_bytes=3000)
        assert read(connector, "a", 0, 1000, etag) == DATA[:1000]
        for _ in range(4):  # the first, and the next three: no room for more
            assert inner.begun.acquire(timeout=LIMIT_S)
        connector.seek(0, 50)
        inner.reads.clear()
        for place in range(50_000, 100_000, 1000):
            assert read(connector, "a", place, 1000, etag) == DATA[place : place + 1000]
        assert connector.counters()["num_direct_reads"] == 0
        assert min(start for _, start, _ in inner.reads) == 50_000
        connector.stop()

    @settings(max_examples=num_examples(40))
    @given(
        planned=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 900), st.integers(1, 99)), max_size=30),
        wanted=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 900), st.integers(1, 99)), max_size=60),
        memory=st.integers(1, 2000),
    )
    def test_any_forecast_any_reads(
        self, planned: list[tuple[str, int, int]], wanted: list[tuple[str, int, int]], memory: int
    ) -> None:
        inner = Watched({"a": DATA[:1000], "b": DATA[1000:2000]})
        etags = {key: inner.stat(key).etag for key in "ab"}
        pieces = [RangeSlice(key, start, num, etags[key], n, n, num) for n, (key, start, num) in enumerate(planned)]
        connector = made(inner, pieces, memory_bytes=memory, slack=3, num_samples=10)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda one: read(connector, one[0], one[1], one[2], etags[one[0]]), wanted))
        data = {"a": DATA[:1000], "b": DATA[1000:2000]}
        assert found == [data[key][start : start + num] for key, start, num in wanted]
        assert connector.counters()["held_bytes"] <= memory
        connector.stop()


class TestCoalescing:
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5_000_000), st.integers(0, 100_000)), max_size=40))
    def test_all_is_covered_and_little_more(self, ranges: list[tuple[str, int, int]]) -> None:
        wanted = [RangeRequest(key, start, length, "e", n) for n, (key, start, length) in enumerate(ranges)]
        pieces = coalesce(wanted, most_bytes=2_000_000)
        for one in wanted:
            if one.length:
                covering = [
                    piece
                    for piece in pieces
                    if piece.key == one.key
                    and piece.start <= one.start
                    and one.start + one.length <= piece.start + piece.length
                    and piece.first <= one.first <= piece.last
                ]
                assert covering
        assert sum(piece.wanted_bytes for piece in pieces) == sum(one.length for one in wanted)
        for piece in pieces:
            assert piece.length - piece.wanted_bytes <= max(piece.wanted_bytes // 4, 64 << 10)
            assert piece.length <= 2_000_000


class TestForecast:
    @settings(max_examples=num_examples(60))
    @given(
        num=st.integers(1, 60),
        order=st.sampled_from(["global", "none", "block"]),
        world_size=st.integers(1, 4),
        start=st.integers(0, 59),
        seed=st.integers(0, 5),
    )
    def test_every_sample_is_in_a_piece_before_it_is_wanted(
        self, num: int, order: str, world_size: int, start: int, seed: int
    ) -> None:
        store = MemoryConnector({f"{n:03}.bin": bytes(1 + n) for n in range(num)})
        source = FilesSource(store, FilesArgs(url="memory://"))
        bounds = source.blocks(50)
        orders: dict[str, SampleOrder] = {
            "global": GlobalOrder(num, seed),
            "none": SequentialOrder(num),
            "block": BlockOrder(bounds, seed, window=2, lanes=3),
        }
        for rank in range(world_size):
            schedule = BatchSampler(num, rank, world_size, 3, False)
            forecast = Forecast(source, orders[order], schedule, num_epochs=2)
            pieces = list(forecast.slices(0, min(start, num)))
            assert [piece.first for piece in pieces] == sorted(piece.first for piece in pieces)
            number = 0
            for epoch, begin in ((0, min(start, num)), (1, 0)):
                for step in range(schedule.num_batches(begin)):
                    positions = schedule.positions(begin, step) % num
                    for index in orders[order].indices(epoch, positions).tolist():
                        key = source.key(index)
                        assert [p for p in pieces if p.key == key and p.first <= number <= max(p.last, number)]
                        number += 1
            if order != "none" and world_size == 1 and start == 0:
                assert len(pieces) == 2 * num

    @settings(max_examples=num_examples(40))
    @given(
        num=st.integers(1, 60),
        is_block=st.booleans(),
        num_processes=st.integers(2, 4),
        start=st.integers(0, 59),
    )
    def test_every_process_has_the_samples_of_its_batches(
        self, num: int, is_block: bool, num_processes: int, start: int
    ) -> None:
        store = MemoryConnector({f"{n:03}.bin": bytes(1 + n) for n in range(num)})
        source = FilesSource(store, FilesArgs(url="memory://"))
        bounds = source.blocks(50)
        order: SampleOrder = BlockOrder(bounds, 1, window=2, lanes=3) if is_block else GlobalOrder(num, 1)
        schedule = BatchSampler(num, 0, 1, 3, False)
        wanted: list[list[str]] = [[] for _ in range(num_processes)]
        batch = 0
        for epoch, begin in ((0, min(start, num)), (1, 0)):
            for step in range(schedule.num_batches(begin)):
                indices = order.indices(epoch, schedule.positions(begin, step) % num)
                wanted[batch % num_processes] += [source.key(index) for index in indices.tolist()]
                batch += 1
        for process, keys in enumerate(wanted):
            forecast = Forecast(
                source,
                order,
                schedule,
                num_epochs=2,
                shard=Shard(process, num_processes),
            )
            pieces = list(forecast.slices(0, min(start, num)))
            assert sorted(piece.key for piece in pieces) == sorted(keys)
            assert [piece.first for piece in pieces] == sorted(piece.first for piece in pieces)
