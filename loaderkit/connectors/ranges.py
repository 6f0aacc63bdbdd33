"""Many ranges of one object in one go: through the connector's own `gather_into` if it has one, else neighbours together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector, bulk_of

_MOST_GAP_BYTES = 1 << 20
_FREE_GAP_BYTES = 64 << 10
_OVER_READ = 4


def gather_into(
    connector: Connector,
    key: str,
    starts: NDArray[np.int64],
    length: int,
    buffer: memoryview,
    *,
    etag: str | None = None,
) -> None:
    """Fill `buffer` with the ranges [start, start + length) of an object, one behind another, or raise.

    `starts` is int64 [n], in any order; `buffer` is writable and has n * length bytes. Raises what `read_into` raises;
    what `buffer` then holds is undefined.
    """
    gather = bulk_of(connector).gather_into
    if gather is not None:
        gather(key, starts, length, buffer, etag=etag)
        return
    for start, part in runs(starts, length, buffer):
        connector.read_into(key, start, part, etag=etag)


def runs(starts: NDArray[np.int64], length: int, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Ranges that follow one another in the object as one: (start, the part of `buffer` that they fill) of each run."""
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + length) + 1
    firsts = [0, *breaks.tolist(), len(starts)] if len(starts) else []
    for first, end in pairwise(firsts):
        yield int(starts[first]), buffer[first * length : end * length]


class RangeSlice(NamedTuple):
    """Neighbouring bytes of one object to be fetched by one request, since reads of `wanted_bytes` in it are to come.

    The first of them is for the sample `first` (counted along the rank's order), none for one behind `last`.
    """

    key: str
    start: int
    length: int
    etag: str | None
    first: int
    last: int
    wanted_bytes: int


class RangeRequest(NamedTuple):
    """One range that is going to be read, and for which sample of the rank's order."""

    key: str
    start: int
    length: int
    etag: str | None
    first: int


def coalesce(wanted: Iterable[RangeRequest], *, most_bytes: int) -> list[RangeSlice]:
    """Ranges that lie close together as one piece, as long as that reads not much more than is wanted.

    Between two ranges lie at most 1 MiB, and all that lies between the ranges of a piece is at most a quarter of what is wanted
    of it (or 64 KiB: headers between members of an archive). No piece of several ranges is longer than `most_bytes`.
    """
    pieces: list[RangeSlice] = []
    for one in sorted(wanted, key=lambda one: (one.key, one.start)):
        if not one.length:
            continue
        end = one.start + one.length
        if pieces and pieces[-1].key == one.key and pieces[-1].etag == one.etag:
            before = pieces[-1]
            length = max(before.start + before.length, end) - before.start
            gap = one.start - before.start - before.length
            num_wanted = before.wanted_bytes + one.length
            bound = max(num_wanted // _OVER_READ, _FREE_GAP_BYTES)
            if gap <= _MOST_GAP_BYTES and length - num_wanted <= bound and length <= most_bytes:
                pieces[-1] = before._replace(
                    length=length,
                    first=min(before.first, one.first),
                    last=max(before.last, one.first),
                    wanted_bytes=num_wanted,
                )
                continue
        pieces.append(RangeSlice(one.key, one.start, one.length, one.etag, one.first, one.first, one.length))
    return pieces
