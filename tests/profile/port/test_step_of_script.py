"""The step that is imitated: as long, and on as many CPUs, as the script's was."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from loaderkit.profile.port import measure
from loaderkit.profile.port.measure import ScriptStep, step_of


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


class CoarseMachine:
    """Sleeps `late_s` longer than it should; a product of matrices takes `product_s`. Takes the place of `time` and `torch`."""

    def __init__(self, late_s: float, product_s: float) -> None:
        self.now_s, self.cpu_s, self.late_s, self.product_s = 0.0, 0.0, late_s, product_s
        self.slowdown = 1.0  # seconds that pass in one of CPU time

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s

    def ones(self, *shape: int) -> None: ...

    def mm(self, one: None, other: None) -> None:
        self.now_s += self.product_s * self.slowdown
        self.cpu_s += self.product_s


@pytest.mark.parametrize("cpus", [0.0, 0.5, 1.0])
def test_short_steps_are_as_long_in_the_mean(cpus: float, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    num_steps, seconds = 2000, rng.uniform(20e-6, 300e-6)
    machine = CoarseMachine(late_s=rng.uniform(0, 90e-6), product_s=rng.uniform(10e-6, 60e-6))
    monkeypatch.setattr(measure, "time", machine)
    monkeypatch.setattr(measure, "torch", machine)
    step = measure._Imitation(ScriptStep(seconds, cpus))
    for _ in range(num_steps):
        step(None)
    step.close()
    assert machine.cpu_s / num_steps == pytest.approx(cpus * seconds, rel=0.02)
    assert machine.now_s / num_steps == pytest.approx(seconds, rel=0.02)


def test_what_a_busy_machine_took_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    seconds = rng.uniform(100e-6, 5e-3)
    machine = CoarseMachine(late_s=0.0, product_s=20e-6)
    monkeypatch.setattr(measure, "time", machine)
    monkeypatch.setattr(measure, "torch", machine)
    step = measure._Imitation(ScriptStep(seconds, 1.0))
    machine.slowdown = 3.0
    for _ in range(1000):
        step(None)
    machine.slowdown, begin_s = 1.0, machine.now_s
    for _ in range(200):
        step(None)
    step.close()
    assert (machine.now_s - begin_s) / 200 > 0.9 * seconds
