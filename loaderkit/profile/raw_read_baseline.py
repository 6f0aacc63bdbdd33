"""Reads the bytes of a checkpoint raw, by as many threads, into memory that is reused: this is the speed of the store
itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from loaderkit.connectors.base import Connector, ObjectInfo, bulk_of


class RawRead(NamedTuple):
    """Bytes read, and in how many seconds."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


def read_raw(
    connector: Connector,
    objects: Mapping[str, ObjectInfo],
    sizes: Mapping[str, int],
    num_threads: int,
    *,
    part_bytes: int,
    most_s: float,
    direct: bool = False,
) -> RawRead:
    """Read the first `sizes[key]` bytes of every object, in parts of `part_bytes`, for about `most_s` at most.

    `direct`: past the page cache, if the connector can. Ctrl-C waits for reads that are under way. Raises ConnectorError."""
    read_into = (bulk_of(connector).read_direct if direct else None) or connector.read_into
    parts = [
        (key, start, min(part_bytes, size - start))
        for key, size in sizes.items()
        for start in range(0, size, part_bytes)
    ]
    parts.reverse()  # taken from its end
    counts: list[int] = []
    errors: list[BaseException] = []
    begin_s = 0.0
    all_started = threading.Barrier(num_threads + 1)  # with their memory

    def read() -> None:
        buffer = memoryview(bytearray(part_bytes))
        try:
            all_started.wait()
            while not errors and time.perf_counter() - begin_s < most_s:
                try:
                    key, start, length = parts.pop()
                except IndexError:
                    return
                info = objects.get(key)
                read_into(key, start, buffer[:length], etag=info.etag if info is not None else None)
                counts.append(length)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, name=f"loaderkit-bare-{n}", daemon=True) for n in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        begin_s = time.perf_counter()
        all_started.wait()
        begin_s = time.perf_counter()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, or the system has no more threads
        errors.append(error)  # ends the threads before the connector is closed
        all_started.abort()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    if errors:
        raise errors[0]
    return RawRead(sum(counts), time.perf_counter() - begin_s)
