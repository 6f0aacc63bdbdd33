"""Keeps the samples that took longest, by stage, so that a report can name them.

A stage that works sample by sample says which sample of a chunk took longest (`Chunk.slowest`); for any other stage the chunk
counts as a whole, by its time per sample. The check costs 0.2 us a chunk and stage; keeping a sample costs microseconds, which
is rare after the first seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from heapq import heappush, heappushpop, nlargest
from typing import NamedTuple

from loaderkit.engine.work import Chunk

NUM_KEPT = 256


class Slow(NamedTuple):
    """`num_together` samples, the first of them number `sample`, took `seconds` in a stage, until `at_s`."""

    each_s: float  # seconds / num_together; the first field, so that tuples sort by it
    at_s: float
    seconds: float
    epoch: int
    sample: int
    num_together: int
    position: int = 0  # in its epoch
    chunk: int = 1  # samples of its chunk, and how long all of them took
    chunk_s: float = 0.0


class SlowItems:
    """The slowest samples of all workers of an engine; for any thread."""

    __slots__ = ("_kept", "_lock", "least_s")

    def __init__(self, num_stages: int) -> None:
        self._lock = threading.Lock()  # held while a sample is kept
        self._kept: list[list[Slow]] = [[] for _ in range(num_stages)]  # heaps
        self.least_s = [0.0] * num_stages

    def note(self, stage: int, chunk: Chunk, each_s: float, at_s: float) -> None:
        """Note a chunk that has left a stage after `each_s` a sample."""
        num, begin, found = chunk.hi - chunk.lo, chunk.work_item.begin + chunk.lo, chunk.slowest
        chunk.slowest = None
        seconds, row = found or (each_s * num, 0)
        num_together = 1 if found else num
        if seconds / num_together <= self.least_s[stage]:
            return
        sample, place = chunk.index_of(row), (begin + row, num, each_s * num)
        slow = Slow(seconds / num_together, at_s, seconds, chunk.epoch, sample, num_together, *place)
        with self._lock:
            kept = self._kept[stage]
            if len(kept) < NUM_KEPT:
                heappush(kept, slow)
            else:
                heappushpop(kept, slow)
                self.least_s[stage] = kept[0].each_s

    def kept(self, stage: int) -> tuple[Slow, ...]:
        """The slowest samples of a stage, in no order."""
        with self._lock:
            return tuple(self._kept[stage])


def slowest(items: Iterable[Slow]) -> tuple[Slow, ...]:
    """The slowest of these, at most the number that is kept, the slowest first."""
    return tuple(nlargest(NUM_KEPT, items))
