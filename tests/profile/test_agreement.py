"""A report says one thing: on random accounts of random loops, its verdict, tables, text and page agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drawn_accounts import contention_results, services
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit import Pipeline
from loaderkit.diagnosis.interval import NUM_SURE, Interval
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.profile.build import ReportFacts, make_report, pipeline_subject
from loaderkit.profile.recording import FirstBatchLog
from loaderkit.profile.render.html import why_no_html
from loaderkit.profile.report import Report
from profiles.bottlenecks import contradictions, text_contradictions
from profiles.reports import FOLDER

STAGES = ("read", "call", "batch")
seconds = st.one_of(st.just(0.0), st.floats(1e-4, 2.0))
steps = st.fixed_dictionaries(
    {
        "waits": st.dictionaries(st.sampled_from(("start", "memory", "wakeup", *STAGES)), seconds),
        "handing_s": st.floats(1e-5, 1e-3),
        "compute_s": seconds,
        "release_s": seconds,
    }
)
loops = st.fixed_dictionaries(
    {
        "epochs": st.lists(st.tuples(st.lists(steps, max_size=4), seconds), max_size=4),
        "executor": st.sampled_from(["inline", "thread", "process"]),
        "cpu": st.tuples(*[st.floats(0, 3)] * len(STAGES)),
        "idle": st.floats(0, 1),
        "is_later": st.booleans(),
        # What tells kinds apart: a quota, threads of libraries, one worker alone against all, slow items.
        "quota": st.sampled_from([None, None, 0.5]),
        "native": st.sampled_from([0.0, 0.0, 2.0]),
        "trial": contention_results(STAGES),
        "services": services,
    }
)


class Batch:
    """Takes a while to drop, by the clock of the test."""

    def __init__(self, loop: Loop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds

    def __del__(self) -> None:
        self._loop.now_s += self._seconds


class Loop:
    """A loop by a clock of its own, and the accounts that an engine would have kept of it."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        self._drawn = drawn
        self.now_s, self._paused_s = 100.0, 0.0
        self._waits_s: dict[str, float] = {}
        self._num_batches = 0
        self._first_wait_s: float | None = None

    def stats(self) -> Stats:
        wall_s = 0.0 if self._first_wait_s is None else self.now_s - self._first_wait_s
        rows = [
            StageStats(
                name, 2, num_items=self._num_batches, busy_s=2 * wall_s * cpu / 3, cpu_s=wall_s * cpu / 2, kind=name,
                blocked_s=2 * wall_s * (1 - cpu / 3), services=self._services(), num_bytes=100 * (name == "read"),
                waits=name != "batch",
            )
            for name, cpu in zip(STAGES, self._drawn["cpu"], strict=True)
        ]  # fmt: skip
        empty = Stats.empty(rows, 1000)
        idle_s = 4 * wall_s * self._drawn["idle"]
        return replace(
            empty,
            now_s=self.now_s,
            wall_s=wall_s,
            num_batches=self._num_batches,
            waits_s=dict(self._waits_s),
            host=replace(
                empty.host,
                idle_s=idle_s,
                others_s=(4 * wall_s - idle_s) / 2,
                native_s=wall_s * self._drawn.get("native", 0.0),
                quota_cpus=self._drawn.get("quota"),
            ),
            trials={STAGES[0]: self._drawn.get("trial", ContentionResult())},
            tuning=Tuning(self._drawn["executor"], 4, cpus=4, pools=(PoolTuning(STAGES, 2),)),
        )

    def _services(self) -> Histogram:
        found = Histogram()
        for seconds, count in self._drawn.get("services", {}).items():
            found.add(seconds, count * self._num_batches)
        return found

    def report(self) -> Report:
        config = (Pipeline.dataset([1]).read().call(str).batch(1)).config
        epochs = self._drawn["epochs"]
        if self._drawn["is_later"]:
            self._run(FirstBatchLog(self.stats, lambda: self.now_s), epochs)
        log, begin = FirstBatchLog(self.stats, lambda: self.now_s), self.stats()
        self._run(log, epochs)
        log.close()
        schedule = SimpleNamespace(rank=0, world_size=1)
        plan: Any = SimpleNamespace(
            config=config,
            source=None,
            schedule=schedule,
            list_s=0.0,
            index_s=0.0,
            compiled=SimpleNamespace(device=None),
        )
        subject = pipeline_subject(plan, config)
        return make_report(ReportFacts(subject, begin, log.first, self.stats(), [], log, None, None))

    def _run(self, log: FirstBatchLog, epochs: list[tuple[list[dict[str, Any]], float]]) -> None:
        for some, pause_s in epochs:
            log.on_epoch()
            for step in some:
                log.on_request()
                if self._first_wait_s is None:
                    self._first_wait_s = self.now_s
                for cause, wait_s in step["waits"].items():
                    self._waits_s[cause] = self._waits_s.get(cause, 0.0) + wait_s
                    self.now_s += wait_s
                self.now_s += step["handing_s"]
                self._num_batches += 1
                log.on_batch({"x": Batch(self, step["release_s"])})
                self.now_s += step["compute_s"]
            log.on_request()
            log.on_end()
            self.now_s += pause_s


@pytest.mark.skipif(why_no_html() is not None, reason="there is no page without jinja2")
@settings(
    suppress_health_check=[HealthCheck.too_slow], max_examples=num_examples(25), deadline=None, phases=[Phase.generate]
)
@given(loops)
def test_a_report_says_one_thing(drawn: dict[str, Any]) -> None:
    loop = Loop(drawn)
    report = loop.report()
    steps_of = [step for some, _ in drawn["epochs"] for step in some]
    assert report.num_batches == len(steps_of)
    assert report.stall.total_s == pytest.approx(
        sum(sum(step["waits"].values()) for step in steps_of) + report.steps.release_s
    )
    if not any(some for some, _ in drawn["epochs"]):
        assert report.verdict.kind == "unknown"
    assert report.verdict.kind != "unknown" or report.num_batches < NUM_SURE
    assert not contradictions(report.model_dump(mode="json"))
    assert not text_contradictions(report)


@pytest.mark.skipif(why_no_html() is not None, reason="there is no page without jinja2")
@pytest.mark.parametrize(
    "path", sorted({*FOLDER.glob("*.json")} - {FOLDER / "restore.json"}), ids=lambda path: path.stem
)
def test_recorded_reports_say_one_thing(path: Path) -> None:
    report = Report.from_json(path.read_text())
    assert not contradictions(report.model_dump(mode="json"))
    assert not text_contradictions(report)


def test_pauses_of_the_loop_are_no_idle_cpus_nor_other_programs() -> None:
    """The counters of CPUs run on in a validation, the loop's clock does not."""
    step = {"waits": {"call": 1.0}, "handing_s": 0.0, "compute_s": 0.5, "release_s": 0.0}
    drawn = {"epochs": [([step] * 4, 60.0)] * 3, "executor": "thread", "cpu": (0, 3, 0), "idle": 0.5, "is_later": True}
    report = Loop(drawn).report()
    assert report.wall_s == pytest.approx(18.0)
    assert report.host["others_cpus"] == pytest.approx(1.0)


def test_workers_that_ran_before_the_first_batch_use_no_more_cpus_than_there_are() -> None:
    stats = Loop({"executor": "thread", "cpu": (0, 3, 0), "idle": 0.0}).stats()
    first = replace(stats, wall_s=4.0, waits_s={"start": 1.9, "call": 2.0})
    first.stages[1].cpu_s = 4.0
    assert Interval.of(replace(first, started_s=1.9)).cpus_used == pytest.approx(1.0)
    assert Interval.of(first).cpus_used == pytest.approx(4.0 / 2.1)


@pytest.mark.parametrize(("num_slow", "is_over"), [(20, True), (80, False)])
def test_waiting_that_is_over_is_told(num_slow: int, is_over: bool) -> None:
    """As with a cache, which is full after the first epoch."""
    slow, fast = (
        {"waits": {"read": wait_s}, "handing_s": 0.0, "compute_s": 0.5, "release_s": 0.0} for wait_s in (0.5, 1e-4)
    )
    epochs = [([slow] * num_slow, 0.0), ([fast] * (100 - num_slow), 0.0)]
    drawn = {"epochs": epochs, "executor": "thread", "cpu": (0, 0, 0), "idle": 0.5, "is_later": False}
    report = Loop(drawn).report()
    assert report.verdict.stage == "read"
    assert ("nearly all of the waiting was over after 19.5 s" in report.verdict.evidence) is is_over
    assert not contradictions(report.model_dump(mode="json"))
