"""Counters that are told lower than before, or go on from run to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.nodes.counts import Nodes, NodeStats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.metrics.families import PREFIX, store_name
from loaderkit.metrics.totals import Totals

EMPTY = Stats.empty([StageStats("read", 2)], 1000)


def told(run: int, now_s: float, executor: str = "thread", **changes: Any) -> Stats:
    return replace(EMPTY, run=run, now_s=now_s, tuning=Tuning(executor=executor), **changes)


def value(totals: Totals, name: str, *labels: str) -> float:
    (found,) = (point.value for point in totals.points() if point[:2] == (name, labels))
    return found


def begun() -> Totals:
    totals = Totals()
    totals.begin(EMPTY, "skip")
    return totals


def test_a_worker_that_moved_takes_its_cpu_time_along() -> None:
    totals = begun()
    for now_s, cpu_s, expected in ((1, 5.0, 5.0), (2, 3.0, 5.0), (3, 6.0, 6.0)):
        nodes = Nodes((NodeStats("a", is_trainers=True, num_workers=1, cpu_s=cpu_s, num_batches=int(now_s)),))
        totals.add(told(0, now_s, nodes=nodes), "skip")
        assert value(totals, "node_cpu_seconds", "a") == expected
        assert value(totals, "node_batches", "a") == now_s


def test_what_an_open_wait_is_charged_to_may_change_and_the_sum_is_kept() -> None:
    totals = begun()
    totals.add(told(0, 15.0, wall_s=15.0, waits_s={"start": 15.0}), "skip")
    totals.add(told(0, 16.0, wall_s=16.0, waits_s={"read": 16.0}), "skip")
    assert value(totals, "stall_seconds", "start") == 15
    assert value(totals, "stall_seconds", "read") == 1


def test_runs_add_up_and_late_snapshots_do_not() -> None:
    totals = begun()
    totals.add(told(0, 1.0, num_batches=5, waits_s={"read": 1.0}), "skip")
    last = told(0, 2.0, num_batches=7, waits_s={"read": 2.0})
    totals.add(last, "skip")
    totals.add(told(0, 1.5, num_batches=6, waits_s={"read": 1.5}), "skip")  # of a scrape that was slow
    assert (value(totals, "batches"), value(totals, "stall_seconds", "read")) == (7, 2)
    totals.add(told(1, 0.5, num_batches=2, waits_s={"read": 0.25}), "skip")
    totals.add(last, "skip")
    assert (value(totals, "batches"), value(totals, "stall_seconds", "read")) == (9, 2.25)
    totals.begin(EMPTY, "skip")  # another loader of the name
    totals.add(told(0, 0.1, num_batches=1, waits_s={"read": 0.5}), "skip")
    assert (value(totals, "batches"), value(totals, "stall_seconds", "read")) == (10, 2.75)


def test_connectors_here_outlive_a_run_and_those_in_processes_do_not() -> None:
    for executor, expected in (("thread", 30), ("process", 50)):
        totals = begun()
        totals.add(told(0, 1.0, executor, store={"num_requests": 20}, copies={"num_bytes": 20}), "skip")
        totals.add(told(1, 1.0, executor, store={"num_requests": 30}, copies={"num_bytes": 30}), "skip")
        assert value(totals, "store_requests") == expected
        assert value(totals, "transfer_bytes") == 30


def test_names_of_counters_of_connectors() -> None:
    assert store_name("num_requests") == "store_requests"
    assert store_name("body_s") == "store_body_seconds"
    assert store_name("fetched_bytes") == "store_fetched_bytes"
    assert store_name("num_my-own.total_total") == "store_my_own_total"
    assert PREFIX + store_name("num_ü") == "loaderkit_store__"
