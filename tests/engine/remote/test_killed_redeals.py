"""Processes that are killed while their number changes: the same batches, and nothing left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from dying import records
from executors import executor_of
from killed_redeals import DEPTH, KilledRedeals
from leftovers import children, nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS
from waiting import wait_for

SIZE = 400
SKIPS: dict[str, Any] = {"errors.on_bad_sample": "skip", "errors.max_bad_samples": 10**6}


@pytest.mark.parametrize("num_changes", [2, *(pytest.param(10, marks=pytest.mark.prove) for _ in range(10))])
def test_the_same_batches(num_changes: int, tmp_path: Path, rng: random.Random) -> None:
    """Whoever dies, and whenever: one that is to join, stays or leaves, before the border, at it and behind it."""
    pipeline = records(SIZE, tmp_path, {})
    overrides = {**PROCESS, **SKIPS, "prefetch.batches": DEPTH, "prefetch.restarts": 10**6}
    with executor_of(pipeline, **overrides) as engine:
        loop = KilledRedeals(engine, SIZE, children, rng)
        loop.take(1)
        before = resources()
        for _ in range(num_changes):
            loop.change()
        while not loop.num_killed:  # no death may have been drawn, or the one to die was gone by then
            loop.change()
        loop.set_processes(1)
        wait_for(lambda: (loop.take(1), resources() <= before)[1])
        loop.check(pipeline, **SKIPS)
