"""The model of a pipeline: bounds of operational analysis, against pipelines whose throughput is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.demands import Demand, PipelineModel, PoolModel
from loaderkit.profile.whatif.predict import predict

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
    )


def limit_of(model: PipelineModel) -> tuple[Any, ...]:
    upper = bounds(model)
    limit = min(upper, key=upper.__getitem__)
    return limit, upper[limit]


def test_latency_is_hidden_by_workers() -> None:
    model = PipelineModel((PoolModel(4, (Demand("read", "read", 0.0, 0.02),)),), compute_s=1e-3, loop_cpu_s=0.0, cpus=2)
    assert limit_of(model) == ("read", pytest.approx(200))
    many = replace(model, pools=(replace(model.pools[0], workers=64),))
    assert limit_of(many) == ("training", pytest.approx(1000))


def test_computing_is_bounded_by_the_cpus() -> None:
    model = PipelineModel(
        (PoolModel(8, (Demand("decode", "decode", 0.01, 0.0),)),), compute_s=1e-3, loop_cpu_s=0.0, cpus=2
    )
    assert limit_of(model) == ("cpus", pytest.approx(200))
    beside = replace(model, others_cpus=8.0)  # of sixteen threads on two CPUs eight are ours
    assert limit_of(beside) == ("cpus", pytest.approx(100))


def test_the_lock_is_one_a_process() -> None:
    pools = (PoolModel(8, (Demand("call", "call", 0.01, 0.0),)),)
    model = PipelineModel(pools, compute_s=1e-3, loop_cpu_s=0.0, cpus=8, gil_s=0.01)
    assert limit_of(model) == ("gil", pytest.approx(100))
    assert limit_of(replace(model, processes=4)) == ("gil", pytest.approx(400))


def test_batches_ahead_bound_what_workers_can_do() -> None:
    pools = (PoolModel(8, (Demand("read", "read", 0.0, 0.01),)),)
    model = PipelineModel(pools, compute_s=1e-4, loop_cpu_s=0.0, cpus=8, batch=2, batches_ahead=4, batches_in_memory=1)
    assert limit_of(model) == ("batches ahead", pytest.approx(200))


def test_inline_is_one_after_the_other() -> None:
    pools = (PoolModel(8, (Demand("read", "read", 0.002, 0.006),)),)
    model = PipelineModel(pools, compute_s=0.002, loop_cpu_s=0.0, cpus=8, is_inline=True)
    assert predict(model) == pytest.approx((100.0, "inline", 80.0))


@given(models(), st.integers(0, 2), st.integers(2, 4))
def test_more_of_anything_bounds_no_tighter(model: PipelineModel, number: int, factor: int) -> None:
    _, before = limit_of(model)
    assert limit_of(replace(model, cpus=factor * model.cpus))[1] >= before * (1 - 1e-9)
    halved = replace(model, compute_s=model.compute_s / factor, loop_cpu_s=model.loop_cpu_s / factor)
    assert limit_of(halved)[1] >= before * (1 - 1e-9)
    pool = model.pools[number % len(model.pools)]
    more = replace(model, pools=tuple(replace(p, workers=factor * p.workers) if p is pool else p for p in model.pools))
    assert limit_of(more)[1] >= before * (1 - 1e-9)
