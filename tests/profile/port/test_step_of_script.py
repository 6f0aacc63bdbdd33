"""The step that is imitated: as long, and on as many CPUs, as the script's was."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from loaderkit.profile.port.measure import step_of


def report_of(steps: list[float], saved_s: float = 0.0) -> Any:
    kept = [SimpleNamespace(compute_s=one) for one in steps]
    median = sorted(steps)[len(steps) // 2] if steps else None
    summed = {
        "compute_s": sum(steps) + saved_s,
        "compute_p50_s": median,
        "save_waiting_s": saved_s,
        "save_staging_s": 0.0,
    }
    return SimpleNamespace(steps=SimpleNamespace(steps=kept, **summed))


def test_it_uses_the_scripts_cpu_time_however_long_that_waited_for_a_cpu(rng: random.Random) -> None:
    steps = [rng.uniform(0.01, 0.02) for _ in range(rng.randint(3, 30))]
    delayed, cpu_s = rng.uniform(0, 0.7), rng.uniform(0.01, 0.2) * sum(steps)
    found = step_of(report_of(steps, saved_s=rng.uniform(0, 1)), cpu_s, delayed)
    assert found is not None
    assert found.seconds * len(steps) == pytest.approx(sum(steps) * (1 - delayed))
    assert found.seconds * found.cpus * len(steps) == pytest.approx(cpu_s)


def test_a_first_step_that_compiles_is_no_usual_one(rng: random.Random) -> None:
    steps = [rng.uniform(0.01, 0.012) for _ in range(9)]
    found = step_of(report_of([rng.uniform(1, 9), *steps]), 0.0, 0.0)
    assert found is not None
    assert found.seconds == pytest.approx(sum(steps) / len(steps))


def test_without_a_step_there_is_none() -> None:
    assert step_of(report_of([]), 0.0, 0.0) is None
