"""The tuner finds the workers and the depth a workload needs, gives back what it does not need, and says what it did."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from workloads import BATCH, TICK_S, Simulation, Workload

from loaderkit.engine.autotune.tuned_setting import LADDER


def best(simulation: Simulation) -> float:
    """The most that any number of workers delivers, at this depth."""
    work = simulation.workload
    return max(min(work.demand, work.supply(workers, simulation.batches.value)) for workers in LADDER)


class TestFinding:
    @given(st.floats(0.002, 0.2), st.integers(1, 100), st.floats(0, 0.05), st.sampled_from([1, 2, 8, 64]))
    @settings(max_examples=num_examples(60))
    def test_a_store_that_answers_late_gets_as_many_workers_as_pay(
        self, latency_s: float, most_at_once: int, noise: float, first: int
    ) -> None:
        """Whatever its latency, and however many requests at once it takes before more of them only wait."""
        work = Workload(lambda workers, _: min(workers, most_at_once) / latency_s, noise=noise)
        simulation = Simulation(work, workers=first).run(60)
        assert simulation.rate() >= 0.9 * best(simulation)

    def test_it_takes_seconds(self) -> None:
        simulation = Simulation(Workload(lambda workers, _: min(workers, 100) / 0.05, noise=0.02)).run(15)
        assert simulation.rate() >= 0.95 * best(simulation)

    def test_what_computes_gets_a_worker_a_cpu(self) -> None:
        work = Workload(lambda workers, _: 100.0 * min(workers, 4), computing=1.0, noise=0.02)
        simulation = Simulation(work, workers=4, num_cpus=4).run(60)
        assert set(simulation.values) == {4}, "no CPU is left for more, and fewer would compute less"

    def test_what_hinders_itself_gets_fewer(self) -> None:
        """Functions that hold the GIL, say: two workers spend time handing it to and fro."""
        work = Workload(lambda workers, _: 800.0 / (0.8 + 0.2 * workers), computing=0.5, noise=0.01)
        assert Simulation(work, workers=4).run(60).workers.value == 1

    @given(st.floats(0, 0.3), st.integers(1, 4))
    @settings(max_examples=num_examples(20))
    def test_a_stage_that_runs_one_item_at_a_time_gets_no_more(self, noise: float, first: int) -> None:
        """Nor where other programs leave it so little time that it is not seen to run always."""
        simulation = Simulation(Workload(lambda *_: 1000.0, noise=noise), workers=first)
        passed = simulation.pass_time

        def with_gaps() -> None:
            busy_s = simulation.stats.stages[0].busy_s
            passed()
            row = simulation.stats.stages[0]
            row.alone, row.busy_s = True, busy_s + 0.5 * TICK_S

        simulation.pass_time = with_gaps  # type: ignore[method-assign]
        for _ in range(60):
            assert simulation.run(1).workers.value <= first

    @given(st.floats(0.2, 0.9))
    @settings(max_examples=num_examples(20))
    def test_one_that_is_a_part_of_the_work_gets_as_many_as_keep_it_busy(self, share: float) -> None:
        """The other part is done beside it."""
        rate = 1000.0 / share  # of one item at a time
        simulation = Simulation(Workload(lambda workers, _: min(1000.0 * workers, rate), demand=1e4), workers=1)
        passed = simulation.pass_time

        def with_parts() -> None:
            before_s = simulation.stats.stages[0].busy_s
            passed()
            one, other = simulation.stats.stages
            rest_s = (1 - share) * (one.busy_s - before_s)
            one.alone, one.busy_s, other.busy_s = True, one.busy_s - rest_s, other.busy_s + rest_s

        simulation.pass_time = with_parts  # type: ignore[method-assign]
        found = simulation.run(120).workers.value
        assert share * (found + 1) > 1

    def test_bursts_get_a_deeper_buffer(self) -> None:
        """The workers have no room while the loop waits: what is ready is used up during the next long sample."""
        work = Workload(lambda workers, batches: 100.0 * min(batches, 10), demand=1000.0)
        simulation = Simulation(work, auto_batches=True)
        blocked = simulation.pass_time

        def with_blocked_workers() -> None:
            blocked()
            for row in simulation.stats.stages:
                row.blocked_s = 0.5 * row.busy_s

        simulation.pass_time = with_blocked_workers  # type: ignore[method-assign]
        assert simulation.run(60).batches.value >= 9

    def test_bursts_get_a_deeper_buffer_also_where_the_workers_are_a_users(self) -> None:
        simulation = Simulation(Workload(lambda _, batches: 100.0 * min(batches, 10)), auto_batches=True)
        simulation.tuner.forget(("read", "batch"))
        for _ in range(240):
            simulation.look()
            simulation.stats.stages[0].blocked_s = 0.5 * simulation.stats.stages[0].busy_s
        assert simulation.batches.value >= 9

    @given(st.integers(2, 9), st.floats(1, 100), st.integers(1, 6), st.sampled_from([0.0, 1e3]))
    @settings(max_examples=num_examples(40))
    def test_processes_have_as_many_workers_each(
        self, num_processes: int, most_at_once: float, workers: int, blocked_s: float
    ) -> None:
        """And one at the least, whatever would be best."""
        work = Workload(lambda workers, _: 100.0 * min(workers, most_at_once), demand=5000.0, budget_bytes=37_000)
        simulation = Simulation(work, workers=workers * num_processes, unit=num_processes, auto_batches=True)
        simulation.stats.stages[0].blocked_s = blocked_s
        for _ in range(200):
            simulation.run(0.25)
            assert simulation.workers.value % num_processes == 0
            assert simulation.workers.value >= num_processes
            batches = simulation.batches.value
            assert num_processes <= batches <= 37
            assert batches % num_processes == 0 or batches == 4

    def test_memory_bounds_the_depth(self) -> None:
        work = Workload(lambda workers, batches: 100.0 * batches, slab_bytes=100, budget_bytes=700)
        simulation = Simulation(work, auto_batches=True)
        simulation.stats.stages[0].blocked_s = 1e3
        for _ in range(400):
            simulation.look()
            assert simulation.batches.value <= 7

    def test_a_loop_that_is_slower_than_one_worker_keeps_one(self) -> None:
        work = Workload(lambda workers, _: 400.0 * workers, demand=300.0)
        assert Simulation(work, workers=8).run(60).workers.value == 1

    @given(st.floats(30, 3000), st.sampled_from([2, 8, 32]))
    @settings(max_examples=num_examples(40))
    def test_no_more_workers_than_a_loop_needs(self, demand: float, first: int) -> None:
        simulation = Simulation(Workload(lambda workers, _: 50.0 * workers, demand=demand), workers=first).run(120)
        needed = min((value for value in LADDER if 50.0 * value >= demand), default=LADDER[-1])
        assert simulation.rate() >= min(demand, 50.0 * needed) * 0.96
        assert simulation.workers.value <= max(value for value in LADDER if value <= 2 * needed)


class TestChange:
    def test_a_store_that_turns_slow_gets_more_workers(self) -> None:
        latency_s = [0.002]
        simulation = Simulation(Workload(lambda workers, _: workers / latency_s[0], demand=1000.0))
        assert simulation.run(60).workers.value <= 3
        latency_s[0] = 0.03
        assert simulation.run(60).rate() == 1000.0
        latency_s[0] = 0.002
        assert simulation.run(120).workers.value <= 3, "and gives them back"

    def test_a_pause_is_no_reason(self) -> None:
        work = Workload(lambda workers, _: 100.0 * workers, demand=350.0)
        simulation = Simulation(work, workers=4).run(30)
        settled = simulation.workers.value
        simulation.workload = Workload(lambda workers, _: 100.0 * workers, demand=1e-6)
        assert simulation.run(60).workers.value == settled

    def test_what_did_not_help_is_left_alone_ever_longer(self) -> None:
        work = Workload(lambda workers, _: 200.0 if workers > 1 else 100.0, noise=0.01)
        simulation = Simulation(work).run(600)
        away = [number for number, value in enumerate(simulation.values) if value != 2]
        assert len(away) < 0.05 * len(simulation.values)

    def test_a_trial_goes_on_in_a_new_run(self) -> None:
        """After an error the sizes are those of the trial, and have to be judged."""
        simulation = Simulation(Workload(lambda workers, _: 100.0 if workers <= 2 else 50.0))
        while simulation.look() is None:
            pass
        simulation.stats.run = 1
        assert simulation.look() is None
        simulation.run(3)
        assert simulation.tuner.decisions[0].kept is False
        assert simulation.workers.value <= 2

    def test_a_death_is_not_the_trials_fault(self) -> None:
        """The time until another process loads is in no window, so the trial is judged by the rest."""
        simulation = Simulation(Workload(lambda workers, _: min(workers, 64) / 0.05, noise=0.02))
        while simulation.look() is None:
            pass
        simulation.run(0.5)
        work, simulation.workload = simulation.workload, Workload(lambda workers, _: 1e-9)
        simulation.stats = replace(simulation.stats, num_restarts=1)
        for _ in range(12):
            simulation.pass_time()
            waited_s = simulation.stats.now_s
            simulation.stats.waits_s["worker restart"] = waited_s
            assert simulation.tuner.look(simulation.stats) is None
        simulation.workload = work
        for _ in range(12):
            simulation.pass_time()
            simulation.stats.waits_s["worker restart"] = waited_s
            simulation.tuner.look(simulation.stats)
        first = simulation.tuner.decisions[0]
        assert first.kept is True
        assert first.effect.startswith(("+29", "+30", "+31"))


class TestPauses:
    """The loop stays away for a validation, a checkpoint, a compiler: that is no sign of anything."""

    @staticmethod
    def pause(simulation: Simulation, seconds: float) -> None:
        work = simulation.workload
        simulation.workload = replace(work, demand=1e-6)
        simulation.run(seconds)
        simulation.workload = work

    @pytest.mark.parametrize("after_s", [0.25, 0.5, 1.0, 1.25])
    @pytest.mark.parametrize("pause_s", [2, 20])
    def test_in_the_middle_of_a_trial(self, after_s: float, pause_s: float) -> None:
        simulation = Simulation(Workload(lambda workers, _: min(workers, 64) / 0.05, noise=0.02))
        while simulation.look() is None:
            pass
        simulation.run(after_s)
        self.pause(simulation, pause_s)
        simulation.run(3)
        first = simulation.tuner.decisions[0]
        assert first.kept is True
        assert first.effect.startswith(("+29", "+30", "+31"))

    def test_after_every_epoch_of_half_a_second(self) -> None:
        simulation = Simulation(Workload(lambda workers, _: min(workers, 8) / 0.05, noise=0.02))
        for _ in range(60):
            simulation.run(0.5)
            self.pause(simulation, 2)
        assert simulation.rate() == best(simulation)
        assert simulation.workers.value <= 12
        assert not [decision for decision in simulation.tuner.decisions if decision.kept and decision.after > 12]

    def test_a_loop_with_long_steps_is_not_away(self) -> None:
        """A step of 3 s, and batches that take 8 s with two workers: it waits for most of the time."""
        simulation = Simulation(Workload(lambda workers, _: BATCH / 16 * workers, demand=BATCH / 3))
        simulation.run(120)
        assert simulation.rate() == BATCH / 3


class TestSlowSamples:
    def test_samples_of_ten_seconds(self) -> None:
        """A window of a few seconds in which nothing, or two samples, landed says nothing."""
        work = Workload(lambda workers, _: workers / 10)
        simulation = Simulation(work, workers=2)
        simulation.run(600)
        assert simulation.workers.value >= 16
        assert all(decision.kept for decision in list(simulation.tuner.decisions)[:3])


class TestNoise:
    @pytest.mark.parametrize("noise", [0.2, 0.4])
    def test_no_more_is_believed_than_can_be_seen(self, noise: float) -> None:
        simulation = Simulation(Workload(lambda workers, _: 50.0 * min(workers, 8), noise=noise)).run(600)
        assert median(simulation.values[400:]) == 8


class TestSaying:
    def test_every_decision_is_recorded_with_reason_and_effect(self) -> None:
        simulation = Simulation(Workload(lambda workers, _: min(workers, 8) / 0.02)).run(60)
        first, *_ = found = [decision.to_dict() for decision in simulation.tuner.decisions]
        assert first["knob"] == "workers of read+batch"
        assert (first["before"], first["after"], first["kept"]) == (2, 8, True)
        assert first["reason"] == "100% of the time waiting, most of it for read"
        assert first["effect"] == "+300% samples/s, 100% of the time waiting"
        assert any(decision["kept"] is False for decision in found)
        assert simulation.tuner.is_settled

    def test_what_a_user_has_set_is_the_users(self) -> None:
        simulation = Simulation(Workload(lambda workers, _: 50.0 * workers), auto_batches=True)
        while simulation.look() is None:
            pass
        simulation.tuner.forget(("read", "batch"))
        value = simulation.workers.value
        simulation.run(30)
        assert simulation.workers.value == value
        assert [setting.name for setting in simulation.tuner.settings] == ["batches"]
        simulation.tuner.forget(())
        assert simulation.tuner.settings == []


@pytest.mark.parametrize(("value", "steps", "found"), [(2, 2, 4), (2, -5, 1), (5, 1, 6), (5, -1, 4), (64, 9, 128)])
def test_rungs(value: int, steps: int, found: int) -> None:
    simulation = Simulation(Workload(lambda workers, _: 1.0), workers=value)
    assert simulation.workers.rung(steps) == found
