"""Actors that are killed while their number changes: the same batches, and nothing left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import ray
from dying import records
from executors import executor_of
from killed_redeals import DEPTH, KilledRedeals
from ray_clusters import RAY
from ray_nodes import check_nothing_left, live_actors

pytestmark = pytest.mark.usefixtures("ray_nodes")

SIZE = 400
SKIPS: dict[str, Any] = {"errors.on_bad_sample": "skip", "errors.max_bad_samples": 10**6}


def actors() -> set[int]:
    """The processes of the cluster's actors."""
    known: dict[str, Any] = ray._private.state.actors()
    return {actor["Pid"] for actor in known.values() if actor["State"] == "ALIVE"}


@pytest.mark.prove
@pytest.mark.parametrize("num_changes", [1, *[8] * 5])
def test_the_same_batches(num_changes: int, tmp_path: Path, rng: random.Random) -> None:
    """Whoever dies, and whenever: one that is to join, stays or leaves, before the border, at it and behind it."""
    pipeline = records(SIZE, tmp_path, {})
    more = {"prefetch.processes": 2, "prefetch.batches": DEPTH, "prefetch.restarts": 10**6}
    with executor_of(pipeline, **{**RAY, **SKIPS, **more}) as engine:
        loop = KilledRedeals(engine, SIZE, actors, rng, most=3)
        loop.take(1)
        for _ in range(num_changes):
            loop.change()
        while not loop.num_killed:  # no death may have been drawn, or the one to die was gone by then
            loop.change()
        while len(live_actors()) != len(engine.processes):  # those that leave end meanwhile
            loop.take(1)
        loop.check(pipeline, **SKIPS)
    check_nothing_left()
