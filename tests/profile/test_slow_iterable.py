"""A slow iterable, which one thread at a time iterates over: nothing that more workers would do is said, tried or predicted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from workloads import Simulation, Workload

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.engine.serial_turn import Turn
from loaderkit.profile.report_parts import VerdictPart
from loaderkit.profile.settings_patch import verdict_part

NUM, EACH_S = 2000, 0.005
WALL_S = NUM * EACH_S


def verdict(
    *,
    share: float = 1.0,
    cpu_share: float = 0.0,
    call_s: float = 0.0,
    stall_s: dict[str, float] | None = None,
    workers: int = 8,
    processes: int = 1,
    executor: str = "thread",
    trial: ContentionResult = ContentionResult(),  # noqa: B008 - a tuple
    services: tuple[tuple[float, int], ...] = (),
) -> VerdictPart:
    """Of ten seconds in which workers were in `read`, one at a time, for a `share` of the time, and in `call` for `call_s`."""
    busy_s = processes * share * WALL_S
    read = StageStats("read", workers, kind="read", in_turn=True, num_items=int(share * NUM), busy_s=busy_s)
    read = replace(read, cpu_s=cpu_share * busy_s, starved_s=processes * workers * WALL_S - busy_s - call_s)
    for seconds, count in services:
        read.services.add(seconds, count)
    call = StageStats("call", workers, kind="call", num_items=NUM, busy_s=call_s, services=Histogram())
    prefetch: dict[str, Any] = {"executor": executor}
    if executor != "inline":
        prefetch |= {"concurrency": workers, "batches": 4, "processes": processes}
    config = Pipeline.iterable(range(NUM)).read().call(str).batch(8).prefetch(**prefetch).config
    stats = replace(
        Stats.empty([read, call], 2**31),
        wall_s=WALL_S,
        num_batches=NUM // 8,
        waits_s=stall_s or {"read": 0.9 * WALL_S},
        trials={"read": trial},
        tuning=Tuning(executor, 4, cpus=4, pools=(PoolTuning(("read", "call"), workers),), processes=processes),
    )
    return verdict_part(stats, config)


ALONE = ContentionResult(1.0, 0.98, slowdowns={"read": 8.0})
GIL = ContentionResult(1.0, 0.9, gil_taken=0.99)
STRAGGLERS = ((0.0005, 1960), (0.2, 40))


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, "waiting"),
        ({"trial": ALONE}, "waiting"),
        ({"workers": 1}, "waiting"),
        ({"processes": 2, "executor": "process"}, "waiting"),
        ({"services": STRAGGLERS, "trial": ALONE}, "waiting"),
        ({"executor": "inline", "workers": 1}, "waiting"),
        ({"cpu_share": 0.98}, "computing"),
        ({"cpu_share": 0.98, "trial": GIL}, "computing"),
    ],
)
def test_where_one_iterates_all_the_time_nothing_can_be_set(facts: dict[str, Any], kind: str) -> None:
    found = verdict(**facts)
    assert (found.stage, found.kind, found.settings) == ("read", kind, [])
    assert "one item takes 5 ms" in found.evidence
    assert "a faster iterable" in found.change
    assert "resize" not in found.change
    assert found.confidence > 0.85


def test_the_stage_behind_is_given_no_workers_either() -> None:
    found = verdict(share=0.97, workers=2, call_s=WALL_S, stall_s={"call": 0.9 * WALL_S})
    assert (found.stage, found.settings) == ("call", [])
    assert "more workers would not help" in found.change


def test_a_fast_iterable_leaves_the_stage_behind_its_verdict() -> None:
    found = verdict(share=0.01, workers=2, call_s=1.9 * WALL_S, stall_s={"call": 0.9 * WALL_S})
    assert (found.stage, found.kind) == ("call", "waiting")
    assert found.settings[0].key == "prefetch.concurrency"
    assert found.settings[0].value > 2


def test_an_iterable_is_moved_beside_training_where_there_is_any() -> None:
    found = verdict(share=0.6, executor="inline", workers=1)
    assert [one.key for one in found.settings] == ["prefetch.executor"]


def test_the_tuner_gives_its_workers_back() -> None:
    """The loop waits all the time, and every trial of more of them would be in vain."""
    simulation = Simulation(Workload(lambda workers, batches: 1 / EACH_S), workers=8, auto_batches=True)
    in_turn, passes = replace(simulation.stats.stages[0], in_turn=True), simulation.pass_time

    def one_at_a_time() -> None:
        passes()
        busy_s = simulation.stats.wall_s
        simulation.stats.stages[0] = replace(in_turn, num_items=int(busy_s / EACH_S), busy_s=busy_s)

    simulation.pass_time = one_at_a_time  # type: ignore[method-assign]
    simulation.run(60)
    assert max(simulation.values) == 8
    assert simulation.workers.value <= 2


def test_the_turn_goes_round_in_the_order_of_the_chunks() -> None:
    """Not in the order in which workers ask for it; of some it is never the turn."""
    turn = Turn()
    waiting = {number: turn.take(number) for number in (4, 2, 1)}
    assert turn.take(0) is None
    turn.pass_on(3)
    for number, following in ((0, 1), (1, 2), (2, 4)):
        mine = waiting[following]
        assert mine is not None
        assert not mine.acquire(blocking=False)
        turn.pass_on(number)
        assert mine.acquire(blocking=False)
    turn.pass_on(4)
    assert turn.take(5) is None
    left = turn.take(7)
    turn.close()
    assert left is not None
    assert left.acquire(blocking=False)
    assert turn.take(9) is None


def hashing() -> Iterator[dict[str, int]]:
    """Computes without the GIL, so nothing but the turn keeps the workers from doing so side by side."""
    block = bytes(2**20)
    while True:
        yield {"x": hashlib.sha256(block).digest()[0]}


def test_what_waits_for_its_turn_is_not_busy() -> None:
    with loaderkit.build(Pipeline.iterable(hashing).read().batch(4).prefetch(concurrency=4, batches=8)) as loader:
        for _ in zip(range(60), loader, strict=False):
            pass
        stats = loader.stats()
    assert stats.turn_share("read") < 1.05, "four workers at once would be four times as busy"
    read = stats.stages[0]
    assert read.starved_s + read.idle_s > read.busy_s
    found = stats.verdict()
    assert "resize" not in found.change
