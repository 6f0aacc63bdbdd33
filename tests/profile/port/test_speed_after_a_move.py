"""The speed that is expected of a pipeline is that of the executor with which it goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from loaderkit.profile.port import measure
from loaderkit.profile.port.datasets import PortedSource
from loaderkit.profile.port.loader import PortedPipeline

BATCH_SIZE = 16


class FakeLoader:
    """Makes a batch in `slow_s` until `moves_s`, by a clock of its own, and then in `fast_s`."""

    def __init__(self, slow_s: float, fast_s: float, moves_s: float) -> None:
        self.now_s, self.slow_s, self.fast_s, self.moves_s = 0.0, slow_s, fast_s, moves_s

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        while True:
            self.now_s += self.slow_s if self.now_s < self.moves_s else self.fast_s
            yield {"x": [0] * BATCH_SIZE}

    def stats(self) -> Any:
        executor = "thread" if self.now_s < self.moves_s else "process"
        return SimpleNamespace(tuning=SimpleNamespace(executor=executor))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeLoader, Any], float]:
    def run(loader: FakeLoader, dataset: Any) -> float:
        clock = SimpleNamespace(perf_counter=lambda: loader.now_s, sleep=loader.sleep)
        monkeypatch.setattr(measure, "time", clock)
        ported: Any = PortedPipeline({"source": {}}, PortedSource({}, dataset=dataset))
        rate, _ = measure.run_with_step(ported, None, lambda *_, **__: nullcontext(loader))
        return rate.samples_per_s

    return run


def test_users_code_has_time_to_move(measured: Callable[[FakeLoader, Any], float], rng: random.Random) -> None:
    fast_s = rng.uniform(0.01, 0.1)
    loader = FakeLoader(rng.uniform(0.2, 2.0), fast_s, moves_s=rng.uniform(0, 20))
    assert measured(loader, object()) == pytest.approx(BATCH_SIZE / fast_s, rel=0.02)


@pytest.mark.parametrize("dataset", [None, object()])
def test_what_does_not_move_is_measured_where_it_is(
    measured: Callable[[FakeLoader, Any], float], dataset: Any, rng: random.Random
) -> None:
    slow_s = rng.uniform(0.05, 2.0)
    loader = FakeLoader(slow_s, slow_s / 10, moves_s=1e9)
    assert measured(loader, dataset) == pytest.approx(BATCH_SIZE / slow_s, rel=0.02)
    assert loader.now_s < 30
