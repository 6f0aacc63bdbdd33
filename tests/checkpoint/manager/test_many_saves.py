"""Saves in a row leave nothing behind: memory, descriptors, threads and the store's keys stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from many_saves import save_many_times
from rank_programs import run_ranks
from seaweed import free_port

pytestmark = pytest.mark.filterwarnings("ignore")
MAX_GROWTH_BYTES = 4 << 20  # of 1 MiB a rank and save, and what allocators do not give back


@pytest.mark.parametrize("num_saves", [15, pytest.param(500, marks=pytest.mark.prove)])
def test_what_is_held_stays(num_saves: int, tmp_path: Path) -> None:
    assert run_ranks(save_many_times, 2, tmp_path, free_port(), num_saves, patience_s=900.0) == [0, 0]
    for rank in range(2):
        said = json.loads((tmp_path / f"held-{rank}.json").read_text())
        assert said["steps"] == [num_saves - 2, num_saves - 1, num_saves]
        first, *others = said["held"]
        for held in others:
            growth = held.pop("resident_bytes") - first["resident_bytes"]
            assert growth < MAX_GROWTH_BYTES, said
            assert held.items() <= first.items(), said
    assert len(list((tmp_path / "run").iterdir())) == 3
