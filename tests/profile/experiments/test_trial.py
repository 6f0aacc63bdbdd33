"""Trials of a verdict's settings: what is written afterwards, on loaders whose time is made up."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from made_accounts import row as made_row
from made_accounts import stats as made_stats

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Cause, Setting
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.parsing import parse
from loaderkit.profile.experiments.decide import PairedGains
from loaderkit.profile.experiments.interleave import Clock, RateWindow
from loaderkit.profile.experiments.trial import (
    PlannedTrial,
    outcome_of,
    plan_trial,
    run_trial,
    tried,
    untried,
    weighed,
    with_trial,
)
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Rate, SettingsTrial
from loaderkit.profile.whatif.predict import steady_rate
from profiles.reports import FOLDER

DATABASE = Report.from_json((FOLDER / "database.json").read_text())
WORKERS, BATCH = 2, 8


class MadeUpTime:
    """A clock that loaders advance."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = Clock(lambda: self.now_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class MadeUpLoader:
    """A loader that takes as long for a batch as `batch_s` says, and does nothing while it pauses."""

    def __init__(self, time: MadeUpTime, batch_s: Callable[[], float], most: int = 10**9) -> None:
        self._time, self._batch_s, self._left = time, batch_s, most
        self._num, self._waited_s = 0, 0.0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        for _ in range(min(len(self), self._left)):
            seconds = self._batch_s()
            self._time.now_s += seconds
            self._num, self._waited_s, self._left = self._num + 1, self._waited_s + seconds, self._left - 1
            yield self._num

    def set_epoch(self, epoch: int) -> None:
        pass

    def stats(self) -> Stats:
        found = made_stats({"read": self._waited_s}, [made_row("read", self._waited_s)], batches=self._num)
        return replace(found, num_samples=BATCH * self._num)


def report_of(kind: str, settings: Mapping[str, Any], or_kind: str | None = None) -> Report:
    """A report of rows of a table, each asked of a database, whose verdict is of that kind."""
    given = [Setting(key=key, before=WORKERS, value=value) for key, value in settings.items()]
    causes = [
        Cause(
            stage="read",
            kind=one,
            percent=70.0,
            confidence=0.5,
            change=f"what {one} needs",
            settings=given if one == kind else [],
        )
        for one in (kind, or_kind)
        if one is not None
    ]
    update = {"kind": kind, "or_kind": or_kind, "settings": given if or_kind is None else [], "causes": causes}
    update["change"] = f"what {kind} needs"
    return DATABASE.model_copy(update={"verdict": DATABASE.verdict.model_copy(update=update)})


def config_of(**prefetch: Any) -> PipelineConfig:
    return parse({**DATABASE.config, "prefetch": {"concurrency": WORKERS, "batches": 4, **prefetch}})


def makes(
    time: MadeUpTime, rng: random.Random, batch_s: Callable[[Mapping[str, Any]], float], noise: float = 0.1
) -> Callable[[Mapping[str, Any], Any], Any]:
    """Makes loaders that take `batch_s` of their overrides for a batch; each window is off by chance, now and then far."""

    def make(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        def drawn_s() -> float:
            disturbed = 3.0 if rng.random() < 0.02 else 1.0
            return batch_s(overrides) * disturbed * rng.lognormvariate(0.0, noise)

        return contextlib.nullcontext(MadeUpLoader(time, drawn_s))

    return make


def after_trial(report: Report, time: MadeUpTime, make: Any) -> Report:
    planned = plan_trial(report, config_of())
    assert planned is not None
    return with_trial(report, run_trial(make, lambda batch: None, planned, seconds=30.0, clock=time.clock))


KINDS: list[tuple[str, str | None]] = [("latency", None), ("lock", None), ("waiting", None), ("lock", "latency")]


@pytest.mark.parametrize("truth", ["latency", "lock"])
def test_more_workers_tell_a_lock_from_latency(truth: str, rng: random.Random) -> None:
    """Of items that wait, all at once or one after the other; a lock that more threads want is a little slower. Whatever the
    accounts took it for; what stays open is said to be."""
    told = []
    for kind, or_kind in 5 * KINDS:
        each_s, time = rng.uniform(2e-3, 0.05), MadeUpTime()
        asked = {"prefetch.concurrency": rng.choice([4, 6, 8])} if kind == "latency" else {}

        def batch_s(overrides: Mapping[str, Any], each_s: float = each_s) -> float:
            workers = int(overrides.get("prefetch.concurrency", WORKERS))
            return BATCH * each_s / workers if truth == "latency" else BATCH * each_s * (1 + 0.02 * workers)

        seen = report_of(kind, asked, or_kind)
        found = after_trial(seen, time, makes(time, rng, batch_s))
        assert_consistent(seen, found)
        verdict = found.verdict
        assert truth in {verdict.kind, verdict.or_kind}
        assert bool(verdict.settings) == (truth == "latency")
        told.append((verdict.kind, verdict.or_kind) == (truth, None))
    assert sum(told) >= 0.8 * len(told)  # the rest is said to be open


def assert_consistent(seen: Report, found: Report) -> None:
    """What a report says after a trial is one thing everywhere in it."""
    verdict, trial = found.verdict, found.verdict.tried
    assert trial is not None
    assert trial.before is not None
    assert trial.after is not None
    assert trial.seconds <= 45
    assert verdict.causes[0].kind == verdict.kind
    assert verdict.causes[0].settings == verdict.settings
    assert len(verdict.causes) == 1 + (verdict.or_kind is not None)
    if not verdict.settings:
        assert found.patch is None
        assert "loader.resize" not in verdict.change
        return
    assert {one.key for one in verdict.settings} == {"prefetch.concurrency"}
    assert {one.tried for one in verdict.settings} == {str(trial)}
    assert found.patch is not None
    assert found.patch.startswith("# tried: ")
    ratio = trial.after.samples_per_s / trial.before.samples_per_s
    assert ratio == pytest.approx(verdict.settings[0].value / WORKERS, rel=0.3)
    assert seen.verdict.settings in ([], [one.model_copy(update={"tried": ""}) for one in verdict.settings])


def windows_of(speeds: list[float], rng: random.Random) -> list[RateWindow]:
    return [RateWindow(round(1e6 * speed * rng.lognormvariate(0.0, 0.1)), 1.0, 1.0, 8) for speed in speeds]


@pytest.mark.parametrize(("factor", "most_written"), [(0.87, 0.02), (0.75, 0.01)])
def test_what_is_slower_is_hardly_ever_written(factor: float, most_written: float, rng: random.Random) -> None:
    """A look after each pair, as a trial does, and trials that end after three pairs since batches are slow."""
    num_written = 0
    for _ in range(1000):
        most = rng.choice([3, 5, 12, 25])
        new: list[RateWindow] = []
        old: list[RateWindow] = []
        while len(new) < most and (len(new) < 3 or not PairedGains.of(new, old).is_clear()):
            new += windows_of([factor], rng)
            old += windows_of([1.0], rng)
        num_written += outcome_of(PairedGains.of(new, old)) in ("faster", "likely faster")
    assert num_written <= 1000 * most_written


def test_what_brings_much_is_written_also_where_three_pairs_are_all_there_is(rng: random.Random) -> None:
    found = [
        outcome_of(PairedGains.of(windows_of([rng.uniform(1.6, 4.0)] * 3, rng), windows_of([1.0] * 3, rng)))
        for _ in range(300)
    ]
    assert found.count("likely faster") >= 290


@pytest.mark.parametrize(("factor", "most_written"), [(0.9, 0.15), (0.8, 0.08)])
def test_what_is_slower_is_seldom_written_where_loaders_differ(
    factor: float, most_written: float, rng: random.Random
) -> None:
    """Loaders of one pipeline whose speed differs by a seventh. By one pair alone 26 and 13 % would be written."""
    num_written = sum(trial_between(factor, 0.15, rng)[0].is_suggested for _ in range(300))
    assert num_written <= 300 * most_written


@pytest.mark.parametrize(("factor", "num_loaders"), [(1.2, 4), (1.35, 4), (2.0, 2), (0.8, 2)])
def test_small_gains_are_shown_by_two_pairs_of_loaders(factor: float, num_loaders: int, rng: random.Random) -> None:
    found = [trial_between(factor, 0.0, rng) for _ in range(50)]
    assert sum(trial.is_suggested == (factor > 1) for trial, _ in found) >= 48
    assert sum(made == num_loaders for _, made in found) >= 48
    assert all((trial.speedup_again is None) == (made == 2) for trial, made in found)
    assert all(trial.seconds <= 35 for trial, _ in found)


def test_a_gain_that_a_second_pair_does_not_show_is_not_suggested(rng: random.Random) -> None:
    """Nor does it tell a lock from latency."""
    factor = rng.uniform(0.7, 0.95)
    found = in_four_loaders("latency", [0.025, 0.02, 0.025, 0.025 / factor], rng)
    verdict, trial = found.verdict, found.verdict.tried
    assert (found.patch, verdict.settings, verdict.kind, verdict.or_kind) == (None, [], "latency", "lock")
    assert trial is not None
    assert trial.speedup == pytest.approx(1.25, rel=0.05)
    assert trial.speedup_again == pytest.approx(factor, rel=0.05)
    second = f"; with a second pair of loaders {trial.speedup_again:.2f} times: no faster for sure: not suggested"
    assert str(trial).endswith(second)


def test_a_second_pair_that_cannot_run_says_nothing(rng: random.Random) -> None:
    for error in (ConfigError("the folder is gone"), StopIteration()):
        found = in_four_loaders("gil", [0.025, 0.02, error, 0.02], rng)
        assert found.verdict.settings
        assert found.verdict.tried is not None
        assert (found.verdict.tried.outcome, found.verdict.tried.speedup_again) == ("faster", None)
    failed = in_four_loaders("gil", [0.025, 0.02, 0.025, ConfigError("no more processes")], rng)
    assert (failed.patch, failed.verdict.settings) == (None, [])
    assert "no more processes" in str(failed.verdict.tried)


def test_what_waits_for_data_has_no_second_pair(rng: random.Random) -> None:
    """It would find in memory what the first pair has read."""
    planned = plan_trial(report_of("latency", {"prefetch.concurrency": 8}), config_of())
    assert planned is not None
    assert planned.reads
    trial, made = trial_between(1.2, 0.0, rng, reads=True)
    assert (trial.is_suggested, trial.speedup_again, made) == (True, None, 2)


def in_four_loaders(kind: str, batches: list[float | Exception], rng: random.Random) -> Report:
    """The report after a trial of loaders that take so long for a batch, in the order in which they are made; an error is
    raised by the first batch."""
    time, left = MadeUpTime(), iter(batches)

    def make(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        each = next(left)

        def batch_s() -> float:
            if isinstance(each, StopIteration):
                return 0.0
            if isinstance(each, Exception):
                raise each
            return each * rng.lognormvariate(0.0, 0.05)

        most = 0 if isinstance(each, StopIteration) else 10**9
        return contextlib.nullcontext(MadeUpLoader(time, batch_s, most))

    report = report_of(kind, {"prefetch.concurrency": 4})
    planned = PlannedTrial(report.verdict.settings, None, reads=False)
    return with_trial(report, run_trial(make, lambda batch: None, planned, seconds=30.0, clock=time.clock))


def trial_between(
    factor: float, spread: float, rng: random.Random, *, reads: bool = False
) -> tuple[SettingsTrial, int]:
    """A trial of settings `factor` times as fast, on loaders that differ by `spread`, and how many were made."""
    time, made = MadeUpTime(), 0

    def make(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        nonlocal made
        made += 1
        batch_s = 0.02 * rng.lognormvariate(0.0, spread) / (factor if overrides else 1.0)
        return contextlib.nullcontext(MadeUpLoader(time, lambda: batch_s * rng.lognormvariate(0.0, 0.05)))

    settings = report_of("gil", {"prefetch.processes": 4}).verdict.settings
    planned = PlannedTrial(settings, None, reads)
    return run_trial(make, lambda batch: None, planned, seconds=30.0, clock=time.clock), made


def test_settings_that_are_slower_or_cannot_run_are_no_patch(rng: random.Random) -> None:
    report, time = report_of("gil", {"prefetch.processes": 4}), MadeUpTime()
    slower = after_trial(report, time, makes(time, rng, lambda overrides: 0.02 if overrides else 0.015))
    assert (slower.patch, slower.verdict.settings, slower.verdict.causes[0].settings) == (None, [], [])
    assert slower.verdict.tried is not None
    assert slower.verdict.tried.outcome == "slower"
    assert str(slower.verdict.tried).endswith("not suggested")
    assert slower.verdict.change != report.verdict.change

    def make(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        if overrides:
            raise ConfigError("a lock cannot be sent to a process")
        return contextlib.nullcontext(MadeUpLoader(time, lambda: 0.01))

    failed = after_trial(report, time, make)
    assert (failed.patch, failed.verdict.settings) == (None, [])
    assert "a lock cannot be sent" in str(failed.verdict.tried)


def test_why_settings_are_not_tried(rng: random.Random) -> None:
    """They stay, and the report says why, with the simulated figure."""
    settings = {"prefetch.concurrency": 8}
    report, time = report_of("latency", settings), MadeUpTime()

    def never(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        raise AssertionError("nothing is to run")

    slow = report.model_copy(update={"wall_s": 3.0 * report.num_batches})
    ray = report.model_copy(update={"tuning": {**report.tuning, "executor": "ray"}})
    rank = report.model_copy(update={"world_size": 4, "rank": 2})
    for seen, why in ((slow, "a batch takes 3 s"), (ray, "the cluster"), (rank, "rank 2")):
        found = tried(never, lambda batch: None, seen, config_of(), seconds=30.0).verdict
        assert found.tried is not None
        assert found.tried.outcome == "not tried"
        assert why in str(found.tried)
        assert {one.key: one.value for one in found.settings} == settings
    assert "by simulation" in str(untried(report, "why").verdict.tried)

    once = contextlib.nullcontext(MadeUpLoader(time, lambda: 0.01, most=30))
    ended = after_trial(report, time, lambda overrides, slowdown: once)
    assert "no more batches" in str(ended.verdict.tried)
    assert ended.verdict.settings


def test_the_pipeline_as_it_is_may_fail_meanwhile(rng: random.Random) -> None:
    """That says nothing of the settings, which stay."""
    report, time = report_of("latency", {"prefetch.concurrency": 8}), MadeUpTime()
    left = rng.randrange(3, 40)

    def batch_s() -> float:
        nonlocal left
        left -= 1
        if left < 0:
            raise ConfigError("a damaged sample")
        return 0.01

    def make(overrides: Mapping[str, Any], slowdown: Any) -> Any:
        return contextlib.nullcontext(MadeUpLoader(time, (lambda: 0.01) if overrides else batch_s))

    found = after_trial(report, time, make)
    assert found.verdict.settings
    assert "as it is failed meanwhile: a damaged sample" in str(found.verdict.tried)


def test_a_trial_from_memory_tells_nothing(rng: random.Random) -> None:
    report = report_of("latency", {"prefetch.concurrency": 8})
    run_per_s = steady_rate(report)
    for factor in (rng.uniform(0.7, 1.4), rng.uniform(1.6, 50)):
        rates = [
            Rate(samples_per_s=one, interval_percent=4.0, seconds=4.0, num_batches=40)
            for one in (factor * run_per_s, 0.99 * factor * run_per_s)
        ]
        trial = SettingsTrial(
            settings=report.verdict.settings, outcome="no faster", before=rates[0], after=rates[1], speedup=0.99, interval=0.1,
            is_held_up=True,
        )  # fmt: skip
        found = weighed(report, trial).verdict
        assert found.tried is not None
        assert (found.tried.outcome, bool(found.settings), found.kind) == (
            ("not tried", True, "latency") if factor > 1.5 else ("no faster", False, "lock")
        )


def test_what_computes_is_not_faster_from_memory(rng: random.Random) -> None:
    """Nor what hardly waits for data."""
    report = report_of("depth", {"prefetch.batches": 8})
    busy_s = rng.uniform(1, 5)
    row = report.stages[0].model_copy(
        update={"name": "call", "kind": "call", "pool": 9, "busy_s": busy_s, "io_s": 0.3 * busy_s}
    )
    verdict = report.verdict.model_copy(update={"stage": "call"})
    report = report.model_copy(update={"verdict": verdict, "stages": [*report.stages, row]})
    rate = Rate(
        samples_per_s=rng.uniform(1.6, 50) * steady_rate(report), interval_percent=4.0, seconds=4.0, num_batches=40
    )
    trial = SettingsTrial(
        settings=verdict.settings, outcome="slower", before=rate, after=rate, speedup=0.7, interval=0.1
    )
    assert weighed(report, trial).verdict.settings == []
    waits = row.model_copy(update={"name": "read", "io_s": 0.4 * busy_s, "busy_s": 0.0})
    shared = report.model_copy(update={"stages": [row, waits]})  # by the same workers
    assert weighed(shared, trial).verdict.settings


@pytest.mark.parametrize(("kind", "other"), [("computing", "latency"), ("latency", "gil"), ("lock", "computing")])
def test_what_more_workers_do_not_tell_apart_stays_open(kind: str, other: str, rng: random.Random) -> None:
    report = report_of(kind, {"prefetch.concurrency": 8}, other)
    for outcome, is_held_up in (("faster", False), ("no faster", True)):
        rates = [
            Rate(samples_per_s=one, interval_percent=4.0, seconds=4.0, num_batches=40)
            for one in (50.0, rng.uniform(50, 200))
        ]
        trial = SettingsTrial(
            settings=report_of(kind, {"prefetch.concurrency": 8}).verdict.settings, outcome=outcome, before=rates[0],
            after=rates[1], speedup=2.0, interval=0.1, is_held_up=is_held_up,
        )  # fmt: skip
        found = with_trial(report, trial).verdict
        assert {found.kind, found.or_kind} == {kind, other}


def test_where_there_is_nothing_to_try_nothing_runs() -> None:
    for kind in ("computing", "oversubscription", "bandwidth"):
        assert plan_trial(report_of(kind, {}), config_of()) is None
    training = DATABASE.model_copy(
        update={"verdict": DATABASE.verdict.model_copy(update={"stage": None, "kind": "training", "settings": []})}
    )
    assert plan_trial(training, config_of()) is None


def test_a_trial_in_words_and_back() -> None:
    trial = SettingsTrial(settings=[], outcome="not tried", note="it trains", predicted=1.84, predicted_percent=12.0)
    assert str(trial) == "not tried: it trains; by simulation 1.84 times as fast (+- 12 %)"
    report = untried(report_of("latency", {"prefetch.concurrency": 8}), "it trains")
    again = Report.from_json(report.to_json())
    assert again.verdict == report.verdict
    assert again.summary == report.summary
    assert "it trains" in report.summary
