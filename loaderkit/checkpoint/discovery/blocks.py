"""Reads whole objects in parts, on several threads, and hashes their blocks: for writing a manifest, verifying and
copying."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import xxhash

from loaderkit._internal import hashing
from loaderkit.checkpoint.transfer.fetch import num_workers_of
from loaderkit.connectors.base import Connector, ObjectInfo, bulk_of

PART_BYTES = 8 * 2**20
_MAX_THREADS = 16
_ALIGNMENT = 4096
Use = Callable[[ObjectInfo, int, memoryview], None]


class HashedPart(NamedTuple):
    """`num_bytes` of an object that were read, and the hashes of the blocks that begin in them, from `first_block` on."""

    info: ObjectInfo
    num_bytes: int
    first_block: int
    hashes: list[str]


def hash_objects(
    connector: Connector,
    objects: Sequence[tuple[ObjectInfo, int]],
    *,
    part_bytes: Callable[[ObjectInfo], int] = lambda info: PART_BYTES,
    use: Use | None = None,
    direct: bool = False,
) -> Generator[HashedPart]:
    """Read objects once, each given with its block size in bytes; yields their parts in order.

    `use` is called with each object, offset and bytes on the thread that read them, in any order; the bytes are valid during
    the call. `direct`: past the page cache, where the connector can. Memory: a part and two blocks a thread. Raises what
    reading or `use` raises, once no thread runs any more.
    """
    if not objects:
        return
    num_threads = min(num_workers_of(connector, "auto"), _MAX_THREADS)
    size = max(part_bytes(info) + 2 * block for info, block in objects)
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(num_threads):
        buffers.put(_aligned(size))

    def work(info: ObjectInfo, block: int, start: int) -> HashedPart:
        end = min(start + part_bytes(info), info.size)
        # Blocks need not divide parts: read those that reach over the part's ends whole.
        low, high = start // block * block, min(-(-end // block) * block, info.size)
        buffer = buffers.get()
        try:
            data = buffer[: high - low]
            hashes = _read_hashed(connector, info, low, data, block, direct=direct)
            if use is not None:
                use(info, start, data[start - low : end - low])
        finally:
            buffers.put(buffer)
        first = -(-start // block)  # the first that begins in the part
        last = -(-end // block)
        return HashedPart(info, end - start, first, hashes[first - low // block : last - low // block])

    waiting: deque[Future[HashedPart]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-blocks") as pool:
        try:
            for info, block in objects:
                for start in range(0, info.size, part_bytes(info)):
                    waiting.append(pool.submit(work, info, block, start))
                    if len(waiting) >= 2 * num_threads:
                        yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def hashes_of(connector: Connector, objects: Sequence[tuple[ObjectInfo, int]]) -> dict[str, list[str]]:
    """The hashes of all blocks of objects by key, each given with its block size in bytes. Raises what reading raises."""
    hashes: dict[str, list[str]] = {info.key: [] for info, _ in objects}
    for part in hash_objects(connector, objects):
        hashes[part.info.key] += part.hashes
    return hashes


def _aligned(size: int) -> memoryview:
    """Memory that begins at a multiple of 4,096, as writes past the page cache ask for."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].data


def _read_hashed(
    connector: Connector, info: ObjectInfo, start: int, data: memoryview, block: int, *, direct: bool
) -> list[str]:
    bulk, address = bulk_of(connector), hashing.address_of_hash()
    if bulk.read_hashed is not None and address is not None:
        hashed = bulk.read_hashed(
            info.key, start, data, block_bytes=block, address=address, direct=direct, etag=info.etag
        )
        if hashed is not None:
            return [f"{value:016x}" for value in hashed.hashes]
    read = bulk.read_direct if direct and bulk.read_direct is not None else connector.read_into
    read(info.key, start, data, etag=info.etag)
    return [xxhash.xxh3_64_hexdigest(data[low : low + block]) for low in range(0, len(data), block)]
