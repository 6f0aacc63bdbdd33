"""What docs/scale.md computes from measurements: against definitions written out, one batch at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.scale.page import PAGE, driver_s, filled
from profiles.scale.turns import Times, share


def by_definition(services: Times, depth: int) -> list[float]:
    """When each batch is taken, from all of its conditions: its worker is free, there is room, and those before it came."""
    rounds, workers = services.shape
    done: list[float] = []
    taken: list[float] = []
    for k, service_s in enumerate(services.reshape(-1).tolist()):
        free_s = done[k - workers] if k >= workers else 0.0
        room_s = taken[k - workers * depth] if k >= workers * depth else 0.0
        done.append(max(free_s, room_s) + service_s)
        taken.append(max([done[k], *taken[-1:]]))
    assert len(taken) == rounds * workers
    return taken


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_share_of_capacity_is_that_of_the_definition(workers: int, depth: int, seed: int) -> None:
    services = np.random.default_rng(seed).exponential(1.0, (60, workers))
    taken = by_definition(services, depth)
    first = 40 * workers - 1  # the last one of those that warm up
    capacity = sum(1.0 / services[:, worker].mean() for worker in range(workers))
    expected = 20 * workers / (taken[-1] - taken[first]) / capacity
    assert share(services, depth) == pytest.approx(expected)


def test_the_slowest_worker_sets_the_pace() -> None:
    services = np.tile([1.0, 1.0, 1.0, 2.0], (400, 1))
    for depth in (1, 8):
        assert share(services, depth) == pytest.approx(4 / 2 / 3.5)


@given(st.integers(0, 2**30))
def test_the_drivers_time_grows_with_bytes_between_and_beyond_what_was_measured(num_bytes: int) -> None:
    rows = [
        {"executor": "process", "batch_bytes": size, "process_s": 1e-4 + size * 1e-11} for size in (2**16, 2**20, 2**24)
    ]
    found = driver_s({"driver": [*rows, {**rows[0], "executor": "thread"}]}, "process", num_bytes)
    assert found == pytest.approx(1e-4 + max(num_bytes, 2**16) * 1e-11)


def test_the_page_is_written_from_the_newest_measurement() -> None:
    page = PAGE.read_text()
    assert page.count("<!-- scale: ") == 12
    assert filled(page) == page, "run: python -m profiles.scale --render"
