"""What a listing, an index and an order cost and hold, by the number of samples. Each size in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.file import FileConnector
from loaderkit.engine.metrics.host import host_stats
from loaderkit.sampling.schedule import BlockOrder, GlobalOrder
from loaderkit.sources.files.source import FilesArgs, FilesSource
from loaderkit.sources.formats.tar_index import TarIndex, load_index
from loaderkit.sources.tar.source import TarArgs, TarSource

SIZES = (10**5, 10**6, 10**7)
TARGET = 10**9
PER_SHARD = 10_000
_SCANNED = 10_000  # samples of a real archive
_SHARD_BYTES = 1 << 30


class MadeUp:
    """A store of so many objects, listed as a bucket would be."""

    def __init__(self, make: Callable[[int], ObjectInfo], num: int) -> None:
        self._make, self._num = make, num

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return map(self._make, range(self._num))

    def describe(self, key: str) -> str:
        return key

    def close(self) -> None:
        """Nothing is open."""


def _file(number: int) -> ObjectInfo:
    return ObjectInfo(f"train/{number // 1300:06}/{number:010}.jpg", 110_000, f'"{number:032x}"')


def _shard(number: int) -> ObjectInfo:
    return ObjectInfo(f"shard-{number:06}.tar", _SHARD_BYTES, f'"{number:032x}"')


def files(num: int) -> dict[str, float]:
    """`kind: files`, without what the store takes to answer."""
    begin_s = time.process_time()
    for number in range(num):
        _file(number)
    making_s = time.process_time() - begin_s
    before_bytes, begin_s = rss_bytes(), time.process_time()
    source = FilesSource(cast("Connector", MadeUp(_file, num)), FilesArgs(url="memory://made-up", include="**/*.jpg"))
    took_s = time.process_time() - begin_s - making_s
    return {**_of(source, num, took_s, before_bytes), "making_s": making_s}


def tar(num: int) -> dict[str, float]:
    """`kind: tar`, two members a sample, from indexes that are there."""
    shards = max(1, num // PER_SHARD)
    starts = np.arange(2 * PER_SHARD, dtype=np.int64) * 51_200 + 512
    sizes = np.tile(np.array([100_000, 4], np.int64), PER_SHARD)
    spent_s = 0.0

    def load(info: ObjectInfo) -> TarIndex:
        nonlocal spent_s
        begin_s = time.thread_time()
        first = int(info.key[6:12]) * PER_SHARD
        names = "".join(f"{n:010}.cls\0{n:010}.jpg\0" for n in range(first, first + PER_SHARD)).encode()
        index = TarIndex(starts, sizes, names)
        spent_s += time.thread_time() - begin_s
        return index

    before_bytes, begin_s = rss_bytes(), time.process_time()
    source = TarSource(cast("Connector", MadeUp(_shard, shards)), TarArgs(url="memory://made-up"), load)
    return _of(source, num, time.process_time() - begin_s - spent_s, before_bytes)


def _of(source: Any, num: int, took_s: float, before_bytes: int) -> dict[str, float]:
    assert len(source) == num
    held_bytes = rss_bytes() - before_bytes
    begin_s = time.process_time()
    source.fingerprint()
    return {
        "num": num,
        "cpu_s": took_s,
        "held_bytes": held_bytes,
        "peak_bytes": peak_bytes() - before_bytes,
        "fingerprint_s": time.process_time() - begin_s,
    }


def array(num: int) -> dict[str, float]:
    """`kind: array`: records of 16 bytes of a file that is all hole, built, one batch read, and its state taken."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.bin"
        with open(path, "wb") as file:
            file.truncate(16 * num)
        pipeline = Pipeline.array(path, dtype="uint8", shape=[16]).shuffle(seed=0).read().batch(64)
        loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}).close()  # imports
        before_bytes, begin_s = rss_bytes(), time.process_time()
        with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
            next(iter(loader))
            took_s = time.process_time() - begin_s
            begin_s = time.perf_counter()
            for _ in range(100):
                state = loader.state_dict()
            state_s = (time.perf_counter() - begin_s) / 100
            return {
                "num": num,
                "cpu_s": took_s,
                "held_bytes": max(0, rss_bytes() - before_bytes),
                "state_bytes": len(json.dumps(state)),
                "state_s": state_s,
            }


def scan(num: int) -> dict[str, float]:
    """A real archive of small samples: its index by scanning it, from the copy in the cache, and the copy's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "shard.tar", Path(folder) / "cache"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(num):
                for name, size in ((f"{number:010}.cls", 4), (f"{number:010}.jpg", 1000)):
                    member = tarfile.TarInfo(name)
                    member.size = size
                    archive.addfile(member, BytesIO(bytes(size)))
        connector = FileConnector(str(folder))
        info = connector.stat("shard.tar")
        found = {}
        for name in ("scan_s", "copy_s"):
            begin_s = time.process_time()
            index = load_index(connector, info, cache)
            found[name] = (time.process_time() - begin_s) / num
            assert len(index) == 2 * num
        copied = sum(one.stat().st_size for one in cache.rglob("*.npz"))
        return {"num": num, **found, "copy_bytes": copied / num}


def order(num: int) -> dict[str, float]:
    """`shuffle: global`: which samples stand at 256 positions of an epoch of `num`, anywhere in it."""
    made = GlobalOrder(num, seed=1)
    positions = np.random.default_rng(0).integers(0, num, (200, 256))
    begin_s = time.process_time()
    for row in positions:
        made.indices(3, row)
    return {"num": num, "cpu_s": (time.process_time() - begin_s) / len(positions)}


def blocks(num: int) -> dict[str, float]:
    """`shuffle: block`: an epoch of `num` blocks of 100 samples laid out, then the samples at 256 positions."""
    bounds = np.arange(num + 1, dtype=np.int64) * 100
    before_bytes, begin_s = rss_bytes(), time.process_time()
    made = BlockOrder(bounds, 1, window=16, lanes=8)
    made.indices(0, np.arange(256))
    laid_out_s = time.process_time() - begin_s
    held_bytes = rss_bytes() - before_bytes
    begin_s = time.process_time()
    for first in range(0, 25_600, 256):
        made.indices(0, np.arange(first, first + 256))
    return {
        "num": num,
        "layout_s": laid_out_s,
        "held_bytes": held_bytes,
        "peak_bytes": peak_bytes() - before_bytes,
        "cpu_s": (time.process_time() - begin_s) / 100,
    }


WORKS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, ...]]] = {
    "files": (files, SIZES),
    "tar": (tar, SIZES),
    "array": (array, (*SIZES, TARGET)),
    "scan": (scan, (_SCANNED,)),
    "order": (order, (*SIZES, TARGET, 10**12)),
    "blocks": (blocks, SIZES),
}


def measure() -> dict[str, list[dict[str, float]]]:
    """The rows of every work, by size."""
    return {name: [_apart(name, num) for num in sizes] for name, (_, sizes) in WORKS.items()}


def _apart(name: str, num: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "profiles.scale.listings", name, str(num)], check=True, capture_output=True, text=True
    )
    row: dict[str, float] = json.loads(done.stdout)
    print(name, row, flush=True)
    return row


def rss_bytes() -> int:
    """Memory of this process now."""
    return host_stats().rss_bytes


def peak_bytes() -> int:
    """The most that it has been."""
    return host_stats().rss_peak_bytes


if __name__ == "__main__":
    print(json.dumps(WORKS[sys.argv[1]][0](int(sys.argv[2]))))
