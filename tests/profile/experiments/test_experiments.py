"""Experiments: how much they run at least and at most, and what their rates say."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_accounts import row
from made_accounts import stats as made_stats

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.changes import num_processes
from loaderkit.diagnosis.stats import Stats
from loaderkit.errors import ConfigError
from loaderkit.profile.experiments import search
from loaderkit.profile.experiments.headroom import Subset, conclude, measure_headroom
from loaderkit.profile.experiments.interleave import LEAST_BATCHES, Variant, interleave
from loaderkit.profile.experiments.loops import sleep_step
from loaderkit.profile.experiments.search import tune
from loaderkit.profile.render.summary import as_text
from loaderkit.profile.render.terminal import headroom_table
from loaderkit.profile.report_parts import Rate
from loaderkit.profile.settings_patch import settings_for, value_of


class Slow:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(0.02)  # what is slow about it
        return {"x": index}


def test_the_times_of_a_step_vary_and_are_the_same_in_every_run() -> None:
    runs: list[list[float]] = [[], []]
    for run in runs:
        step = sleep_step(0.1, 0.05, run.append)
        for _ in range(2000):
            step(None)
    assert runs[0] == runs[1]
    assert statistics.fmean(runs[0]) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(runs[0]) == pytest.approx(0.05, rel=0.1)
    assert min(runs[0]) > 0
    always: list[float] = []
    sleep_step(0.1, sleep=always.append)(None)
    sleep_step(0.0, sleep=always.append)(None)
    assert always == [0.1]


def test_slow_batches_are_compared_in_three_rounds() -> None:
    pipeline = Pipeline.dataset(Slow()).read().batch(1)
    taken: list[Any] = []
    inline = {"prefetch.executor": "inline"}
    with loaderkit.build(pipeline, overrides=inline) as one, loaderkit.build(pipeline, overrides=inline) as other:
        variants = [Variant(one, taken.append), Variant(other, taken.append)]
        interleave(variants, rounds=6, window_s=1e-3)
        assert [len(variant.windows) for variant in variants] == [3, 3]
        assert one.stats().num_batches + other.stats().num_batches == LEAST_BATCHES


@pytest.mark.parametrize(
    "prefetch", [{}, {"concurrency": 1}, {"batches": "auto"}, {"executor": "inline"}, {"concurrency": 3, "batches": 1}]
)
def test_tune_compares_with_the_file_last(prefetch: dict[str, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "records.npy", np.arange(8000).reshape(2000, 4))
    pipeline = Pipeline.array(str(tmp_path / "records.npy")).read().batch(16).prefetch(**prefetch)
    made: list[dict[str, Any]] = []

    def make(overrides: Mapping[str, Any], slowdown: Any) -> loaderkit.Loader:
        made.append(dict(overrides))
        if overrides.get("prefetch.executor") == "process":
            raise ConfigError("what cannot be tried is passed over")
        return loaderkit.build(pipeline, overrides=overrides)

    tuned = tune(make, lambda batch: None, pipeline.config, seconds=0.5)
    assert made[-2] == {}
    found = {one.key: one.value for one in tuned.found}
    assert found.items() <= made[-1].items()
    assert {one.key: one.before for one in tuned.found} == {key: value_of(pipeline.config, key) for key in found}
    assert bool(tuned.settings) == (tuned.outcome == "sure")
    assert bool(tuned.offered) == (tuned.outcome == "likely")
    assert tuned.num_pairs >= 3
    assert len({repr(trial.settings) for trial in tuned.trials}) == len(tuned.trials)
    assert not any(trial.kept for trial in tuned.trials if trial.speedup is None)


class LateStart:
    """A loader whose start took hours, and a batch 0.1 ms."""

    def __init__(self, loader: loaderkit.Loader) -> None:
        self.loader = loader
        self.set_epoch = loader.set_epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def stats(self) -> Stats:
        stats = self.loader.stats()
        return replace(stats, wall_s=1e4 + stats.num_batches * 1e-4, waits_s={**stats.waits_s, "start": 1e4})


def test_tune_has_time_for_trials_after_a_long_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 4e-3))  # on any machine
    pipeline = Pipeline.dataset(list(range(64))).read().batch(4)

    @contextlib.contextmanager
    def make(overrides: Mapping[str, Any], slowdown: Any) -> Iterator[LateStart]:
        if overrides.get("prefetch.executor") == "process":
            raise ConfigError("it would take long to start, too")
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            yield LateStart(loader)

    assert tune(make, lambda batch: None, pipeline.config, seconds=0.5).trials


class IteratesAllTheTime(LateStart):
    """A loader of an iterable that takes all the time."""

    def stats(self) -> Stats:
        stats = self.loader.stats()
        read, *others = stats.stages
        read = replace(read, in_turn=True, busy_s=stats.wall_s)
        return replace(stats, stages=[read, *others], waits_s={"read": 0.9 * stats.wall_s})


def test_tune_tries_no_more_workers_where_one_at_a_time_iterates() -> None:
    pipeline = Pipeline.dataset(list(range(64))).read().batch(4).prefetch(concurrency=2, batches=4)
    made: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def make(overrides: Mapping[str, Any], slowdown: Any) -> Iterator[IteratesAllTheTime]:
        made.append(dict(overrides))
        if overrides.get("prefetch.executor") == "process":
            raise ConfigError("it would take long to start")
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            yield IteratesAllTheTime(loader)

    assert tune(make, lambda batch: None, pipeline.config, seconds=0.5).trials
    tried = [one for one in made if one.get("prefetch.concurrency") != "auto"]
    assert all(one.get("prefetch.concurrency", 2) <= 2 and one.get("prefetch.processes", 1) == 1 for one in tried)


class AllAtOnce:
    """A loader whose first batch comes when the whole epoch is there, as it does where the loop is late."""

    def __init__(self, loader: loaderkit.Loader) -> None:
        self.loader = loader
        self.stats = loader.stats
        self.set_epoch = loader.set_epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.loader])


def test_an_epoch_that_is_there_with_its_first_batch_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderkit.profile.experiments.headroom._MOST_UNSURE", math.inf)  # of passes that short
    pipeline = Pipeline.dataset(list(range(3))).read().batch(1).prefetch(batches=4, concurrency=1)
    with loaderkit.build(pipeline) as loader:
        found = measure_headroom(
            lambda _overrides, _slowdown: contextlib.nullcontext(AllAtOnce(loader)),
            None,
            Subset(3, None),
            cold=False,
            seconds=1e-3,
        )
    assert found.warm is not None
    assert found.warm.samples_per_s > 0
    assert "whatever is read ahead" not in found.summary


def rate(samples_per_s: float, interval_percent: float) -> Rate:
    return Rate(samples_per_s=samples_per_s, interval_percent=interval_percent, seconds=1.0, num_batches=8)


@pytest.mark.parametrize(
    ("warm", "cold", "said"),
    [
        (rate(200, 10), None, "the pipeline makes 2.00 times what training takes: training need never wait"),
        (rate(50, 10), None, "0.50 times what training takes: training waits 50 % of the time"),
        (rate(80, 45), None, "0.80 times what training takes, +- 45 %: too noisy to say"),
        (rate(105, 40), None, "1.05 times what training takes, +- 40 %: too noisy to say"),
        (rate(200, 1), rate(50, 1), "with cold data the pipeline makes 0.50 times"),
    ],
)
def test_what_rates_say(warm: Rate, cold: Rate | None, said: str) -> None:
    assert said in conclude(rate(100, 1), warm, cold, "").summary


def test_a_rate_that_was_not_measured_well_enough_is_unknown(rng: random.Random) -> None:
    """Neither of these is printed as a fact: 77.5 samples/s +- 538 %, nor less than the loop had just taken."""
    for _ in range(50):
        good = rate(rng.uniform(10, 1000), rng.uniform(0, 45))
        wild = rate(rng.uniform(10, 1000), rng.uniform(51, 900))
        assert conclude(None, good, None, "").warm == good
        assert conclude(good, good, None, "").unknown == []
        for found in (
            conclude(good, wild, None, ""),
            conclude(good, good, None, "", least_per_s=rng.uniform(1.2, 9) * good.samples_per_s),
        ):
            assert (found.warm, found.factor, found.consumer) == (None, None, good)
            assert found.summary.startswith("data warm: unknown")
        found = conclude(wild, good, wild, "")
        assert (found.consumer, found.cold, found.factor, found.fetch_percent) == (None, None, None, None)
        assert len(found.unknown) == 2
        text = as_text(headroom_table(found))
        assert "unknown" in text
        assert f"{wild.interval_percent:.0f} %" not in text


class TestProcesses:
    @pytest.mark.parametrize(
        ("cpus", "ranks", "expected"), [(2, "1", 2), (64, "1", 8), (64, "16", 4), (1, "1", 2), (6, "x", 6)]
    )
    def test_as_many_as_cpus_of_this_rank(
        self, cpus: int, ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("loaderkit._internal.system.cgroups.num_cpus", lambda: cpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert num_processes(2**31, 2**20) == expected

    def test_the_memory_they_share_holds_two_batches_of_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loaderkit._internal.system.cgroups.num_cpus", lambda: 64)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        seen = made_stats({"call": 9.0}, [row("call", 19, 9.2)], memory=(512 * 2**20, 64 * 2**20))
        verdict, config = seen.verdict(), Pipeline.dataset(Slow()).read().batch(4).config
        assert verdict.kind == "gil"
        assert {one.key: one.value for one in verdict.settings} == {
            "prefetch.executor": "process",
            "prefetch.processes": 4,
        }
        assert {one.key: one.value for one in settings_for(verdict, seen, config)} == {
            "prefetch.executor": "process",
            "prefetch.processes": 4,
            "prefetch.batches": 8,
        }
        little = made_stats({"call": 9.0}, [row("call", 19, 9.2)], memory=(512 * 2**20, 256 * 2**20))
        assert little.verdict().settings == ()
