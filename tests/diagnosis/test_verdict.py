"""The verdict: on accounts made by hand, every branch; on pipelines with one bottleneck built in, that bottleneck."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_accounts import row, services, settings_of, stats
from numbers_dataset import Numbers

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.verdict import Verdict
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.slow_samples import Slow
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.profile.settings_patch import settings_for
from profiles.accounts import FOLDER, from_json, read, to_json
from profiles.bottlenecks import CASES, contradictions, is_right
from profiles.verdicts import record, run

KINDS = ("read", "decode", "call", "batch", "transfer", "normalize")
SERIAL = ContentionResult(0.97, 0.98, slowdowns=dict.fromkeys(KINDS, 1.9))
ALIKE = dict.fromkeys(KINDS, 1.0)


class TestWithoutAStage:
    def test_nothing_has_happened(self) -> None:
        with loaderkit.build(Pipeline.dataset(Numbers()).read().batch(8)) as loader:
            found = loader.stats().verdict()
        assert (found.stage, found.confidence, found.kind) == (None, 0.0, "unknown")

    def test_training_is_the_limit(self) -> None:
        found = stats({"read": 0.2}, [row("read", 3, 1, blocked_s=17)]).verdict()
        assert (found.stage, found.kind, found.percent) == (None, "training", 98.0)
        assert "fewer workers" in found.change

    def test_training_is_never_the_limit_where_the_loop_waited(self) -> None:
        """Also where the workers have time to spare."""
        found = stats({"read": 0.51}, [row("read", 3, 1, blocked_s=17)]).verdict()
        assert (found.stage, found.kind, found.percent) == ("read", "depth", 5.1)

    def test_the_start(self) -> None:
        found = stats({"start": 2.0, "read": 0.1}, [row("read", 3, 1, blocked_s=17)]).verdict()
        assert (found.stage, found.kind, found.percent) == ("start", "start", 20.0)
        assert found.evidence.endswith("20.0 % for start; after the start 1.0 % for read: too little to matter")

    def test_what_comes_after_the_start(self) -> None:
        seen = stats({"start": 2.0, "read": 0.5, "wakeup": 0.3}, [row("read", 3, 1, blocked_s=17)])
        assert seen.verdict().evidence.endswith("; after the start 8.0 %, most of it for read (5.0 %)")
        assert not contradictions(seen.to_dict())

    def test_a_start_long_past_says_nothing(self) -> None:
        found = stats({"start": 2.0, "read": 6.0}, [row("read", 19, 1, starved_s=1)]).verdict()
        assert found.stage == "read"
        assert found.percent == 60.0

    def test_to_be_woken_up(self) -> None:
        found = stats({"wakeup": 4.0, "read": 1.0}, [row("read", 16, 15, blocked_s=4)]).verdict()
        assert (found.stage, found.kind, found.percent) == ("wakeup", "wakeup", 40.0)

    @pytest.mark.parametrize(("blocked_s", "stage", "kind"), [(1, "call", "gil"), (4, "wakeup", "wakeup")])
    def test_complete_batches_of_workers_that_are_always_busy_wait_for_those(
        self, blocked_s: float, stage: str, kind: str
    ) -> None:
        """Under the GIL, what sends a batch waits for it, too; without that the loop would wait for the next batch instead."""
        trial = ContentionResult(1.5, 0.9, 0.9, 2.0)
        rows = [row("read", 1, 0.5), row("call", 19 - blocked_s, 7, blocked_s=blocked_s)]
        seen = stats({"wakeup": 6.0, "call": 1.0}, rows, executor="process", processes=1, trial=trial)
        assert (seen.verdict().stage, seen.verdict().kind) == (stage, kind)
        assert sum(seen.stall_s.values()) == pytest.approx(7.0)
        assert not contradictions(seen.to_dict())

    def test_processes_that_die(self) -> None:
        seen = replace(stats({"worker restart": 4.0, "read": 1.0}, [row("read", 19, 18)]), num_restarts=2)
        found = seen.verdict()
        assert (found.stage, found.kind, found.percent) == ("worker restart", "restart", 40.0)
        assert "2 worker processes died and were started again" in found.evidence

    @pytest.mark.parametrize(("quota_cpus", "throttled_s"), [(0.5, None), (0.5, 6.0), (None, 6.0)])
    def test_a_loop_that_a_quota_holds_back(self, quota_cpus: float | None, throttled_s: float | None) -> None:
        seen = stats({"wakeup": 4.0, "read": 1.0}, [row("read", 16, 4, delayed_s=11, blocked_s=4)])
        seen = replace(seen, host=replace(seen.host, quota_cpus=quota_cpus, throttled_s=throttled_s))
        found = seen.verdict()
        assert (found.stage, found.kind, found.percent) == ("wakeup", "quota", 40.0)
        assert found.change.startswith("a larger CPU quota")
        assert ("leaves this program 0.5 CPUs" in found.evidence) == (quota_cpus is not None)
        assert ("held its threads back for 6 s" in found.evidence) == (throttled_s is not None)
        assert not settings_for(found, seen, Pipeline.dataset(Numbers()).read().batch(8).config)
        assert not contradictions(seen.to_dict())

    def test_what_build_refuses_is_not_suggested(self) -> None:
        """A function with a lock cannot be sent to a process, and threads share what a seeded one draws from."""
        lock = threading.Lock()
        nameless = Pipeline.dataset(Numbers()).read().call(lambda sample: lock and sample).batch(8).config
        seen = stats({"wakeup": 4.0}, [row("read", 5, 4, blocked_s=15)])
        assert settings_for(seen.verdict(), seen, Pipeline.dataset(Numbers()).read().batch(8).config)
        assert not settings_for(seen.verdict(), seen, nameless)
        seeded = Pipeline.dataset(Numbers()).read().call(abs, seeded=True).batch(8).prefetch(executor="inline").config
        seen = stats({"read": 8.0}, [row("read", 9, 8, workers=1)], executor="inline")
        seen = replace(seen, tuning=replace(seen.tuning, executor_with_workers="process"))
        found = seen.verdict()
        assert settings_of(found) == {"prefetch.executor": "process"}
        assert [one.value for one in settings_for(found, seen, seeded)] == ["process"]

    @pytest.mark.parametrize(
        ("stall_s", "stage", "percent"), [({"memory": 6.0, "read": 2.0}, "memory", 60.0), ({"read": 8.0}, "read", 80.0)]
    )
    def test_little_memory(self, stall_s: dict[str, float], stage: str, percent: float) -> None:
        """Before a batch is opened, or in the stages of the only one that there is room for."""
        rows = [row("read", 5, 0.1, blocked_s=15)]
        found = stats(stall_s, rows, memory=(100, 60)).verdict()
        assert (found.stage, found.kind, found.percent) == (stage, "memory", percent)
        assert "1 of the 4 batches" in found.evidence
        assert settings_of(found) == {"prefetch.memory": "1MiB"}
        busy = stats({"read": 8.0}, [row("read", 19, 0.1, blocked_s=1)], memory=(100, 60)).verdict()
        assert busy.kind == "waiting"


class TestOfAStage:
    def verdict(self, one: StageStats, **more: Any) -> Verdict:
        others = [row(name, 0.1, 0.1) for name in KINDS if name != one.name]
        rows = sorted([*others, one], key=lambda row: KINDS.index(row.name))
        seen = stats({one.name: 8.0, "start": 0.1}, rows, **more)
        found = seen.verdict()
        assert not contradictions(seen.to_dict())
        assert found.stage == one.name
        assert 75.0 < found.percent <= 80.0, "what it waited for CPUs is shared with the others that use them"
        assert 0 < found.confidence <= 0.95
        return found

    def test_computing_with_cpus_to_spare(self) -> None:
        found = self.verdict(row("decode", 19, 18))
        assert found.kind == "computing"
        assert settings_of(found) == {"stages.decode.workers": 5}, "as many as there are CPUs for"

    def test_computing_with_no_cpu_left(self) -> None:
        found = self.verdict(row("decode", 39, 36, workers=4))
        assert found.kind == "computing"
        assert "3.7 CPUs of 4, 99 % of that for decode" in found.evidence
        assert settings_of(found) == {}

    def test_computing_beside_other_programs(self) -> None:
        """Off the CPU, but not of its own will: that is no waiting for a store, nor a lock."""
        found = self.verdict(row("call", 19, 9, delayed_s=9), trial=ContentionResult(0.9, 0.1))
        assert found.kind == "computing"
        assert "no CPU was free" in found.evidence

    def test_what_waits_for_a_cpu_is_not_what_uses_them(self) -> None:
        """Sixteen threads on four CPUs: the last chunk may stand anywhere."""
        rows = [row("read", 30, 3, delayed_s=26), row("decode", 100, 35, delayed_s=60)]
        found = stats({"read": 6.0, "decode": 2.0}, rows, wall_s=10).verdict()
        assert (found.stage, found.kind) == ("decode", "computing")
        assert found.percent == pytest.approx(10 * (2 * 0.4 + (6 * 26 / 30 + 2 * 0.6) * 35 / 38), abs=0.1)

    def test_computing_one_at_a_time(self) -> None:
        assert self.verdict(row("call", 19, 9.2), trial=ContentionResult(1.02, 0.5)).kind == "gil"
        taking_turns = row("call", 9.8, 9.2, idle_s=9.8)
        assert self.verdict(taking_turns, trial=ContentionResult(1.1, 0.5)).kind == "gil"
        assert self.verdict(row("call", 19, 9.2)).kind == "gil", "not tried, but two have one CPU between them"

    def test_who_is_ready_to_run_while_cpus_are_idle_waits_for_no_cpu(self) -> None:
        """On some virtual machines a thread that waits for the GIL counts as one that waits for a CPU."""
        behind = row("call", 19, 8.7, delayed_s=9.5)
        seen = ContentionResult(None, 0.08)
        assert self.verdict(behind, trial=seen, idle_s=9.5).kind == "gil"
        assert self.verdict(behind, trial=seen, idle_s=1.0).kind == "computing", "other programs have the other CPU"
        in_bursts = row("call", 19, 8.7, delayed_s=9.5, blocked_s=21)
        assert self.verdict(in_bursts, trial=seen, idle_s=9.5).kind != "gil", "idle between the bursts"
        found = self.verdict(row("decode", 19, 13, delayed_s=6), trial=ContentionResult(None, 0.1, 0.2), idle_s=7.0)
        assert found.kind == "computing"
        assert "32 % ready to run while 0.7 CPUs were idle" in found.evidence

    def test_whether_the_lock_is_held_was_asked(self) -> None:
        held, free = 0.9, 0.5
        assert self.verdict(row("call", 19, 9.2), trial=ContentionResult(None, 0.1, held)).kind == "gil"
        assert self.verdict(row("call", 19, 9.2), trial=ContentionResult(1.02, 0.5, free)).kind != "gil"
        # Beside another program one alone may seem slower; but where much of a CPU is idle, it is.
        assert self.verdict(row("call", 19, 9.2), trial=ContentionResult(0.6, 0.1, held)).kind == "gil"
        assert self.verdict(row("call", 19, 6.0), trial=ContentionResult(0.6, 0.5, held)).kind != "gil"

    def test_computing_in_several_processes(self) -> None:
        """Workers share a GIL with those of their own process: two of four, which then have two CPUs."""
        two = {"executor": "process", "processes": 2}
        four = row("call", 38, 18.4, workers=4)
        assert self.verdict(four, trial=ContentionResult(1.02, 0.5), **two).kind == "gil"
        assert self.verdict(four, trial=ContentionResult(0.52, 0.5), **two).kind != "gil", "one of two did half"
        assert "of the throughput of all 2" in self.verdict(four, trial=ContentionResult(1.02, 0.5), **two).evidence
        assert self.verdict(row("call", 19, 9.2), **two).kind != "gil", "one in each: nothing is in its way"

    def test_waiting_one_at_a_time(self) -> None:
        assert self.verdict(row("call", 19, 0.3), trial=SERIAL).kind == "lock"
        found = self.verdict(row("read", 19, 0.3, num_bytes=10**9), trial=SERIAL)
        assert found.kind == "bandwidth"
        assert "101 MB/s" in found.evidence
        assert self.verdict(row("transfer", 19, 0.3), trial=SERIAL).kind == "bandwidth"

    def test_a_data_set_that_waits_one_at_a_time(self) -> None:
        """It reads nothing that is seen as bytes: a lock is as likely as a store."""
        assert self.verdict(row("read", 19, 0.3), trial=SERIAL).kind == "lock"

    def test_waiting_each_for_itself(self) -> None:
        found = self.verdict(
            row("read", 19, 0.3, services=services((0.02, 900))), trial=ContentionResult(0.52, 0.98, slowdowns=ALIKE)
        )
        assert found.kind == "latency"
        assert "larger requests" in found.change

    def test_few_were_there_when_one_alone_was_compared_with_them(self) -> None:
        """Eight workers of which the loop needs two: what holds two up a little would hold eight up by far more. Eight that
        get less than twice as much done as one, each a little later, are held up by something that is no lock."""
        waiting = row("read", 79, 0.3, workers=8, services=services((0.02, 900)))
        assert (
            self.verdict(waiting, trial=ContentionResult(0.6, 0.98, num_inside=2.4, slowdowns={"read": 1.5})).kind
            == "lock"
        )
        assert self.verdict(waiting, trial=ContentionResult(0.6, 0.98, slowdowns={"read": 1.5})).kind == "waiting"
        found = self.verdict(waiting, trial=ContentionResult(0.42, 0.98, num_inside=2.4, slowdowns=ALIKE))
        assert found.kind == "latency"
        assert "42 % of the throughput of 2 of 8 at a time" in found.evidence

    def test_one_alone_that_does_all_else_as_well(self) -> None:
        """A store that is read one at a time, 1.1 ms an item, and 0.5 ms of decoding, by two: one alone needs 1.6, so
        it gets 66 % of that done; what tells is that it reads faster."""
        rows = [row("read", 15, 0.3, num_bytes=10**9), row("decode", 5, 4.5)]
        serial = stats(
            {"read": 8.0}, rows, trial=ContentionResult(0.66, 0.7, slowdowns={"read": 1.5, "decode": 1.0})
        ).verdict()
        assert (serial.stage, serial.kind) == ("read", "bandwidth")
        assert "read takes 1.5 times as long side by side" in serial.evidence
        each_for_itself = stats(
            {"read": 8.0}, rows, trial=ContentionResult(0.66, 0.7, slowdowns={"read": 1.1})
        ).verdict()
        assert each_for_itself.kind == "latency"

    def test_an_unfair_lock_is_told_by_what_one_alone_gets_done(self) -> None:
        """The items that end are those of the thread with the GIL, and took no longer than alone."""
        found = self.verdict(row("call", 19, 0.3), trial=ContentionResult(1.0, 0.98, num_inside=2.0, slowdowns=ALIKE))
        assert found.kind == "lock"

    def test_a_store_that_answers_unevenly_delays_no_other(self) -> None:
        """The three items of one alone happened to be quick ones; it got its share done, by the median."""
        found = self.verdict(
            row("read", 19, 0.3), trial=ContentionResult(0.52, 0.98, num_inside=2.0, slowdowns={"read": 1.5})
        )
        assert found.kind == "latency"
        assert "do not block one another" not in found.evidence

    def test_there_are_fewer_workers_than_when_it_was_tried(self) -> None:
        """What is little for eight workers is not much for the two that are left."""
        trial = ContentionResult(0.2, 0.98, num_inside=7.8, slowdowns={"read": 1.8})
        assert self.verdict(row("read", 19, 0.3), trial=trial).kind == "latency"

    def test_a_stage_that_workers_are_seldom_in_together_delays_no_other(self) -> None:
        rows = [row("read", 9, 0.3), row("decode", 11, 6)]
        assert (
            stats({"read": 8.0}, rows, trial=ContentionResult(0.5, 0.9, slowdowns={"read": 1.4})).verdict().kind
            == "latency"
        )

    def test_waiting_and_nothing_was_tried(self) -> None:
        assert self.verdict(row("read", 9.5, 0.3, workers=1)).kind == "waiting"
        assert self.verdict(row("transfer", 9.5, 0.3, workers=1)).kind == "waiting"

    def test_samples_that_wait_for_blocks_read_ahead_are_no_stragglers(self) -> None:
        """One in a hundred waits for the block, which the others then copy from; one alone gets what came meanwhile."""
        blocks = row("read", 19, 0.3, num_bytes=10**9, services=services((1e-5, 980), (0.5, 20)))
        found = self.verdict(blocks, trial=ContentionResult(130.0, 0.98, slowdowns={"read": 640.0}), ahead_wait_s=18.0)
        assert found.kind == "bandwidth"
        assert "source.read_ahead.requests" in found.change
        assert self.verdict(blocks, ahead_wait_s=3.0).kind == "stragglers", "of their own reads"

    def test_stragglers(self) -> None:
        found = self.verdict(row("read", 19, 0.3, services=services((0.01, 980), (0.5, 20))))
        assert found.kind == "stragglers"
        assert settings_of(found) == {"prefetch.batches": 8, "stages.read.workers": 4}

    def test_stragglers_where_nothing_is_read_ahead(self) -> None:
        uneven = row("read", 8, 0.3, workers=1, blocked_s=2, services=services((0.01, 980), (0.5, 20)))
        found = self.verdict(uneven, executor="inline")
        assert found.kind == "stragglers"
        assert settings_of(found) == {"prefetch.executor": "thread"}

    @pytest.mark.parametrize(
        ("executor", "idle_s", "kind"),
        [
            ("process", 2.0, "oversubscription"),  # the training step's own threads are in another process
            ("thread", 2.0, "computing"),  # its own may be those
            ("process", 25.0, "computing"),  # there are CPUs for all of them
        ],
    )
    def test_pools_of_libraries(self, executor: str, idle_s: float, kind: str) -> None:
        rows = [row("read", 0.1, 0.1), row("call", 19, 15, blocked_s=1)]
        seen = stats({"call": 5.0}, rows, executor=executor, idle_s=idle_s)
        found = replace(seen, host=replace(seen.host, cpu_s=23.0, native_s=14.0)).verdict()
        assert (found.stage, found.kind) == ("call", kind)

    def test_pools_that_hardly_compute_are_no_cause(self) -> None:
        """Where everything waits, the largest part of little is theirs."""
        seen = stats({"call": 9.9}, [row("call", 20, 0.05)], executor="thread", idle_s=0.0)
        assert replace(seen, host=replace(seen.host, cpu_s=1.6, native_s=1.5)).verdict().kind != "oversubscription"

    def test_a_quota_of_a_part_of_a_cpu(self) -> None:
        busy = stats({"call": 8.0}, [row("call", 5, 4.5, blocked_s=15)])
        found = replace(busy, host=replace(busy.host, quota_cpus=0.5)).verdict()
        assert found.kind == "computing"
        assert "the workers use 0.5 CPUs of 0.5" in found.evidence
        assert "a larger CPU quota" in found.change

    def test_no_more_memory_than_the_machine_has(self) -> None:
        rows = [row("read", 5, 0.1, blocked_s=15)]
        seen = stats({"read": 8.0}, rows, memory=(2**50, 2**49))
        found = seen.verdict()
        assert found.kind == "memory"
        assert settings_of(found) == {}
        config = Pipeline.dataset(Numbers()).read().batch(8).config
        assert not settings_for(found, seen, config)

    @pytest.mark.parametrize(("alone", "kind"), [(1.0, "bandwidth"), (2.4, "stragglers")])
    def test_one_alone_that_met_no_straggler_shows_no_full_link(self, alone: float, kind: str) -> None:
        some = services((0.01, 900), (0.1, 45))
        one = row("read", 19, 0.3, services=some, num_items=945, num_bytes=10**6)
        found = self.verdict(one, trial=ContentionResult(alone, 0.98, slowdowns={"read": 2.6}))
        assert found.kind == kind
        assert kind == "bandwidth" or found.confidence < 0.6  # an unfair lock on a busy machine shows the same

    @pytest.mark.parametrize(("is_together", "kind"), [(True, "stragglers"), (False, "lock")])
    def test_where_all_are_slow_at_once_no_lock_is_held(self, is_together: bool, kind: str) -> None:
        """One alone, which met none of the slow items, was as fast as both, and the usual items fill the time: so it is under a
        lock that one has again and again. But then that one gets on."""
        some = services((0.01, 900), (0.1, 45), (0.4, 12))
        one = row("call", 19, 0.3, services=some, num_items=957)
        slow = [
            Slow(0.4, 1.0 + n + 0.5 * (number and not is_together), 0.4, 0, 0, 1, 0, 1, 0.4)
            for n in range(6)
            for number in range(2)
        ]
        found = self.verdict(
            one, trial=ContentionResult(1.1, 0.98, slowdowns={"call": 2.6}), slow={"call": tuple(slow)}
        )
        assert found.kind == kind

    def test_what_computes_on_several_cpus_holds_no_lock(self) -> None:
        """Three threads on two CPUs, or on one core's caches: each gets on more slowly, and one alone is as fast."""
        busy = row("call", 24, 13, delayed_s=3, workers=6, blocked_s=36)
        trial = ContentionResult(1.18, 0.4, 0.4, num_inside=3.0, slowdowns={"call": 1.6})
        assert self.verdict(busy, trial=trial, idle_s=0.2).kind == "computing"

    def test_the_loop_may_hold_the_gil(self) -> None:
        """The usual item takes what it computes; some wait for the GIL, which a loop of Python gives away every 5 ms."""
        late = row("call", 8, 0.2, num_items=1000, services=services((2e-4, 950), (0.009, 50)))
        trial = ContentionResult(1.1, 0.9, 0.95)
        seen = replace(stats({"call": 1.0}, [row("read", 0.1, 0.1), late], trial=trial))
        busy, idle = (replace(seen, host=replace(seen.host, cpu_s=cpu_s)) for cpu_s in (8.0, 1.0))
        assert busy.verdict().kind == "gil"
        assert settings_of(busy.verdict()) == {"prefetch.executor": "process"}
        assert idle.verdict().kind != "gil", "the loop hardly computes"
        config = Pipeline.dataset(Numbers()).read().batch(8).config
        found = settings_for(busy.verdict(), busy, config)
        assert [(one.key, one.value) for one in found] == [("prefetch.executor", "process")]

    def test_rare_stragglers_do_not_matter(self) -> None:
        seldom = services((0.01, 990), (0.1, 11))
        assert self.verdict(row("read", 19, 0.3, services=seldom), trial=ContentionResult(0.5, 0.98)).kind == "latency"

    def test_no_pool_at_its_limit(self) -> None:
        found = self.verdict(row("read", 9, 8, blocked_s=10))
        assert found.kind == "depth"
        assert settings_of(found) == {"prefetch.batches": 8}

    def test_inline(self) -> None:
        found = self.verdict(row("read", 8, 7.5, workers=1, blocked_s=2), executor="inline")
        assert found.kind == "computing"
        assert settings_of(found) == {"prefetch.executor": "thread"}

    def test_stages_apart(self) -> None:
        rows = [row("read", 4, 1, blocked_s=16), row("decode", 19, 18, starved_s=1)]
        found = stats({"decode": 7.0}, rows, apart=True).verdict()
        assert (found.stage, found.kind) == ("decode", "computing")

    def test_few_batches_make_unsure(self) -> None:
        sure = self.verdict(row("decode", 19, 18)).confidence
        assert self.verdict(row("decode", 19, 18), batches=1).confidence < sure


@given(
    st.dictionaries(st.sampled_from(["start", "memory", "wakeup", "worker restart", *KINDS]), st.floats(0, 20)),
    st.lists(st.tuples(*[st.one_of(st.just(0.0), st.floats(0, 20))] * 6), min_size=len(KINDS), max_size=len(KINDS)),
    st.one_of(st.just(0.0), st.floats(1e-9, 20)),  # as clocks count
    st.builds(
        ContentionResult,
        st.one_of(st.none(), st.floats(0, 3)),
        st.one_of(st.none(), st.floats(0, 1)),
        slowdowns=st.dictionaries(st.sampled_from(KINDS), st.floats(0, 9)),
    ),
    st.booleans(),
    st.tuples(st.integers(1, 2**40), st.integers(0, 2**40)),
    st.sampled_from(["inline", "thread", "process"]),
    st.integers(0, 10**6),
)
def test_there_is_always_a_verdict(
    stall_s: dict[str, float],
    times: list[tuple[float, ...]],
    wall_s: float,
    trial: ContentionResult,
    apart: bool,
    memory: tuple[int, int],
    executor: str,
    batches: int,
) -> None:
    rows = [
        row(name, busy, cpu, delayed_s=delayed, starved_s=starved, blocked_s=blocked, idle_s=idle)
        for name, (busy, cpu, delayed, starved, blocked, idle) in zip(KINDS, times, strict=True)
    ]
    if executor != "process":
        stall_s.pop("worker restart", None)  # there is no process to start again
    seen = stats(
        stall_s, rows, wall_s=wall_s, trial=trial, apart=apart, memory=memory, executor=executor, batches=batches
    )
    found = seen.verdict()
    assert 0 <= found.confidence <= 1
    assert found.change
    json.dumps(found.to_dict(), allow_nan=False)
    assert not contradictions(seen.to_dict())
    settings = settings_of(found)
    assert settings.get("prefetch.executor") != executor, "that it is already"
    assert executor != "inline" or "prefetch.batches" not in settings


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_it_is_in_the_statistics(executor: str) -> None:
    with loaderkit.build(
        Pipeline.dataset(Numbers()).read().batch(8), overrides={"prefetch.executor": executor}
    ) as loader:
        list(loader)
        found = loader.stats().to_dict()["verdict"]
    names = "stage percent confidence evidence change kind or_kind source causes headline"
    assert set(found) == {*names.split()}


@pytest.mark.parametrize("machine", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_on_recorded_accounts(machine: Path) -> None:
    """What eighty pipelines with one bottleneck each said of themselves on some machine: see profiles/accounts.py. Who waits
    for the GIL is always told; of the rest one in twenty may be wrong."""
    found = [(interval, recorded.verdict()) for interval, recorded in read(machine)]
    wrong = {interval.name: verdict for interval, verdict in found if not is_right(interval, verdict.to_dict())}
    assert len(found) >= 50
    assert not [problem for _, recorded in read(machine) for problem in contradictions(recorded.to_dict())]
    assert len(wrong) <= len(found) / 20, wrong
    assert not [name for name in wrong if name.startswith("GIL")]


def test_accounts_come_back_from_their_files() -> None:
    with loaderkit.build(Pipeline.dataset(Numbers()).read().batch(8)) as loader:
        list(loader)
        seen = loader.stats()
    assert from_json(json.loads(json.dumps(to_json(seen)))).verdict() == seen.verdict()


@pytest.mark.prove
@pytest.mark.alone
def test_nearly_all_bottlenecks_are_found(tmp_path: Path) -> None:
    rows = run(CASES)
    print(record(rows, tmp_path).read_text())
    assert len(rows) >= 60
    assert sum(row["is_right"] for row in rows) >= 0.95 * len(rows)
