"""Keeps the samples that took longest, by stage, so that a report can name them.

A stage that works sample by sample says which sample of a chunk took longest (`Chunk.slowest`); for any other stage the chunk
counts as a whole, by its time per sample. The check costs 0.2 us a chunk and stage; keeping a sample costs microseconds, which
is rare after the first seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from loaderkit.engine.work import Chunk

NUM_KEPT = 256


class Slow(NamedTuple):
    """`num_together` samples, the first of them number `sample`, took `seconds` in a stage, until `at_s`."""

    each_s: float  # seconds / num_together
    at_s: float
    seconds: float
    epoch: int
    sample: int
    num_together: int
    position: int = 0  # in its epoch
    chunk: int = 1  # samples of its chunk, and how long all of them took
    chunk_s: float = 0.0


SlowTable = NDArray[np.void]
"""Slow samples as an array [n] with the fields of `Slow`: worker processes send theirs four times a second, for 1 % of the
time that tuples take."""
_DTYPE = np.dtype([*get_type_hints(Slow).items()])  # int64 and float64


def table_of(items: Iterable[Slow]) -> SlowTable:
    """A table of these."""
    return np.array(list(items), _DTYPE)


def rows_of(table: SlowTable) -> list[Slow]:
    """The samples of a table."""
    return [Slow(*row) for row in table.tolist()]


NOTHING_SLOW = table_of([])


class SlowItems:
    """The slowest samples of all workers of an engine; for any thread."""

    __slots__ = ("_kept", "_lock", "_num", "least_s")

    def __init__(self, num_stages: int) -> None:
        self._lock = threading.Lock()  # held while a sample is kept
        self._kept = [np.empty(NUM_KEPT, _DTYPE) for _ in range(num_stages)]
        self._num = [0] * num_stages
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
            kept, num = self._kept[stage], self._num[stage]
            if num < NUM_KEPT:
                kept[num] = slow
                self._num[stage] = num + 1
            elif slow.each_s > self.least_s[stage]:  # another thread may have raised it
                kept[kept["each_s"].argmin()] = slow
            if self._num[stage] == NUM_KEPT:
                self.least_s[stage] = float(kept["each_s"].min())

    def kept(self, stage: int) -> SlowTable:
        """The slowest samples of a stage, in no order."""
        with self._lock:
            return self._kept[stage][: self._num[stage]].copy()


def slowest(tables: Sequence[SlowTable]) -> SlowTable:
    """The slowest of all of these, at most the number that is kept, the slowest first."""
    items = np.concatenate(tables)
    return items.take(np.argsort(-items["each_s"], kind="stable")[:NUM_KEPT])
