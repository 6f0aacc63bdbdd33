"""The samples that took longest, by stage: a few of all workers', so that a report can name them.

A stage that works sample by sample says which one of a chunk took longest (`Chunk.slowest`); of any other the chunk as a whole
counts, by what it took a sample. To look costs 0.2 us a chunk and stage, and to note one some microseconds, which soon is rare.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

from loaderkit.engine.work import Chunk

_NUM_KEPT = 16


class Slow(NamedTuple):
    """`num_together` samples from number `sample` on took `seconds` in a stage, until `at_s`; 1: it was that one."""

    each_s: float  # seconds / num_together: first, so that they sort by it
    at_s: float
    seconds: float
    epoch: int
    sample: int
    num_together: int


class SlowItems:
    """Those of all workers of an engine; for any thread."""

    __slots__ = ("_kept", "_lock", "least_s")

    def __init__(self, num_stages: int) -> None:
        self._lock = threading.Lock()  # between what is kept and what is to be kept; soon nothing is any more
        self._kept: list[tuple[Slow, ...]] = [()] * num_stages
        self.least_s = [0.0] * num_stages

    def note(self, stage: int, chunk: Chunk, each_s: float, at_s: float) -> None:
        """A chunk has come out of a stage, `each_s` a sample."""
        found = chunk.slowest
        if found is None:
            if each_s > self.least_s[stage]:
                num = len(chunk)
                self._keep(stage, Slow(each_s, at_s, each_s * num, chunk.epoch, chunk.index_of(0), num))
            return
        chunk.slowest = None
        seconds, place = found
        if seconds > self.least_s[stage]:
            self._keep(stage, Slow(seconds, at_s, seconds, chunk.epoch, chunk.index_of(place), 1))

    def _keep(self, stage: int, slow: Slow) -> None:
        with self._lock:
            kept = slowest([*self._kept[stage], slow])
            self._kept[stage] = kept
            if len(kept) == _NUM_KEPT:
                self.least_s[stage] = kept[-1].each_s

    def kept(self, stage: int) -> tuple[Slow, ...]:
        """The slowest of a stage, the slowest first."""
        return self._kept[stage]


def slowest(items: Iterable[Slow]) -> tuple[Slow, ...]:
    """Those to be kept of all these, the slowest first."""
    return tuple(nlargest(_NUM_KEPT, items))
