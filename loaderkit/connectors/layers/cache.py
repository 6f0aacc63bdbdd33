"""Objects of a slow store on local disk: `source: {cache: {dir: ..., size: ...}}`.

    read_into ──> on disk? ──> yes: read from there, if its checksum is right
                          └──> no: fetched by one thread of one process, returned, and kept

A large object, or one named *.tar, is kept in blocks of 4 MiB, so the pass that indexes an archive fills the cache. Of any
other object each range is kept as it is read, usually the whole object. A read's etag is part of the entry's name, so the
bytes of a cached object never mix with bytes of the object that replaced it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from loaderkit.connectors.base import Connector, ConnectorLayer, ObjectInfo
from loaderkit.connectors.config import CacheArgs
from loaderkit.connectors.layers.disk_cache import DiskCache, entry_name

BLOCK_BYTES = 4 << 20
_MOST_BLOCKS = 16  # fetched together
_WAIT_S = 30.0  # for another process that fetches the same block; after that it is fetched here too


class CacheConnector(ConnectorLayer):
    """`inner`, cached in the folder of `args`. With `owns_inner`, closing this closes `inner`. `store` names the store,
    so that objects of other stores with the same names are told apart in messages; by default it comes from the traits.

    Objects without an etag are not kept, since a replacement could not be noticed.
    """

    def __init__(self, inner: Connector, args: CacheArgs, *, owns_inner: bool = True, store: str | None = None) -> None:
        assert args.dir is not None
        super().__init__(inner)
        self._store = self.traits.store if store is None else store
        self.traits = replace(self.traits, part_size=0)  # a cached range is one read
        self._args = args
        self._owns_inner = owns_inner
        self._disk = DiskCache(args.dir, args.size, verify=args.verify)
        self._large: dict[str, tuple[int, str]] = {}  # size and etag of the objects that are kept in blocks
        self._lock = threading.Lock()
        self._hit_bytes = self._missed_bytes = self._over_read_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        made_of = {"inner": self.inner, "args": self._args, "owns_inner": self._owns_inner, "store": self._store}
        return {**made_of, "large": self._large}

    def __setstate__(self, state: dict[str, Any]) -> None:
        large = state.pop("large")
        self.__init__(**state)  # type: ignore[misc]
        self._large = large

    # ------------------------------------------------------------------------------------------------------ contract

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The listing of `inner`."""
        return map(self._remember, self.inner.list(prefix))

    def stat(self, key: str) -> ObjectInfo:
        """The answer of `inner`."""
        return self._remember(self.inner.stat(key))

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        if etag is None:
            etag = self.stat(key).etag
        if not etag or not len(buffer) or start < 0:
            self.inner.read_into(key, start, buffer, etag=etag)
            return
        size, large_etag = self._large.get(key, (0, ""))
        if large_etag != etag:
            self._read_entry(key, start, buffer, etag)
        elif start + len(buffer) > size:
            self.inner.read_into(key, start, buffer, etag=etag)  # raises the error
        else:
            _Blocks(self, key, etag, size).read(start, buffer)

    def counters(self) -> dict[str, float]:
        """The counters of `inner`, and the cache's own."""
        counts = super().counters()
        counts["over_read_bytes"] = counts.get("over_read_bytes", 0) + self._over_read_bytes
        disk = self._disk
        return counts | {
            "cache_hit_bytes": self._hit_bytes,
            "cache_missed_bytes": self._missed_bytes,
            "num_cache_damaged": disk.num_damaged,
            "num_cache_evicted": disk.num_evicted,
            "num_cache_failures": disk.num_failures,
        }

    def close(self) -> None:
        """Close `inner` if this connector owns it; the cached files stay."""
        if self._owns_inner:
            self.inner.close()

    # -------------------------------------------------------------------------------------------------------- entries

    def _remember(self, info: ObjectInfo) -> ObjectInfo:
        if info.etag and (info.size > BLOCK_BYTES or info.key.endswith(".tar")):
            self._large[info.key] = (info.size, info.etag)
        return info

    def name_of(self, key: str, etag: str, start: int, num_bytes: int) -> str:
        """The name of a cache entry."""
        return entry_name(self._store, self.inner.describe(key), etag, start, num_bytes)

    def _read_entry(self, key: str, start: int, buffer: memoryview, etag: str) -> None:
        name, num_bytes = self.name_of(key, etag, start, len(buffer)), len(buffer)
        if self.find(name, num_bytes, 0, buffer):
            return
        with self._disk.fetching(name, wait_s=_WAIT_S) as is_ours:
            if self._disk.has(name) and self.find(name, num_bytes, 0, buffer):
                return
            self.inner.read_into(key, start, buffer, etag=etag)
            self.keep(name, buffer, num_bytes)
            del is_ours

    def find(self, name: str, whole_bytes: int, start: int, buffer: memoryview) -> bool:
        """Fill `buffer` from a cache entry; False if there is none."""
        if not self._disk.read(name, whole_bytes, start, buffer):
            return False
        with self._lock:
            self._hit_bytes += len(buffer)
        return True

    def keep(self, name: str, data: memoryview, num_wanted: int) -> None:
        """Put fetched bytes into the cache; `num_wanted` of them were requested."""
        self._disk.write(name, data)
        with self._lock:
            self._missed_bytes += num_wanted
            self._over_read_bytes += len(data) - num_wanted

    @property
    def disk(self) -> DiskCache:
        """The folder of entries."""
        return self._disk


class _Blocks:
    """One large object, in blocks."""

    def __init__(self, cache: CacheConnector, key: str, etag: str, size: int) -> None:
        self._cache = cache
        self._key = key
        self._etag = etag
        self._size = size

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from cached blocks; missing blocks are fetched, adjacent ones together."""
        end = start + len(buffer)
        block, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        while block <= last:
            if self._find(block, start, buffer):
                block += 1
            else:
                block = self._fetch(block, last, start, buffer)

    def _bounds(self, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._size)

    def _name(self, block: int) -> str:
        begin, end = self._bounds(block)
        return self._cache.name_of(self._key, self._etag, begin, end - begin)

    def _find(self, block: int, start: int, buffer: memoryview) -> bool:
        begin, end = self._bounds(block)
        lo, hi = max(begin, start), min(end, start + len(buffer))
        return self._cache.find(self._name(block), end - begin, lo - begin, buffer[lo - start : hi - start])

    def _fetch(self, block: int, last: int, start: int, buffer: memoryview) -> int:
        """Fetch a block and those after it that are neither cached nor being fetched; returns the next block.

        A thread that holds locks never waits for another, so there is no deadlock.
        """
        disk = self._cache.disk
        with ExitStack() as stack:
            is_ours = stack.enter_context(disk.fetching(self._name(block), wait_s=_WAIT_S))
            if disk.has(self._name(block)) and self._find(block, start, buffer):
                return block + 1
            after = block + 1
            while is_ours and after <= min(last, block + _MOST_BLOCKS - 1) and not disk.has(self._name(after)):
                if not stack.enter_context(disk.fetching(self._name(after), wait_s=0.0)):
                    break
                after += 1
            self._fetch_run(block, after, start, buffer)
        return after

    def _fetch_run(self, block: int, after: int, start: int, buffer: memoryview) -> None:
        end = start + len(buffer)
        begin, stop = self._bounds(block)[0], self._bounds(after - 1)[1]
        is_inside = start <= begin and stop <= end
        data = buffer[begin - start : stop - start] if is_inside else memoryview(bytearray(stop - begin))
        self._cache.inner.read_into(self._key, begin, data, etag=self._etag)
        for number in range(block, after):
            lo, hi = self._bounds(number)
            num_wanted = min(hi, end) - max(lo, start)
            self._cache.keep(self._name(number), data[lo - begin : hi - begin], num_wanted)
        if not is_inside:
            lo, hi = max(begin, start), min(stop, end)
            buffer[lo - start : hi - start] = data[lo - begin : hi - begin]
