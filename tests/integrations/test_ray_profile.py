"""`profiles.ray` measures what it says: every contestant makes whole batches, and the table has a line for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiles.peers.data import TINY, make
from profiles.peers.places import Places
from profiles.ray import DATA, Turn, run, table
from profiles.ray_contestants import CONTESTANTS, SLEEP_BATCH

TURNS = [Turn(work, name, 2) for work, names in CONTESTANTS.items() for name in names] + [Turn("sleep", "ray", 2, 2)]


@pytest.mark.integration
@pytest.mark.prove
@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: f"{turn.work}-{turn.contestant}")
def test_every_contestant_makes_batches(turn: Turn, tmp_path: Path) -> None:
    places = Places(tmp_path / "data")
    make(DATA.get(turn.work, ()), places, TINY, tmp_path / "demo")
    found = run(turn, places, 0.1)
    assert found["samples_s"] > 0
    assert found["cpu_ms"] > 0
    assert found["peak_bytes"] > 50e6


def test_the_table_has_a_line_for_each() -> None:
    one: dict[str, Any] = {"samples_s": [2.0, 3.0, 1.0], "cpu_ms": [4.0], "peak_bytes": [2e9]}
    one |= {"ray_over_it": 1.5, "cpu_over_ray": 1.6, "memory_over_ray": 2.0}
    nodes = {str(num): {"samples_s": [50.0 * num], "over_linear": 1.0, "over_waits": 0.98} for num in (1, 2, 4, 8)}
    lines = table({"raw": {"ray-data": one}, "nodes": {**nodes, "limit_batches_s": 700.0}}).splitlines()
    assert lines[2] == "| raw | ray-data | 2 | 1.50 | 4.00 | 1.60 | 2.00 | 2.00 |"
    assert lines[-3] == "| 8 | 400 | 1.000 | 0.980 |"
    assert lines[-1] == f"The loop takes 700 batches/s of {SLEEP_BATCH} at most."
