"""What more nodes would bring: against a made-up job whose throughput with them is known, until something else is the limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.nodes.counts import Nodes, NodeStats
from loaderkit.engine.metrics.stalls import NETWORK
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import NodeRow, Step, WhatIf
from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.demands import Demand, PipelineModel, PoolModel
from loaderkit.profile.whatif.predict import predict
from loaderkit.profile.whatif.table import what_if

_NUM, _BATCH = 6400, 64


@pytest.fixture(scope="module")
def made(photos: Path) -> tuple[Report, Pipeline]:
    pipeline = Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(8).batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as recording:
        list(loader)
    return recording.result, pipeline


def job(
    report: Report,
    *,
    sample_s: float,
    step_s: float,
    nodes: int,
    each: int,
    carry_s: float = 0.0,
    wakeup_s: float = 0.0,
) -> Report:
    """A report on Ray workers that compute `sample_s` a sample, each on a CPU of its own; a step takes `step_s`, the way
    `carry_s` a sample, taking a batch `wakeup_s`. One node is the trainer's."""
    workers = nodes * each
    num_steps = _NUM // _BATCH
    carried = _NUM * (nodes - 1) // nodes
    rate = min(workers / sample_s, _BATCH / (step_s + wakeup_s), nodes / (nodes - 1) / carry_s if carry_s else 1e9)
    wall_s = _NUM / rate
    first = report.stages[0].model_copy(
        update={
            "workers": workers, "num_items": _NUM, "cpu_s": _NUM * sample_s, "busy_s": _NUM * sample_s, "io_s": 0.0,
            "gil_s": 0.0, "delayed_s": 0.0, "pool": 0, "services": [], "slow": [], "chunk": 8.0,
        }
    )  # fmt: skip
    rows = []
    for number in range(nodes):
        is_trainers = number == 0
        stats = NodeStats(
            f"node-{number}", is_trainers, each, cpus=float(each), num_batches=carried // _BATCH // max(1, nodes - 1),
            num_bytes=10**9, way_s=0.0 if is_trainers else 1.0,
            carrying_s=0.0 if is_trainers else carried * carry_s / (nodes - 1), latency_s=1e-4,
        )  # fmt: skip
        rows.append(stats)
    stall_s = max(0.0, wall_s - num_steps * step_s)
    steps = report.steps.model_copy(
        update={
            "num_steps": num_steps, "compute_s": num_steps * step_s, "stall_s": stall_s, "overhead_s": 0.0,
            "release_s": 0.0,
            "steps": [Step(at_s=float(n), compute_s=step_s, stall_s=stall_s / num_steps) for n in range(40)],
        }
    )  # fmt: skip
    return report.model_copy(
        update={
            "num_samples": _NUM, "num_batches": num_steps, "wall_s": wall_s, "stages": [first], "steps": steps,
            "first_batch": None, "throughput": {"samples_per_s": rate, "bytes_per_s": 0.0},
            "stall": report.stall.model_copy(update={"by_stage": {"wakeup": num_steps * wakeup_s, "read": stall_s}}),
            "nodes": [NodeRow(**row) for row in Nodes(tuple(rows)).to_dicts(wall_s)],
            "tuning": {"executor": "ray", "processes": workers, "batches": 4 * workers, "pools": []},
            "memory": {**report.memory, "batch_bytes": 1}, "world_size": 1,
            "verdict": report.verdict.model_copy(update={"kind": "computing", "stage": first.name}),
        }
    )  # fmt: skip


def more_nodes(report: Report, pipeline: Pipeline) -> dict[int, WhatIf]:
    rows, _ = what_if(report, pipeline.config)
    return {int(row.name.split()[0]): row for row in rows if " more node" in row.name}


@pytest.mark.parametrize("nodes", [2, 3])
def test_twice_the_workers_make_twice_as_much_until_the_loop_is_the_limit(
    made: tuple[Report, Pipeline], nodes: int
) -> None:
    report, pipeline = made
    seen = job(report, sample_s=0.01, step_s=0.064, nodes=nodes, each=2)  # the loop takes 1,000 samples/s
    found = more_nodes(seen, pipeline)
    assert found[nodes - 1 if nodes == 2 else 2].name.endswith("of 2 workers")
    for number, row in found.items():
        expected = min(200.0 * (nodes + number), 1000.0)
        assert row.samples_per_s == pytest.approx(expected, rel=0.05)
        assert f"processes: {2 * (nodes + number)}" in row.note
        assert row.settings == []
    assert max(found) == {2: 4, 3: 2}[nodes], "with that many the loop is the limit, and more are not shown"
    assert found[max(found)].limit == "training"


def test_the_network_bounds_what_more_nodes_bring(made: tuple[Report, Pipeline]) -> None:
    report, pipeline = made
    # Of two nodes one is the trainer's: the way could carry 1,000 samples/s, and with three nodes 2/3 pass it.
    found = more_nodes(job(report, sample_s=0.01, step_s=0.0064, nodes=2, each=2, carry_s=1e-3), pipeline)
    assert found[1].samples_per_s == pytest.approx(600, rel=0.05)
    assert found[max(found)].limit == "network"
    share = (1 + max(found)) / (2 + max(found))
    assert found[max(found)].samples_per_s == pytest.approx(1000 / share, rel=0.05)
    assert all("not known" not in row.note for row in found.values())


def test_taking_batches_bounds_it_too(made: tuple[Report, Pipeline]) -> None:
    report, pipeline = made
    found = more_nodes(job(report, sample_s=0.01, step_s=0.004, nodes=2, each=2, wakeup_s=0.06), pipeline)
    assert found[max(found)].limit == "taking batches"
    assert found[max(found)].samples_per_s == pytest.approx(1000, rel=0.05)
    assert all("what the network carries is not known" in row.note for row in found.values())


def test_a_way_that_no_present_worker_uses_is_not_known(made: tuple[Report, Pipeline]) -> None:
    """It was in use, but all workers are on the trainer's node now."""
    report, pipeline = made
    seen = job(report, sample_s=0.01, step_s=0.0064, nodes=2, each=2, carry_s=1e-3)
    gone = [row if row.is_trainers else row.model_copy(update={"num_workers": 0}) for row in seen.nodes]
    found = more_nodes(seen.model_copy(update={"nodes": gone}), pipeline)
    assert found
    assert all("what the network carries is not known" in row.note for row in found.values())


def test_more_batches_ahead_are_not_said_to_bring_nothing(made: tuple[Report, Pipeline]) -> None:
    """Where the verdict proposes them, as batches are long on a way that is not full, and the model has no such way."""
    report, pipeline = made
    seen = job(report, sample_s=0.01, step_s=0.0064, nodes=2, each=2)
    for kind, is_noted in (("depth", True), ("network", False)):
        verdict = seen.verdict.model_copy(update={"kind": kind, "stage": NETWORK})
        rows, _ = what_if(seen.model_copy(update={"verdict": verdict}), pipeline.config)
        (row,) = (row for row in rows if row.name == "32 batches ahead instead of 16")
        assert ("is not in the model" in row.note) == is_noted


def test_other_executors_have_no_nodes_to_add(made: tuple[Report, Pipeline]) -> None:
    report, pipeline = made
    assert more_nodes(report, pipeline) == {}


@given(st.floats(1e-5, 1e-1), st.floats(1e-5, 1e-1), st.floats(1e-5, 1e-1))
def test_a_bound_is_never_exceeded(network_s: float, handover_s: float, compute_s: float) -> None:
    pools = (PoolModel(64, (Demand("call", "call", 0.0, 1e-5),)),)
    model = PipelineModel(
        pools, compute_s, 0.0, cpus=64, batch=4, batches_ahead=64, network_s=network_s, handover_s=handover_s
    )
    found = predict(model)
    assert found.samples_per_s <= min(1 / network_s, 1 / compute_s) * (1 + 1e-9)
    assert min(bounds(model).values()) == pytest.approx(min(1 / network_s, 1 / (compute_s + handover_s)))
    assert replace(model, network_s=0.0).network_s not in bounds(replace(model, network_s=0.0)).values()
