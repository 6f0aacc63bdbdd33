"""The function that makes an engine, with the data set in it: packed once, and given to all actors of a loader."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import ray

from loaderkit._internal.packing import pack
from loaderkit.engine.lifetime import Lifetime
from loaderkit.engine.ray.connection import Connection
from loaderkit.engine.ray.messages import PackedEngine

_MOST_BYTES = 100 * 1024  # Ray would put a larger argument into the object store for each call anew


class SharedEngine:
    """A packed function as an argument of calls; in the object store if it is large, from its first use until `free`. Each node
    with actors has one copy. Methods are for any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # a signal's handler may close the loader while this is packed
        self._argument: Any = None  # a PackedEngine, or the reference to one
        self._lifetime = Lifetime()

    def argument(self, make_engine: Any) -> Any:
        """`make_engine` as it was at the first call. Raises the errors of pickle and Ray, and ClosedError after `free`."""
        with self._lock:
            argument = self._argument
            if argument is None and not self._lifetime.is_closed:
                packed = _packed(make_engine)
                is_small = packed.stream.nbytes + sum(buffer.nbytes for buffer in packed.buffers) <= _MOST_BYTES
                argument = packed if is_small else self._connection.do(ray.put, packed)
            self._lifetime.check_open()
            self._argument = argument
            return argument

    def free(self) -> None:
        """Give the memory back; no actor is started any more."""
        with self._lock:
            self._argument, self._lifetime.is_closed = None, True


def _packed(make_engine: Any) -> PackedEngine:
    stream, buffers = pack(make_engine)
    return PackedEngine(
        np.frombuffer(stream, np.uint8),
        [np.frombuffer(buffer, np.uint8) for buffer in buffers],
        [buffer.readonly for buffer in buffers],
    )
