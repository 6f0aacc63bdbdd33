"""A trace of every worker's states, with the chunk it works on, and of the loop's waits. It is bounded, and off unless
requested.

A change of state costs one more comparison while it is off, and less than a microsecond while it is on. The last entries
of each worker are kept. Times are read from `time.perf_counter`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

WHOLE = -1
"""Used as the slots of an item that is a whole batch."""

_NUM_ENTRIES = 2**17  # of all workers of an engine: about 25 MB
_LEAST_ENTRIES = 2**10  # of one worker
_PAGE_ENTRIES = 2000  # of one packet between two processes

Item = tuple[int, int, int, int]
"""(epoch, global position behind its batch, first slot, slot behind the last one): a chunk, or with WHOLE a batch."""

Entry = tuple[float, int, "Item | None"]
"""(start in s, state of the worker, the item it works on)."""


class Handoff(NamedTuple):
    """A wait of the loop for one batch, in s by cause. `end` is the global position after that batch."""

    since_s: float
    until_s: float
    epoch: int
    end: int
    num_samples: int
    causes: dict[str, float]


class Lane(NamedTuple):
    """The states of one worker, in order. The last entry lasts until `until_s`. `names` are the names of its states."""

    pid: int
    name: str
    names: tuple[str, ...]
    entries: Sequence[Entry]
    until_s: float
    is_cut: bool  # the first entries were dropped


class Trace(NamedTuple):
    """The lanes of all workers, and the waits of the loop."""

    lanes: list[Lane]
    handoffs: list[Handoff]


def num_entries(num_workers: int) -> int:
    """How many entries of each worker are kept."""
    return max(_LEAST_ENTRIES, _NUM_ENTRIES // max(1, num_workers))


def new_entries(max_entries: int, since_s: float, state: int) -> deque[Entry]:
    """The entries of a worker that is in `state` when the trace begins."""
    return deque([(since_s, state, None)], maxlen=max_entries)


def finished_lane(entries: deque[Entry], pid: int, name: str, names: tuple[str, ...], until_s: float) -> Lane:
    """The lane of a worker whose trace has ended; any thread may call it."""
    kept = entries.copy()
    return Lane(pid, name, names, list(kept), until_s, len(kept) == kept.maxlen)


def pages_of(lanes: Iterable[Lane]) -> list[Lane]:
    """The lanes cut into pages, each small enough to send; `joined` is the inverse."""
    return [
        lane._replace(entries=lane.entries[begin : begin + _PAGE_ENTRIES])
        for lane in lanes
        for begin in range(0, max(1, len(lane.entries)), _PAGE_ENTRIES)
    ]


def joined(pages: Iterable[Lane]) -> Iterator[Lane]:
    """The lanes of these pages, in their order."""
    for _, group in groupby(pages, key=lambda page: (page.pid, page.name)):
        lanes = list(group)
        yield lanes[0]._replace(entries=[entry for lane in lanes for entry in lane.entries])
