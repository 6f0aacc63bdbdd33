"""The gate of a pool lets one worker take chunks, or all."""

from __future__ import annotations

import threading

import pytest

from loaderkit.engine.autotune.contention_probe import SoloGate
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates

STATES = WorkerStates(2)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_solo_means_one(num_threads: int) -> None:
    gate = SoloGate()
    gate.let_one()
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        worker_clock = WorkerClock(STATES, lambda: 0.0, first_state=STATES.starved)
        gate.wait(worker_clock, STATES.idle)
        if most:
            return  # let go by `close`
        for _ in range(200):
            gate.wait(worker_clock, STATES.idle)
            inside.append(1)
            most.append(len(inside))
            inside.pop()
        gate.close()

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 200


def test_a_worker_that_leaves_makes_room_for_another() -> None:
    gate = SoloGate()
    gate.let_one()
    first, second = (WorkerClock(STATES, lambda: 0.0, first_state=STATES.starved) for _ in range(2))
    gate.wait(first, STATES.idle)
    gate.leave(first)
    gate.wait(second, STATES.idle)
    assert second.open_state == STATES.starved, "it did not have to wait"
