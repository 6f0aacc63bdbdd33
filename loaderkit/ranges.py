"""Many ranges of one object in one go: through the connector's own `gather_into` if it has one, else neighbours together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.types import Connector


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
    gather = bulk_method(connector, "gather_into")
    if gather is not None:
        gather(key, starts, length, buffer, etag=etag)
        return
    for start, part in runs(starts, length, buffer):
        connector.read_into(key, start, part, etag=etag)


def bulk_method(connector: Connector, name: str) -> Any:
    """`read_many` or `gather_into` of a connector, or None. A subclass that reads in a way of its own (decrypts, counts) and
    says nothing of these two must not be passed by, so an inherited one counts only if `read_into` is inherited with it."""
    for kind in type(connector).__mro__:
        if name in vars(kind):
            return getattr(connector, name)
        if "read_into" in vars(kind):
            return None
    return None


def runs(starts: NDArray[np.int64], length: int, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Ranges that follow one another in the object as one: (start, the part of `buffer` that they fill) of each run."""
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + length) + 1
    firsts = [0, *breaks.tolist(), len(starts)] if len(starts) else []
    for first, end in pairwise(firsts):
        yield int(starts[first]), buffer[first * length : end * length]
