"""The source that alone holds the loop up is named, and only then: by experiment, with sources drawn at random."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from num_examples import num_examples

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.profile.render.html import to_html
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report

BATCHES = 16
NAMES = ("web", "code", "books", "talk")


class Time:
    """A clock that runs only where something is said to take time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def take(self, seconds: float) -> None:
        self.now_s += seconds


class Taking:
    """Items that take `each_s` to be read."""

    def __init__(self, clock: Time, each_s: float, size: int = 10_000) -> None:
        self.clock = clock
        self.each_s = each_s
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.clock.take(self.each_s)
        return {"x": np.int64(index)}  # of a type that one sample tells


class Case(NamedTuple):
    """Seconds for a sample: by source in `read`, and in a stage of its own; in a common stage; for the loop."""

    weights: tuple[float, ...]
    read_s: tuple[float, ...]
    own_s: tuple[float, ...]
    common_s: float
    step_s: float

    def each_s(self, number: int) -> float:
        return self.read_s[number] + self.own_s[number]


# So long that what the machine itself takes does not show.
seconds = st.sampled_from([0.0, 1e2, 2e2, 5e2, 1e3, 2e3, 5e3, 2e4])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num = draw(st.integers(1, 4))
    several = st.tuples(*[seconds] * num)
    weights = draw(st.tuples(*[st.sampled_from([1.0, 2.0, 3.0, 4.0])] * num))
    return Case(weights, draw(several), draw(several), draw(seconds), draw(seconds))


def run(case: Case, num_batches: int = BATCHES) -> Stats:
    """A loop whose own thread makes the batches, so that it waits for all that they take."""
    clock = Time()

    def taking(each_s: float) -> Any:
        return lambda sample: clock.take(each_s)

    sources = {
        name: Pipeline.dataset(Taking(clock, read_s)).call(taking(own_s))
        for name, read_s, own_s in zip(NAMES, case.read_s, case.own_s, strict=False)
    }
    weights = dict(zip(NAMES, case.weights, strict=False))
    pipeline = Pipeline.mix(sources, weights, stop="never").read().call(taking(case.common_s)).batch(8)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}, clock=clock) as loader:
        for _, _ in zip(range(num_batches), loader, strict=False):
            clock.take(8 * case.step_s)
        return loader.stats()


def waited_s(stats: Stats) -> float:
    """Without the first samples, which show what a batch holds."""
    return sum(seconds for cause, seconds in stats.stall_s.items() if cause != "start")


def quick_as_the_others(case: Case, rows: Any, number: int) -> Case:
    """The same, with samples of that source that take as long as those of the others."""
    others = [other for other in range(len(case.weights)) if other != number]
    total_s = sum(case.each_s(other) * rows[other].num_samples for other in others)
    mean_s = total_s / sum(rows[other].num_samples for other in others)
    read_s, own_s = list(case.read_s), list(case.own_s)
    read_s[number], own_s[number] = mean_s, 0.0
    return case._replace(read_s=tuple(read_s), own_s=tuple(own_s))


@settings(max_examples=num_examples(25))  # of up to five loops each
@given(case=cases())
def test_named_if_and_only_if_half_of_the_wait_is_its_own_fault(case: Case) -> None:
    stats = run(case)
    rows, before_s = stats.source_rows(), waited_s(stats)
    for number, row in enumerate(rows):
        assert row.read_s == pytest.approx(case.read_s[number] * row.num_samples, abs=1e-6)
        assert row.stages_s == pytest.approx(case.own_s[number] * row.num_samples, abs=1e-6)
        assert row.stall_s == pytest.approx(row.read_s + row.stages_s, rel=1e-3, abs=1.0)
    share_waited = before_s / (before_s + 8 * BATCHES * case.step_s) if before_s else 0.0
    assume(abs(share_waited - 0.05) > 0.005)
    guilty = set()
    for number in range(len(rows)) if len(rows) > 1 and share_waited > 0.05 else ():
        after_s = waited_s(run(quick_as_the_others(case, rows, number)))
        assume(abs(after_s / before_s - 0.5) > 0.01)
        if after_s < 0.5 * before_s:
            guilty.add(NAMES[number])
    said = stats.verdict().source
    assert (set() if said is None else {said.partition(":")[0]}) == guilty


def test_what_the_line_says() -> None:
    stats = run(Case((1.0, 3.0), (800.0, 10.0), (100.0, 0.0), 10.0, 50.0))
    assert stats.verdict().source == (
        "web: 93 % of the wait, with 25 % of the samples; one sample takes 900 s in read and its own stages, one of another "
        "source 10 s"
    )
    assert stats.to_dict()["verdict"]["source"] == stats.verdict().source


@pytest.mark.parametrize(("step_s", "is_named"), [(133.0, True), (240.0, False)])
def test_what_is_not_worth_a_change_is_not_said(step_s: float, is_named: bool) -> None:
    """The loop waits for 7 % of its time, or for 4 %; and so after a long start, too."""
    stats = run(Case((1.0, 1.0), (20.0, 0.0), (0.0, 0.0), 0.0, step_s))
    assert (stats.verdict().source is not None) == is_named
    start_s = 100 * stats.wall_s
    begun = replace(stats, wall_s=stats.wall_s + start_s, waits_s={**stats.waits_s, "start": start_s})
    assert begun.verdict().stage == "start"
    said = begun.verdict().source
    assert (said is not None) == is_named
    assert said is None or said.startswith("web: 100 % of the wait after the start, with 50 % of the samples")


# ----------------------------------------------------------------------------------------------------- real loops


class Waiting:
    """Items that come from a store with latency."""

    def __init__(self, each_s: float) -> None:
        self.each_s = each_s

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.each_s:
            time.sleep(self.each_s)
        return {"x": index}


def profiled(executor: str, each_s: tuple[float, ...], rng: random.Random) -> Report:
    """Of a loop over sources with equal weights, in an order drawn at random."""
    names = dict(zip(NAMES, each_s, strict=False))
    order = rng.sample(sorted(names), len(names))
    sources = {name: Pipeline.dataset(Waiting(names[name]), thread_safe=True) for name in order}
    overrides = {"prefetch.executor": executor, "prefetch.concurrency": 2}
    with loaderkit.build(Pipeline.mix(sources).read().batch(8), overrides=overrides) as loader:
        for _, _ in zip(range(4), loader, strict=False):
            pass
        with loader.profile() as profile:
            for _, _ in zip(range(30), loader, strict=False):
                pass
    found: Report = profile.result
    return found


@pytest.mark.prove
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_slow_source_of_a_real_loop(executor: str, rng: random.Random) -> None:
    report = profiled(executor, (0.01, 0.0, 0.0), rng)
    assert report.verdict.source is not None
    assert report.verdict.source.startswith("web: ")
    rows = {row.name: row for row in report.sources}
    assert rows["web"].stall_s > 0.5 * report.stall.total_s
    assert rows["web"].waiting_s > 0.8 * (rows["web"].read_s - rows["web"].delayed_s)


@pytest.mark.prove
def test_sources_that_are_all_slow(rng: random.Random) -> None:
    report = profiled("thread", (0.004, 0.004), rng)
    assert report.stall.percent > 50
    assert report.verdict.source is None


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_report_shows_the_source(executor: str, rng: random.Random) -> None:
    """One that is slow, or none."""
    found = profiled(executor, (0.001, 0.0, 0.0), rng)
    assert {row.name for row in found.sources} == set(NAMES[:3])
    for source in (None, "web: 93 % of the wait"):
        report = found.model_copy(update={"verdict": found.verdict.model_copy(update={"source": source})})
        assert source is None or source in " ".join(to_text(report).split())
        assert ("<dt>Source</dt>" in to_html(report)) == (source is not None)
        assert Report.from_json(report.to_json()) == report
