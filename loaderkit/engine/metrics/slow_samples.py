"""The samples that took longest, by stage, so that a report can name them.

A stage that works sample by sample says which sample of a chunk took longest (`Chunk.slowest`); for any other stage the chunk
counts as a whole, by its time per sample. The check costs 0.2 us a chunk and stage; keeping a sample costs microseconds, which
is rare after the first seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

from loaderkit.engine.work import Chunk

_NUM_KEPT = 16


class Slow(NamedTuple):
    """`num_together` samples, the first of them number `sample`, took `seconds` in a stage, until `at_s`."""

    each_s: float  # seconds / num_together; the first field, so that tuples sort by it
    at_s: float
    seconds: float
    epoch: int
    sample: int
    num_together: int


class SlowItems:
    """The slowest samples of all workers of an engine; for any thread."""

    __slots__ = ("_kept", "_lock", "least_s")

    def __init__(self, num_stages: int) -> None:
        self._lock = threading.Lock()  # held while a sample is kept
        self._kept: list[tuple[Slow, ...]] = [()] * num_stages
        self.least_s = [0.0] * num_stages

    def note(self, stage: int, chunk: Chunk, each_s: float, at_s: float) -> None:
        """Note a chunk that has left a stage after `each_s` a sample."""
        slowest_sample = chunk.slowest
        if slowest_sample is None:
            if each_s > self.least_s[stage]:
                num = len(chunk)
                self._keep(stage, Slow(each_s, at_s, each_s * num, chunk.epoch, chunk.index_of(0), num))
            return
        chunk.slowest = None
        seconds, row = slowest_sample
        if seconds > self.least_s[stage]:
            self._keep(stage, Slow(seconds, at_s, seconds, chunk.epoch, chunk.index_of(row), 1))

    def _keep(self, stage: int, slow: Slow) -> None:
        with self._lock:
            kept = slowest([*self._kept[stage], slow])
            self._kept[stage] = kept
            if len(kept) == _NUM_KEPT:
                self.least_s[stage] = kept[-1].each_s

    def kept(self, stage: int) -> tuple[Slow, ...]:
        """The slowest samples of a stage, the slowest first."""
        return self._kept[stage]


def slowest(items: Iterable[Slow]) -> tuple[Slow, ...]:
    """The slowest of these, at most the number that is kept, the slowest first."""
    return tuple(nlargest(_NUM_KEPT, items))
