"""Neighbouring ranges are one read; whatever is asked for is covered, once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.connectors.base import BulkReads
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.ranges import gather_into, runs


@given(length=st.integers(1, 7), places=st.lists(st.integers(0, 40), max_size=30))
def test_runs_cover_everything_in_order(length: int, places: list[int]) -> None:
    buffer = memoryview(bytearray(len(places) * length))
    found = list(runs(np.array(places, np.int64), length, buffer))
    covered = [(start + at, part.obj) for start, part in found for at in range(0, len(part), length)]
    assert [start for start, _ in covered] == places
    assert sum(len(part) for _, part in found) == len(buffer)
    for (start, part), (following, _) in pairwise(found):
        assert following != start + len(part)


class Counting(MemoryConnector):
    num_reads = 0

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.num_reads += 1
        super().read_into(key, start, buffer, etag=etag)


def test_neighbours_are_read_together() -> None:
    connector = Counting({"x": bytes(range(100))})
    buffer = bytearray(5 * 4)
    gather_into(connector, "x", np.array([40, 44, 48, 0, 4], np.int64), 4, memoryview(buffer))
    assert bytes(buffer) == bytes([*range(40, 52), *range(8)])
    assert connector.num_reads == 2


def test_a_connector_that_can_gather_is_asked_once() -> None:
    class Gatherer(Counting):
        def gather_into(
            self, key: str, starts: object, length: int, buffer: memoryview, *, etag: str | None = None
        ) -> None:
            buffer[:] = b"7" * len(buffer)

        def bulk(self) -> BulkReads:
            return BulkReads(gather_into=self.gather_into)

    connector = Gatherer({"x": bytes(100)})
    buffer = bytearray(8)
    gather_into(connector, "x", np.array([0, 50], np.int64), 4, memoryview(buffer), etag="any")
    assert (bytes(buffer), connector.num_reads) == (b"77777777", 0)
