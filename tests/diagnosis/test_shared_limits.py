"""The verdict where what limits is shared: a server that answers a few at a time, CPUs that others use, started processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_accounts import row, services, settings_of, stats
from numbers_dataset import Numbers

from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.profile.settings_patch import settings_for
from profiles.bottlenecks import contradictions

CONFIG = Pipeline.dataset(Numbers()).read().call(abs).batch(8).config


def a_server(alone_share: float, slowdown: float, workers: int = 6) -> Stats:
    """Workers that wait for a server: one alone has `alone_share` of the throughput of all."""
    trial = ContentionResult(alone_share, 0.98, 0.0, float(workers), {"call": slowdown})
    rows = [row("read", 1, 1, workers=workers), row("call", 10 * workers - 1, 1, workers=workers)]
    return stats({"call": 8.0}, rows, trial=trial)


class TestAServer:
    def test_that_answers_a_few_at_a_time(self) -> None:
        """Six workers get twice as much done as one: four times as many would get no more."""
        seen = a_server(alone_share=0.52, slowdown=1.3)
        found = seen.verdict()
        assert (found.stage, found.kind) == ("call", "waiting")
        assert found.confidence < 0.6
        assert settings_of(found) == {}
        assert not settings_for(found, seen, CONFIG)
        assert not contradictions(seen.to_dict())

    def test_that_is_unfair(self) -> None:
        """Two of six get on, and who they are is chance: some items take many times as long as most."""
        trial = ContentionResult(0.55, 0.98, 0.0, 5.5, {"call": 2.1})
        times = services((0.009, 2100), (0.15, 270))
        rows = [row("read", 1, 1, workers=6), row("call", 59, 1, workers=6, services=times, num_items=2370)]
        found = stats({"call": 8.0}, rows, trial=trial).verdict()
        assert found.kind == "lock"
        stragglers = [replace(rows[0]), replace(rows[1], num_items=800)]
        assert stats({"call": 8.0}, stragglers, trial=trial).verdict().kind == "stragglers"

    def test_that_answers_all(self) -> None:
        seen = a_server(alone_share=0.17, slowdown=1.02)
        found = seen.verdict()
        assert (found.stage, found.kind) == ("call", "latency")
        assert found.confidence > 0.8
        assert [one.key for one in settings_for(found, seen, CONFIG)] == ["prefetch.concurrency"]

    @pytest.mark.parametrize(
        ("size", "budget_bytes", "batches"), [(4, 1000, 7), (8, 1000, None), (4, 6, None), (0, 1000, None)]
    )
    def test_more_workers_are_given_work(self, size: int, budget_bytes: int, batches: int | None) -> None:
        """24 workers, where two batches of four samples are ahead: more than eight would have nothing to do."""
        seen = a_server(alone_share=0.17, slowdown=1.02)
        seen = replace(
            seen, num_samples=size * seen.num_batches, tuning=replace(seen.tuning, batches=2 if size < 8 else 4)
        )
        seen = replace(seen, memory={"budget_bytes": budget_bytes, "batch_bytes": 1})
        found = seen.verdict()
        settings = {one.key: one.value for one in settings_for(found, seen, CONFIG)}
        assert settings.pop("prefetch.concurrency") == 1 + 24 - 6  # of the pool as it was built
        assert settings == ({} if batches is None else {"prefetch.batches": batches})
        assert settings_of(found).get("prefetch.batches") == batches

    @pytest.mark.parametrize(("alone_share", "slowdown"), [(0.45, 1.01), (0.28, 1.31)])
    def test_beside_busy_programs(self, alone_share: float, slowdown: float) -> None:
        """One of both alone says little there: recorded of stores with latency, with four workers."""
        assert a_server(alone_share, slowdown, workers=4).verdict().kind == "latency"


class TestOtherPrograms:
    @pytest.mark.parametrize(("others_s", "said"), [(16.0, "from those programs"), (0.0, "since no CPU is free")])
    def test_more_workers_take_cpus_from_them(self, others_s: float, said: str) -> None:
        """The kernel shares CPUs among threads, so more of ours get more: what-if says the same."""
        seen = stats({"call": 8.0}, [row("read", 1, 1), row("call", 19, 4, delayed_s=14)], idle_s=0.0)
        seen = replace(seen, host=replace(seen.host, others_s=others_s))
        found = seen.verdict()
        assert (found.kind, said in found.change) == ("computing", True)

    @pytest.mark.parametrize(("others_s", "keys"), [(18.0, []), (0.0, ["prefetch.executor"])])
    def test_a_loop_that_gets_no_cpu_is_not_helped_by_a_process(self, others_s: float, keys: list[str]) -> None:
        seen = stats({"wakeup": 4.0}, [row("read", 1, 1), row("call", 10, 5, blocked_s=9)], idle_s=20.0 - others_s)
        seen = replace(seen, host=replace(seen.host, others_s=others_s))
        found = seen.verdict()
        assert (found.stage, [*settings_of(found)]) == ("wakeup", keys)
        assert [one.key for one in settings_for(found, seen, CONFIG)] == keys

    @pytest.mark.parametrize(
        ("gil_taken", "delayed_s", "kind"), [(0.95, 4, "gil"), (0.3, 4, "stragglers"), (0.95, 32, "computing")]
    )
    def test_leave_little_to_who_holds_the_gil(self, gil_taken: float, delayed_s: float, kind: str) -> None:
        """With a tenth of a CPU a function in Python is seldom on one, and its workers' turns vary as stragglers do. Functions
        that release the GIL find it taken there, too, by one that has no CPU: but then all wait for a CPU."""
        slow = services((0.04, 900), (1.2, 100))
        rows = [row("read", 0.1, 0.01, workers=4), row("call", 39, 0.8, workers=4, delayed_s=delayed_s, services=slow)]
        seen = stats({"call": 8.0}, rows, idle_s=0.0, trial=ContentionResult(0.9, 0.9, gil_taken, 4.0))
        seen = replace(seen, host=replace(seen.host, others_s=39.0))
        assert seen.verdict().kind == kind


def test_slow_items_do_not_hide_the_scaling() -> None:
    """A few slow items, of which as many are in work as there are workers, are no server's limit."""
    trial = ContentionResult(0.5, 0.98, 0.0, 6.0, {"call": 1.3})
    rows = [row("read", 1, 1, workers=6), row("call", 59, 1, workers=6, services=services((0.01, 900), (0.5, 100)))]
    assert stats({"call": 8.0}, rows, trial=trial).verdict().kind == "stragglers"
