"""A verdict's words and its settings come from one decision: on random accounts they never contradict each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from drawn_accounts import contention_results, services
from hypothesis import given
from hypothesis import strategies as st

from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.report_parts import VerdictPart
from loaderkit.profile.settings_patch import verdict_part
from profiles.bottlenecks import settings_contradictions

STAGES = ("read", "call", "batch", "transfer")
CPUS = 4
BUSY_CALL = {
    "waits": {"call": 9.0},
    "times": [(0.01, 1, 0, 0), (0.98, 1, 0, 0), (0.01, 1, 0, 0), (0, 0, 0, 0)],
    "workers": 1,
    "idle_share": 0.0,
    "executor": "thread",
    "processes": 1,
    "batches": 8,
    "batch_bytes": 1,
    "memory": "2GiB",
    "host": (20.0, 10.0, None),
    "own": None,
    "apart": False,
    "trial": ContentionResult(),
    "services": {},
}
"""What `accounts` draws, as it is where one worker computes in `call` all the time."""
shares = st.one_of(st.just(0.0), st.floats(0, 1))
accounts = st.fixed_dictionaries(
    {
        "waits": st.dictionaries(
            st.sampled_from(("start", "memory", "wakeup", "release", *STAGES)), st.floats(0.1, 9), min_size=1
        ),
        # Of each stage, in shares of its workers' time: busy; of that on a CPU, and late; of the rest, blocked.
        "times": st.lists(st.tuples(shares, shares, shares, shares), min_size=4, max_size=4),
        "workers": st.integers(1, 6),
        "idle_share": shares,  # of the workers, while one works alone
        "executor": st.sampled_from(["inline", "by rule", "thread", "process"]),
        "processes": st.integers(1, 2),
        "batches": st.integers(2, 8),
        "batch_bytes": st.sampled_from([0, 1, 2**21]),
        "memory": st.sampled_from(["4MiB", "2GiB"]),
        "host": st.tuples(st.floats(0, 40), st.floats(0, 40), st.sampled_from([None, None, 0.5])),
        "own": st.sampled_from([None, None, 2]),
        "apart": st.booleans(),
        "trial": contention_results(STAGES),
        "services": services,
    }
)


def made_up(drawn: dict[str, Any]) -> tuple[Stats, VerdictPart]:
    """The accounts of ten seconds, and what is said of them."""
    stats, config = with_config(drawn)
    return stats, verdict_part(stats, config)


def with_config(drawn: dict[str, Any]) -> tuple[Stats, PipelineConfig]:
    """The accounts of ten seconds of a pipeline."""
    executor = drawn["executor"].replace("by rule", "inline")
    workers = 1 if executor == "inline" else drawn["workers"]
    rows = []
    for name, (busy, cpu, late, blocked) in zip(STAGES, drawn["times"], strict=True):
        slot_s = 10.0 * workers
        busy_s = slot_s * busy * (1 - drawn["idle_share"])
        row = StageStats(
            name, workers, num_items=1000, num_bytes=0, busy_s=busy_s, cpu_s=busy_s * cpu * (1 - late),
            delayed_s=busy_s * late, blocked_s=(slot_s - busy_s) * blocked, idle_s=slot_s * drawn["idle_share"],
            kind=name, waits=name != "batch", services=Histogram(),
        )  # fmt: skip
        for seconds, count in drawn["services"].items():
            row.services.add(seconds, count)
        rows.append(row)
    pools: tuple[PoolTuning, ...] = (
        PoolTuning(STAGES[:3], workers),
        PoolTuning(STAGES[3:], 1, is_trainers=executor == "process"),
    )
    if drawn["apart"]:
        pools = (PoolTuning(STAGES[:1], workers), PoolTuning(STAGES[1:3], workers), pools[1])
    given: dict[str, Any] = {
        "prefetch.executor": executor,
        "prefetch.batches": drawn["batches"],
        "prefetch.memory": drawn["memory"],
        "prefetch.processes": drawn["processes"] if executor == "process" else 1,
    }
    if drawn["own"] is not None and executor != "inline":
        given["stages.call.workers"] = drawn["own"]
    pipeline = Pipeline.dataset([1]).read().call(str).batch(1).transfer("cpu")
    config = pipeline.with_overrides(given).config
    empty = Stats.empty(rows, config.prefetch.memory)
    idle_s, cpu_s, quota = drawn["host"]
    stats = replace(
        empty,
        wall_s=10.0,
        num_batches=100,
        num_samples=1000,
        waits_s=drawn["waits"],
        memory={**empty.memory, "batch_bytes": drawn["batch_bytes"]},
        host=replace(empty.host, idle_s=idle_s, others_s=40 - idle_s, cpu_s=cpu_s, quota_cpus=quota),
        trials={STAGES[0]: drawn["trial"]},
        tuning=Tuning(
            executor,
            drawn["batches"],
            executor_reason="so small" if drawn["executor"] == "by rule" else None,
            processes=drawn["processes"] if executor == "process" else None,
            cpus=CPUS,
            pools=pools,
        ),
    )
    return stats, config


@given(accounts)
def test_the_words_are_not_read(drawn: dict[str, Any]) -> None:
    """In another language, a verdict comes to the same settings, and says their values where its own words did not."""
    stats, config = with_config(drawn)
    verdict = stats.verdict()
    with patch.object(Stats, "verdict", lambda _: verdict._replace(evidence="Es wartet.", change="Mach es schneller")):
        found = verdict_part(stats, config)
    own = verdict_part(stats, config)
    assert found.settings == own.settings
    assert found.change.removeprefix("Mach es schneller") == own.change.removeprefix(verdict.change)


@given(accounts)
def test_words_and_settings_say_the_same(drawn: dict[str, Any]) -> None:
    stats, verdict = made_up(drawn)
    assert not settings_contradictions(verdict.model_dump(), stats.tuning.to_dict())
    for one in verdict.settings:
        assert one.before != one.value
    for one in (setting for cause in verdict.causes if "would not help" in cause.change for setting in cause.settings):
        assert one.key in ("prefetch.executor", "prefetch.processes", "prefetch.batches")


def test_next_to_no_cpu_time_asks_for_a_number_of_workers() -> None:
    """And not for as many as the CPUs are times what one used."""
    times = [(0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (5e-324, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)]
    waits, host = {"start": 1.0, "wakeup": 2.0}, (4.0, 0.0, None)
    _, verdict = made_up(BUSY_CALL | {"times": times, "waits": waits, "host": host, "workers": 1, "idle_share": 0.0})
    assert verdict.kind == "computing"


@pytest.mark.parametrize(
    ("verdict", "tuning", "is_right"),
    [
        ({"change": "prefetch.batches: 8", "settings": [("prefetch.batches", 8)]}, {}, True),
        ({"change": "prefetch.batches: 8", "settings": [("prefetch.batches", 4)]}, {}, False),
        ({"change": "nothing", "settings": [("prefetch.executor", "process")]}, {}, False),
        ({"change": "more workers would not help", "settings": [("prefetch.concurrency", 5)]}, {}, False),
        ({"change": 'loader.resize("call", workers=5)', "settings": [("stages.call.workers", 5)]}, {}, True),
        ({"change": 'loader.resize("call", workers=5)', "settings": [("prefetch.concurrency", 5)]}, {}, True),
        ({"change": 'loader.resize("call", workers=5)', "settings": [("prefetch.concurrency", 5)]},
         {"pools": [{"stages": ["call"], "workers": 2}, {"stages": ["read"], "workers": 3}]}, False),
    ],
)  # fmt: skip
def test_the_check_itself_can_fail(verdict: dict[str, Any], tuning: dict[str, Any], is_right: bool) -> None:
    settings = [{"key": key, "value": value} for key, value in verdict["settings"]]
    assert (not settings_contradictions({**verdict, "settings": settings}, tuning)) is is_right


@pytest.mark.parametrize(("executor", "workers"), [("thread", 1), ("process", 1), ("process", 2)])
def test_what_may_hold_the_gil_gets_processes(executor: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has a process for itself, and computes: whether a second thread would have a CPU is not known."""
    monkeypatch.setattr("loaderkit._internal.system.cgroups.num_cpus", lambda: CPUS)
    _, verdict = made_up(BUSY_CALL | {"workers": workers, "processes": workers, "executor": executor})
    settings = {one.key: one.value for one in verdict.settings}
    assert verdict.kind == "computing"
    assert settings.get("prefetch.executor", "process") == "process"
    assert settings["prefetch.processes"] == CPUS
    assert "prefetch.concurrency" not in settings


def test_one_that_works_alone_since_it_is_faster_gets_no_others_beside_it() -> None:
    times = [(0.01, 1, 0, 0), (0.98, 0.8, 0, 0), (0.01, 1, 0, 0), (0, 0, 0, 0)]
    trial = ContentionResult(1.2, 0.2)
    _, verdict = made_up(BUSY_CALL | {"times": times, "workers": 4, "idle_share": 0.75, "trial": trial})
    assert verdict.kind == "computing"
    assert "more workers would not help" in verdict.change
    assert verdict.settings == []
