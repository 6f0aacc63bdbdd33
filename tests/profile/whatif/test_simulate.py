"""The simulated pipeline against closed forms, against a recursion worked out by hand, and by laws."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.demands import Demand, PipelineModel, PoolModel
from loaderkit.profile.whatif.predict import predict
from loaderkit.profile.whatif.simulate import Simulation
from loaderkit.profile.whatif.times import Times

EXPONENTIAL = tuple(-math.log(1 - (n + 0.5) / 200) for n in range(200))


def model_of(
    workers: int,
    *stages: Demand,
    compute_s: float = 1e-4,
    cpus: float = 64.0,
    batch: float = 1.0,
    chunk: float = 1.0,
    batches_ahead: float = 4.0,
) -> PipelineModel:
    pools = (PoolModel(workers, stages),)
    return PipelineModel(pools, compute_s, 0.0, cpus=cpus, batch=batch, chunk=chunk, batches_ahead=batches_ahead)


def waiting(seconds: float, times: Times | None = None) -> Demand:
    return Demand("read", "read", 0.0, seconds, times or Times())


def recursion(services: Sequence[float], compute_s: float, *, workers: int, depth: int) -> list[float]:
    """When each batch of one sample is taken: it is begun once a worker is free and there is room, and taken in order."""
    free, taken = [0.0] * workers, list[float]()
    for number, seconds in enumerate(services):
        room_s = taken[number - depth] if number >= depth else 0.0
        done_s = max(heapq.heappop(free), room_s) + seconds
        heapq.heappush(free, done_s)
        taken.append(max(done_s, taken[-1] + compute_s if taken else 0.0))
    return taken


class TestClosedForms:
    @pytest.mark.parametrize(("processes", "expected"), [(1, 100.0), (4, 400.0)])
    def test_the_gil_is_one_a_process(self, processes: int, expected: float) -> None:
        computing = Demand("call", "call", 0.01, 0.0)
        model = replace(model_of(8, computing, cpus=8, batch=8, batches_ahead=8), gil_s=0.01, processes=processes)
        assert Simulation(model).run() == pytest.approx(expected, rel=0.01)

    @pytest.mark.parametrize(("others", "expected"), [(0.0, 200.0), (8.0, 100.0)])
    def test_cpus_are_shared_evenly(self, others: float, expected: float) -> None:
        model = replace(model_of(8, Demand("decode", "decode", 0.01, 0.0), cpus=2, batch=8), others_cpus=others)
        assert Simulation(model).run() == pytest.approx(expected, rel=0.01)

    def test_what_one_worker_uses_at_a_time(self) -> None:
        model = replace(model_of(8, waiting(0.005), batch=8), serial_stage="read", serial_s=0.005)
        assert Simulation(model).run() == pytest.approx(200, rel=0.01)

    @pytest.mark.parametrize("depth", [1, 3, 7])
    def test_both_sides_vary_as_in_a_queue_of_limited_length(self, depth: int) -> None:
        """M/M/1/K with equal rates: K / (K + 1) of them; K counts the batches ahead and the one in the loop."""
        times = Times(EXPONENTIAL, (1 / 200,) * 200)
        steps = np.random.default_rng(5).permutation(np.tile(EXPONENTIAL, 40))
        model = replace(model_of(1, waiting(0.01, times), compute_s=0.01, batches_ahead=depth), steps=tuple(steps))
        expected = 100 * (depth + 1) / (depth + 2)
        assert np.mean([Simulation(model, seed).run() for seed in range(4)]) == pytest.approx(expected, rel=0.04)

    def test_the_stages_of_a_batch_run_once_a_batch_in_a_pool_of_their_own(self) -> None:
        copying = Demand("transfer", "transfer", 0.0, 0.01, of_batch=True)
        model = model_of(4, waiting(0.001), batch=8, chunk=2)
        model = replace(model, pools=(*model.pools, PoolModel(1, (copying,))))
        assert Simulation(model).run() == pytest.approx(100, rel=0.01)

    @pytest.mark.parametrize(("workers", "depth", "expected"), [(4, 1, 4 * 1000), (8, 1, 8 * 1000), (4, 4, 4 * 1000)])
    def test_workers_share_a_batch_where_few_are_open(self, workers: int, depth: int, expected: float) -> None:
        """Of samples so short that one worker would make a whole batch otherwise: with one batch ahead all the others rest."""
        model = model_of(workers, waiting(0.001), compute_s=1e-7, batch=8, chunk=9, batches_ahead=depth)
        assert Simulation(model).run() == pytest.approx(expected, rel=0.01)

    def test_a_stock_that_is_not_replaced_counts_for_nothing(self) -> None:
        """The first sample takes longest by far, so at its end all that are ahead are there."""
        times = Times(slow_wait=0.5, gaps=(1.0,), every=400.0)
        model = model_of(4, waiting(0.002, times), compute_s=1e-6)
        for ahead in (400.0, 2000.0):
            found = Simulation(replace(model, batches_ahead=ahead)).run()
            assert found <= 1.05 * 4 / 0.002

    def test_while_a_pause_lasts_nothing_comes(self) -> None:
        """Half of the time, so one batch ahead waits half of the time; enough of them wait no more."""
        times = Times(slow_wait=0.0, sizes=(1.0,), gaps=(1.0,), every=100.0, pause=50.0, pause_every_s=0.2)
        model = model_of(4, waiting(0.002, times), compute_s=0.002)  # pauses of 0.1 s
        assert Simulation(replace(model, batches_ahead=1.0)).run() == pytest.approx(500 / 2, rel=0.1)
        assert Simulation(replace(model, batches_ahead=200.0)).run() == pytest.approx(500, rel=0.05)


class TestStraggler:
    @pytest.mark.parametrize(
        ("depth", "period_s"),
        [
            # 2 workers, of 10 samples nine take 1 s and one 6 s; the loop takes no time. While that one is awaited, the other
            # worker makes those that there is room for: depth - 1 of them. The other ten - depth take half a second each.
            (2, 6 + 8 / 2),
            (4, 6 + 6 / 2),
            (6, 6 + 4 / 2),
        ],
    )
    def test_by_hand(self, depth: int, period_s: float) -> None:
        times = Times(slow_wait=5 / 15, gaps=(1.0,), every=10.0)
        found = Simulation(model_of(2, waiting(1.5, times), compute_s=1e-6, batches_ahead=depth)).run()
        assert found == pytest.approx(10 / period_s, rel=0.06)

    @settings(max_examples=num_examples(15))
    @given(st.integers(1, 5), st.integers(1, 9), st.integers(2, 60), st.floats(0.0, 0.9), st.floats(1e-6, 4.0))
    def test_by_recursion(self, workers: int, depth: int, every: int, share: float, compute_s: float) -> None:
        times = Times(slow_wait=share, gaps=(1.0,), every=float(every))
        simulation = Simulation(model_of(workers, waiting(1.0, times), compute_s=compute_s, batches_ahead=depth))
        simulation.run()
        number, counted = simulation.num_batches, simulation.num_counted
        slow_s = share * counted / len(range(every, counted, every))
        services = [1.0 - share + slow_s * (n > 0 and n % every == 0) for n in range(number)]
        expected = recursion(services, compute_s, workers=workers, depth=depth)
        assert len(simulation.taken_s) >= number - depth
        assert simulation.taken_s == pytest.approx(expected[: len(simulation.taken_s)])

    def test_depth_pays_and_is_named_as_the_limit(self) -> None:
        times = Times(slow_wait=2 / 3, gaps=(1.0,), every=50.0)
        model = model_of(2, waiting(0.003, times), batch=8, chunk=4, batches_ahead=1)
        rates = [predict(replace(model, batches_ahead=depth)) for depth in (1.0, 4.0, 16.0)]
        assert rates[0].limit == "batches ahead"
        assert rates[0].samples_per_s < rates[1].samples_per_s < rates[2].samples_per_s
        assert rates[2].samples_per_s == pytest.approx(2 / 0.003, rel=0.03)  # 40 slow samples, give or take one
        assert rates[2].limit == "read"


@st.composite
def models(draw: st.DrawFn) -> PipelineModel:
    demands, counts = st.floats(1e-4, 1e-2), st.integers(1, 6)
    tails = st.sampled_from(
        [
            Times(),
            Times(slow_wait=0.5, every=40.0, gaps=EXPONENTIAL),
            Times(slow_cpu=0.3, slow_wait=0.3, every=90.0, run=4, chunk=2),
            Times((0.5, 1.5), (0.5, 0.5), slow_wait=0.4, every=100.0, pause=20.0, pause_every_s=0.3),
        ]
    )
    batch = draw(st.sampled_from([1, 4, 16]))
    pools = tuple(
        PoolModel(draw(counts), (Demand(f"{number}", "call", draw(demands), draw(demands), draw(tails)),))
        for number in range(draw(st.integers(1, 3)))
    )
    return PipelineModel(
        pools=pools,
        compute_s=draw(demands),
        loop_cpu_s=0.0,
        cpus=draw(st.floats(1, 16)),
        gil_s=draw(st.sampled_from([0.0, 1e-3])),
        batch=float(batch),
        chunk=draw(st.sampled_from([0.0, 1.0, 4.0])),
        batches_ahead=float(draw(st.integers(1, 12))),
    )


class TestLaws:
    @settings(max_examples=num_examples(16), deadline=None)
    @given(models())
    def test_no_bound_is_passed(self, model: PipelineModel) -> None:
        rate = Simulation(model).run()
        assert all(rate <= 1.15 * bound for bound in bounds(model).values()), bounds(model)

    @settings(max_examples=num_examples(16), deadline=None)
    @given(models(), st.integers(2, 4))
    def test_more_depth_is_never_slower(self, model: PipelineModel, factor: int) -> None:
        """Where nothing is shared. On shared CPUs work that is far ahead can take the time of what is awaited."""
        model = replace(model, pools=model.pools[:1], cpus=64.0, gil_s=0.0, batch=1.0, chunk=1.0)
        deeper = replace(model, batches_ahead=model.batches_ahead * factor)
        assert Simulation(deeper).run() >= (1 - 1e-9) * Simulation(model).run()

    @settings(max_examples=num_examples(16), deadline=None)
    @given(models())
    def test_the_same_seed_gives_the_same_run(self, model: PipelineModel) -> None:
        assert Simulation(model, 3).run() == Simulation(model, 3).run()

    @settings(max_examples=num_examples(16), deadline=None)
    @given(models(), st.floats(1, 1e3))
    def test_nothing_changed_is_what_was_measured(self, model: PipelineModel, measured: float) -> None:
        found = predict(model, measured / Simulation(model).run())
        assert found.samples_per_s == pytest.approx(min(measured, 1 / model.compute_s))
        assert found.stall_percent == pytest.approx(100 * (1 - found.samples_per_s * model.compute_s), abs=1e-6)
