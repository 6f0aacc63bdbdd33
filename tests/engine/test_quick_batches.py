"""Batches quicker than a thread switch are handed over several at a time, and none is forgotten."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loaderkit.prefetch import intake as module
from loaderkit.prefetch.accounts import States
from loaderkit.prefetch.intake import Intake
from loaderkit.types import Destination


def intake_with(num_batches: int) -> tuple[Intake, list[Destination]]:
    plan: Any = SimpleNamespace(batch_size=1, room=(4, False), specs={}, release=lambda destination: None)
    intake = Intake(plan, States(1), time.perf_counter, num_workers=1, is_whole=True)
    nothing = np.zeros(1, np.int64)
    batches = [Destination(epoch=0, step=n, positions=nothing, indices=nothing) for n in range(num_batches)]
    intake._queue.extend(batches)
    intake.num_open = num_batches
    return intake, batches


@pytest.mark.parametrize("way", ["consumer", "courier"])
def test_who_sleeps_is_woken_although_batches_have_become_quick(way: str) -> None:
    """It fell asleep for long while batches were slow; the last one of all is quick, and nobody comes after it."""
    intake, (only,) = intake_with(1)
    intake._pace.sample_s = 1.0
    waiting = intake.wait_until_ready if way == "courier" else lambda: intake.wait_for_first(60.0)
    consumer = threading.Thread(target=waiting, daemon=True)
    consumer.start()
    while not intake._is_asleep:
        pass
    intake._pace.sample_s = 1e-6
    intake.deliver(only)
    consumer.join(20)
    assert not consumer.is_alive()


def test_the_consumer_looks_by_itself_while_batches_are_quick() -> None:
    intake, batches = intake_with(4)
    intake._pace.sample_s = 1e-6
    found: list[Destination | None] = []
    consumer = threading.Thread(target=lambda: found.append(intake.wait_for_first(60.0)[0]), daemon=True)
    consumer.start()
    intake.deliver(batches[0])  # one of four: not announced
    consumer.join(20)
    assert found == [batches[0]]


def test_who_wakes_the_consumer_for_nothing_does_not_put_off_the_end_of_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As workers do that come to rest while another one hangs with the awaited batch."""
    intake, _ = intake_with(1)
    now = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    monkeypatch.setattr(Intake, "_sleep", lambda self, wait_s: None)
    found, left_s = intake.wait_for_first(60.0)
    assert found is None
    assert left_s <= 0
