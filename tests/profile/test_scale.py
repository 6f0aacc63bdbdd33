"""What docs/scale.md computes from measurements: against definitions written out, one batch at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import profiles.scale.__main__ as program
from profiles.scale.page import PAGE, driver_s, feeding, filled, newest
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


def test_what_rays_process_takes_beside_the_trainers_is_said() -> None:
    sizes = (2**16, 2**20, 2**24)
    rows = [
        {"executor": "ray", "batch_bytes": size, "process_s": 1e-3, "raylet_s": size * 1e-9, "loop_s": 0.0}
        for size in sizes
    ]
    first = feeding({"driver": rows, "turns": {"mean_s": 1e-3}}).splitlines()[2].removesuffix(" |").split(" | ")
    assert first[2:] == ["38.5 MB", "64", "2", "38.5"]


def test_measured_elsewhere_the_page_is_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And parts that were measured on another machine are not taken for this one's."""
    found, page = dict(newest()), PAGE.read_text()
    monkeypatch.setattr(program, "PARTS", {name: lambda name=name: found[name] for name in program.PARTS})
    monkeypatch.setattr("sys.argv", ["scale", "--out", str(tmp_path)])
    monkeypatch.setattr(program, "num_cpus", lambda: 96)
    program.main()
    assert "Measured with 96 CPUs" in (tmp_path / "scale.md").read_text()
    assert PAGE.read_text() == page
    monkeypatch.setattr("sys.argv", ["scale", "turns", "--out", str(tmp_path)])
    program.main()
    monkeypatch.setattr(program, "num_cpus", lambda: 4)
    with pytest.raises(SystemExit):
        program.main()
    assert "the other parts were measured with cpus 96" in capsys.readouterr().err
    assert newest(tmp_path)["cpus"] == 96


def test_the_page_is_written_from_the_newest_measurement() -> None:
    page = PAGE.read_text()
    assert page.count("<!-- scale: ") == 7
    assert filled(page) == page, "run: python -m profiles.scale --render"
