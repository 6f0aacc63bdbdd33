"""A recording of what every worker did with which chunk, and what the loop waited for: bounded, and off unless asked for.

Off, it costs a comparison where an account changes its state; on, less than a microsecond there. What is kept are the
last entries of each worker. Times are those of `time.perf_counter`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

WHOLE = -1
"""Stands for the slots of an item that is a whole batch."""

_NUM_ENTRIES = 2**17  # of all workers of an engine: some 25 MB
_LEAST_ENTRIES = 2**10  # of one worker
_PAGE = 2000  # entries that fit into a packet between two processes

Item = tuple[int, int, int, int]
"""(epoch, global position behind its batch, first slot, slot behind the last one): a chunk, or with WHOLE a batch."""

Entry = tuple[float, int, "Item | None"]
"""(since when in s, account state, what it was about)."""


class Handoff(NamedTuple):
    """A wait of the loop that ended in a batch: the one behind which the global position is `end`; by cause, in s."""

    since_s: float
    until_s: float
    epoch: int
    end: int
    num_samples: int
    causes: dict[str, float]


class Lane(NamedTuple):
    """What one worker did. The last entry goes on until `until_s`. `names` are those of the account's states."""

    pid: int
    name: str
    names: tuple[str, ...]
    entries: Sequence[Entry]
    until_s: float
    is_cut: bool  # what came first is not here any more


class TraceRecorder(NamedTuple):
    """Of all workers, and of the loop."""

    tracks: list[Lane]
    handovers: list[Handoff]


def tape_length(num_workers: int) -> int:
    """How many entries of each worker are kept."""
    return max(_LEAST_ENTRIES, _NUM_ENTRIES // max(1, num_workers))


def new_tape(length: int, since_s: float, state: int) -> deque[Entry]:
    """A recording that begins with what is being done already."""
    return deque([(since_s, state, None)], maxlen=length)


def cut(entries: deque[Entry], pid: int, name: str, names: tuple[str, ...], until_s: float) -> Lane:
    """A recording that has ended; for any thread."""
    found = entries.copy()
    return Lane(pid, name, names, list(found), until_s, len(found) == found.maxlen)


def pages(tracks: Iterable[Lane]) -> list[Lane]:
    """The same in pieces, each small enough to be sent; `joined` puts them together again."""
    return [
        track._replace(entries=track.entries[begin : begin + _PAGE])
        for track in tracks
        for begin in range(0, max(1, len(track.entries)), _PAGE)
    ]


def joined(found: Iterable[Lane]) -> Iterator[Lane]:
    """Tracks from their pages, in their order."""
    for _, parts in groupby(found, key=lambda track: (track.pid, track.name)):
        some = list(parts)
        yield some[0]._replace(entries=[entry for part in some for entry in part.entries])
