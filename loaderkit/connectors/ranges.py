"""Reads of many ranges: by the connector's `gather_into` if it has one, else with adjacent ranges coalesced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector, bulk_of

_MOST_GAP_BYTES = 1 << 20
_FREE_GAP_BYTES = 64 << 10
_OVER_READ = 4  # unneeded bytes are at most 1 / this of the needed ones


def gather_into(
    connector: Connector,
    key: str,
    starts: NDArray[np.int64],
    length: int,
    buffer: memoryview,
    *,
    etag: str | None = None,
) -> None:
    """Fill `buffer` with the ranges [start, start + length) of an object, concatenated, or raise.

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
    """(start, its part of `buffer`) of each run of ranges that are adjacent in the object."""
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + length) + 1
    firsts = [0, *breaks.tolist(), len(starts)] if len(starts) else []
    for first, end in pairwise(firsts):
        yield int(starts[first]), buffer[first * length : end * length]


class RangeSlice(NamedTuple):
    """Contiguous bytes of one object, to be fetched by one request; reads of `wanted_bytes` in them will follow.

    The first of those reads is for the sample `first` (its index in the rank's order), the last for `last`.
    """

    key: str
    start: int
    length: int
    etag: str | None
    first: int
    last: int
    wanted_bytes: int


class RangeRequest(NamedTuple):
    """One range to be read, for the sample `first` (its index in the rank's order)."""

    key: str
    start: int
    length: int
    etag: str | None
    first: int


def coalesce(requests: Iterable[RangeRequest], *, most_bytes: int) -> list[RangeSlice]:
    """Merge ranges that lie close together, as long as that reads few unneeded bytes.

    Two neighbours are at most 1 MiB apart, and all gaps of a slice sum to at most a quarter of its needed bytes (or 64 KiB:
    headers between members of an archive). A slice of several ranges has at most `most_bytes`.
    """
    slices: list[RangeSlice] = []
    for request in sorted(requests, key=lambda request: (request.key, request.start)):
        if not request.length:
            continue
        end = request.start + request.length
        if slices and slices[-1].key == request.key and slices[-1].etag == request.etag:
            before = slices[-1]
            length = max(before.start + before.length, end) - before.start
            gap = request.start - before.start - before.length
            num_wanted = before.wanted_bytes + request.length
            bound = max(num_wanted // _OVER_READ, _FREE_GAP_BYTES)
            if gap <= _MOST_GAP_BYTES and length - num_wanted <= bound and length <= most_bytes:
                slices[-1] = before._replace(
                    length=length,
                    first=min(before.first, request.first),
                    last=max(before.last, request.first),
                    wanted_bytes=num_wanted,
                )
                continue
        slices.append(
            RangeSlice(
                request.key, request.start, request.length, request.etag, request.first, request.first, request.length
            )
        )
    return slices
