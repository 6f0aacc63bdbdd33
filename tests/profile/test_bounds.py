"""The model of a pipeline: bounds of operational analysis, against pipelines whose throughput is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.profile.whatif.bounds import bounds, predict
from loaderkit.profile.whatif.demands import Demand, PipelineModel, PoolModel, Stragglers

demands = st.floats(1e-5, 1e-1)
counts = st.integers(1, 32)


@st.composite
def models(draw: st.DrawFn) -> PipelineModel:
    pools = tuple(
        PoolModel(draw(counts), tuple(Demand(f"{number}-{n}", "call", draw(demands), draw(demands)) for n in range(2)))
        for number in range(draw(st.integers(1, 3)))
    )
    return PipelineModel(
        pools=pools,
        compute_s=draw(demands),
        loop_cpu_s=draw(demands),
        cpus=draw(st.floats(1, 64)),
        others_cpus=draw(st.floats(0, 4)),
        gil_s=draw(st.sampled_from([0.0, 1e-3])),
        batches_ahead=draw(st.floats(1, 1000)),
        stragglers=draw(st.sampled_from([None, Stragglers(0, 0.3, 50.0)])),
    )


def test_latency_is_hidden_by_workers() -> None:
    model = PipelineModel((PoolModel(4, (Demand("read", "read", 0.0, 0.02),)),), compute_s=1e-3, loop_cpu_s=0.0, cpus=2)
    assert predict(model).samples_per_s == pytest.approx(200)
    assert predict(model).limit == "read"
    assert predict(model).stall_percent == pytest.approx(80)
    many = replace(model, pools=(replace(model.pools[0], workers=64),))
    assert predict(many) == pytest.approx((1000.0, "training", 0.0))


def test_computing_is_bounded_by_the_cpus() -> None:
    model = PipelineModel(
        (PoolModel(8, (Demand("decode", "decode", 0.01, 0.0),)),), compute_s=1e-3, loop_cpu_s=0.0, cpus=2
    )
    assert predict(model).samples_per_s == pytest.approx(200)
    assert predict(model).limit == "cpus"
    beside = replace(model, others_cpus=8.0)  # of sixteen threads on two CPUs eight are ours
    assert predict(beside).samples_per_s == pytest.approx(100)


def test_the_lock_is_one_a_process() -> None:
    pools = (PoolModel(8, (Demand("call", "call", 0.01, 0.0),)),)
    model = PipelineModel(pools, compute_s=1e-3, loop_cpu_s=0.0, cpus=8, gil_s=0.01)
    assert predict(model).samples_per_s == pytest.approx(100)
    assert predict(model).limit == "gil"
    assert predict(replace(model, processes=4)).samples_per_s == pytest.approx(400)


def test_batches_ahead_bound_what_workers_can_do() -> None:
    pools = (PoolModel(8, (Demand("read", "read", 0.0, 0.01),)),)
    model = PipelineModel(pools, compute_s=1e-4, loop_cpu_s=0.0, cpus=8, batch=2, batches_ahead=4, batches_in_memory=1)
    assert predict(model).samples_per_s == pytest.approx(200)
    assert predict(model).limit == "batches ahead"


def test_a_straggler_holds_up_what_is_not_ahead_of_it() -> None:
    pools = (PoolModel(2, (Demand("read", "read", 0.0, 0.003),)),)  # 1 ms, and one in 50 takes 100 ms
    model = PipelineModel(pools, 1e-4, 0.0, cpus=8, batch=8, batches_ahead=4, stragglers=Stragglers(0, 0.1, 50.0))
    assert predict(model).samples_per_s == pytest.approx(50 / (0.1 + 18 * 0.001 / 2))
    assert predict(replace(model, batches_ahead=8)).samples_per_s == pytest.approx(500)


def test_inline_is_one_after_the_other() -> None:
    pools = (PoolModel(8, (Demand("read", "read", 0.002, 0.006),)),)
    model = PipelineModel(pools, compute_s=0.002, loop_cpu_s=0.0, cpus=8, is_inline=True)
    assert predict(model).samples_per_s == pytest.approx(100)
    assert predict(model).stall_percent == pytest.approx(80)


@given(models())
def test_no_bound_is_passed_and_the_stall_fits(model: PipelineModel) -> None:
    found = predict(model)
    assert all(found.samples_per_s <= bound * (1 + 1e-9) for bound in bounds(model).values())
    assert found.stall_percent == pytest.approx(100 * (1 - found.samples_per_s * model.compute_s), abs=1e-6)


@given(models(), st.integers(0, 2), st.integers(2, 4))
def test_more_of_anything_is_never_slower(model: PipelineModel, number: int, factor: int) -> None:
    before = predict(model).samples_per_s
    faster = replace(model, cpus=factor * model.cpus)
    assert predict(faster).samples_per_s >= before * (1 - 1e-9)
    halved = replace(model, compute_s=model.compute_s / factor, loop_cpu_s=model.loop_cpu_s / factor)
    assert predict(halved).samples_per_s >= before * (1 - 1e-9)
    pool = model.pools[number % len(model.pools)]
    more = replace(model, pools=tuple(replace(p, workers=factor * p.workers) if p is pool else p for p in model.pools))
    assert predict(more).samples_per_s >= before * (1 - 1e-9)


@given(models(), st.floats(1, 1e5))
def test_nothing_changed_is_what_was_measured(model: PipelineModel, measured: float) -> None:
    found = predict(model, model, measured).samples_per_s
    assert found == pytest.approx(min(measured, 1 / model.compute_s))
