"""Batches quicker than a thread switch are handed over several at a time, and none is forgotten."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from loaderkit.engine import scheduler as module
from loaderkit.engine.metrics.worker_clock import WorkerStates
from loaderkit.engine.scheduler import ReadyQueue, Scheduler
from loaderkit.engine.work import WorkItem


def scheduler_with(num_batches: int) -> tuple[Scheduler, list[WorkItem]]:
    plan: Any = SimpleNamespace(batch_size=1, room=(4, False), is_prepared=True, release=lambda work_item: None)
    scheduler = Scheduler(plan, WorkerStates(1), time.perf_counter, num_workers=1, is_whole=True)
    batches = [WorkItem(0, n, n + 1, 0) for n in range(num_batches)]
    for batch in batches:
        scheduler.ready.append(batch)
    scheduler.budget.num_open = num_batches
    return scheduler, batches


@pytest.mark.parametrize("way", ["consumer", "sender"])
def test_a_sleeping_consumer_is_woken_although_batches_have_become_quick(way: str) -> None:
    """It fell asleep for long while batches were slow; the last one of all is quick, and none comes after it."""
    scheduler, (only,) = scheduler_with(1)
    scheduler.budget.chunk_sizer.sample_s = 1.0
    waiting = scheduler.ready.wait_until_ready if way == "sender" else lambda: scheduler.ready.wait_for_first(60.0)
    consumer = threading.Thread(target=waiting, daemon=True)
    consumer.start()
    wait_for(lambda: scheduler.ready.is_asleep)
    scheduler.budget.chunk_sizer.sample_s = 1e-6
    scheduler.ready.deliver(only)
    consumer.join(20)
    assert not consumer.is_alive()


def test_the_consumer_looks_by_itself_while_batches_are_quick() -> None:
    scheduler, batches = scheduler_with(4)
    scheduler.budget.chunk_sizer.sample_s = 1e-6
    found: list[WorkItem | None] = []
    consumer = threading.Thread(target=lambda: found.append(scheduler.ready.wait_for_first(60.0)[0]), daemon=True)
    consumer.start()
    scheduler.ready.deliver(batches[0])  # one of four: not announced
    consumer.join(20)
    assert found == [batches[0]]


def test_who_wakes_the_consumer_for_nothing_does_not_put_off_the_end_of_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As workers do that come to rest while another one hangs with the awaited batch."""
    scheduler, _ = scheduler_with(1)
    now = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    monkeypatch.setattr(ReadyQueue, "_sleep", lambda self, wait_s: None)
    found, left_s = scheduler.ready.wait_for_first(60.0)
    assert found is None
    assert left_s <= 0
