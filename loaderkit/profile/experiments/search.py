"""`loaderkit tune`: tries settings, keeps what is better, and compares them with the file as it is.

the tuner, while the loop runs          workers and batches ahead          30 % of the time
then one change after the other         the verdict's, executors, sizes    30 %, interleaved with the best so far
then the best settings                  against the file as it is          40 %, interleaved, until it is clear

A change is kept on little evidence: the last comparison is made anew, and decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import Field

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.diagnosis.changes import num_processes
from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Part, Setting
from loaderkit.engine.autotune.tuned_setting import LADDER
from loaderkit.engine.metrics.stalls import START
from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.decide import MOST_WRONG, Outcome, PairedGains, num_won
from loaderkit.profile.experiments.interleave import LEAST_BATCHES, Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step, endless, run_steps
from loaderkit.profile.report_parts import Rate
from loaderkit.profile.settings_patch import (
    file_setting,
    is_accepted,
    value_of,
    verdict_part,
)

_SEARCH, _REFINE, _COMPARE = 0.3, 0.3, 0.4
_TRIAL_S, _LEAST_TRIALS = 4.0, 5  # s for a change against the best so far; less where so many would not fit
_TRIAL_WINDOWS, _NUM_WINDOWS = 12, 40  # for which the time is enough, with draining in between
_TRIAL_WRONG = 0.5  # of changes that are no better, the share that may be kept: three won pairs in a row are enough
_SLICE_S = 2.0  # of the tuner's run
_NUM_SETTLED = 2  # slices in a row after which it is done

Overrides = dict[str, Any]
Pair = tuple[Variant, Variant]


class TuneTrial(Part):
    """A change that was compared with the best settings so far, in interleaved windows."""

    settings: dict[str, Any]
    speedup: float | None = Field(description="null: it could not run")
    interval: float | None = Field(description="half the width of its 95 % interval")
    kept: bool
    note: str = ""


class Tuned(Part):
    """The result of a search."""

    settings: list[Setting] = Field(description="empty: nothing was found that is better than the file for sure")
    offered: list[Setting] = Field(
        [], description="settings that are better, but not for sure; empty if there are `settings`"
    )
    before: Rate
    after: Rate
    stall_before_percent: float
    stall_after_percent: float
    speedup: float = Field(description="the median of neighbouring windows")
    interval: float = Field(description="half the width of its 95 % interval")
    outcome: Outcome = Field("sure", description="of what was tried last against the file: sure, likely or no better")
    num_pairs: int = Field(0, description="of neighbouring windows")
    num_faster: int = Field(0, description="pairs in which the settings were faster than the file")
    num_waiting_less: int = Field(0, description="pairs in which the loop waited less with them")
    decisions: list[dict[str, Any]] = Field(description="of the tuner")
    trials: list[TuneTrial]
    seconds: float

    @property
    def found(self) -> list[Setting]:
        """What is better, for sure or not."""
        return self.settings or self.offered


def tune(
    make: Make, step: Step, config: PipelineConfig, *, seconds: float, say: Callable[[str], object] = lambda text: None
) -> Tuned:
    """Search for about `seconds`; longer only if that is less time than some thirty batches take."""
    begin_s = time.perf_counter()
    search = _Search(make, step, config)
    stats = search.run_tuner(seconds * _SEARCH)
    say(f"the tuner came to {_say(search.sizes)}")
    trial_s = min(_TRIAL_S, seconds * _REFINE / _LEAST_TRIALS)
    making_s = stats.wall_s - stats.stall_s.get(START, 0.0)
    least_s = LEAST_BATCHES * making_s / max(stats.num_batches, 1)  # for any comparison of two loaders
    # Where the tuner's loader took long to start, trials have their time nevertheless; not where batches are slow.
    until_s = max(begin_s + seconds * _SEARCH, time.perf_counter()) + min(
        seconds * _REFINE, seconds * (1 - _SEARCH) - least_s
    )
    processes = num_processes(config.prefetch.memory, int(stats.memory.get("batch_bytes", 0)))
    trials: list[TuneTrial] = []
    while time.perf_counter() + max(trial_s, least_s) <= until_s and (change := search.next_change(processes)):
        trials.append(search.try_change(change, trial_s))
        if trials[-1].kept:
            say(f"{_say(change)}: {100 * ((trials[-1].speedup or 1) - 1):+.0f} %")
    best = search.best
    if not best:  # then the most promising change is looked at for longer
        first = max(trials, key=lambda trial: trial.speedup or 0.0, default=None)
        best = search.sizes if first is None else first.settings if (first.speedup or 0.0) > 1.0 else {}
    left_s = max(begin_s + seconds - time.perf_counter(), seconds * _COMPARE)  # trials may take longer than planned
    left_s = left_s if best else trial_s
    old, new = search.interleaved({}, best, left_s, _NUM_WINDOWS, MOST_WRONG)
    comparison = PairedGains.of(new.windows, old.windows)
    settings = [file_setting(config, key, value) for key, value in best.items()]
    settings = [one for one in settings if one.before != one.value]
    outcome = comparison.outcome() if settings else "no better"
    speedup, interval = ratio_of(new, old)
    return Tuned(
        settings=settings if outcome == "sure" else [],
        offered=settings if outcome == "likely" else [],
        before=old.rate,
        after=new.rate,
        stall_before_percent=old.stall_percent,
        stall_after_percent=new.stall_percent,
        speedup=speedup,
        interval=interval,
        outcome=outcome,
        num_pairs=len(comparison.speed),
        num_faster=num_won(comparison.speed),
        num_waiting_less=num_won(comparison.waiting),
        decisions=[*map(dict, stats.tuning.decisions)],
        trials=trials,
        seconds=time.perf_counter() - begin_s,
    )


class _Search:
    """What was found so far."""

    def __init__(self, make: Make, step: Step, config: PipelineConfig) -> None:
        self._make, self._step, self._config = make, step, config
        self.best: Overrides = {}
        self.sizes: Overrides = {}  # the tuner's
        self._suggested: Overrides = {}  # by the verdict on the tuner's run
        self._tried: list[Overrides] = []
        self._is_in_turn = False  # an iterable is the limit, which one worker at a time iterates over

    def run_tuner(self, seconds: float) -> Stats:
        """Let the tuner find sizes while the loop runs; the stats of that run."""
        given: Overrides = {"prefetch.concurrency": "auto", "prefetch.batches": "auto"}
        if self._config.prefetch.executor == "inline":
            given["prefetch.executor"] = self._config.executor_with_workers
        with self._make(given, None) as loader:
            batches, looks, num_settled = endless(loader), [loader.stats()], 0
            run_steps(batches, self._step, num_steps=1)  # starting up is no part of it
            until_s = time.perf_counter() + seconds
            while num_settled < _NUM_SETTLED and (left_s := until_s - time.perf_counter()) > 0:
                run_steps(batches, self._step, seconds=min(_SLICE_S, left_s))
                looks.append(loader.stats())
                num_settled = num_settled + 1 if looks[-1].tuning.settled else 0
        tuning = looks[-1].tuning
        workers = sum(pool.workers for pool in tuning.pools if not pool.is_trainers)
        self.sizes = {**given, "prefetch.concurrency": workers, "prefetch.batches": tuning.batches}
        if self._config.prefetch.processes == "auto":
            self.sizes["prefetch.processes"] = tuning.processes or 1
        passed = looks[-1].since(looks[len(looks) // 2 - 1])
        verdict = verdict_part(passed, self._config)
        self._is_in_turn = passed.full_turn is not None
        self._suggested = {setting.key: setting.value for setting in verdict.settings}
        return looks[-1]

    def next_change(self, processes: int) -> Overrides | None:
        """The next change of the best settings so far, or None if all were tried. `processes`: how many processes may
        load."""
        for change in self._changes(processes):
            new = {key: value for key, value in change.items() if self._value(key) != value}
            if new and new not in self._tried and not self._is_in_vain(new):
                self._tried += [new, {key: self._value(key) for key in new}]  # and the way back
                if is_accepted(self._config, {**self.best, **new}):
                    return new
        return None

    def _is_in_vain(self, new: Overrides) -> bool:
        """True for more workers or processes where a single one does all that is possible."""
        of_workers = [key for key in new if key.endswith((".concurrency", ".processes", ".workers"))]
        return self._is_in_turn and any(new[key] > self._size(key) for key in of_workers)

    def _changes(self, processes: int) -> Iterator[Overrides]:
        yield self.sizes
        yield self._suggested
        yield {"prefetch.executor": "thread"}
        for stage in self._config.stages:
            if stage.args.workers != "auto":
                key = f"stages.{stage.name}.workers"
                yield from ({key: other} for other in _neighbours(self._value(key)))
        batches, workers = self._size("prefetch.batches"), self._size("prefetch.concurrency")
        several = {"prefetch.processes": processes, "prefetch.batches": max(batches, 2 * processes)}
        is_thread = self._value("prefetch.executor") == "thread"
        yield {"prefetch.executor": "process", **several} if is_thread else several
        yield {"prefetch.batches": 4 * max(batches, self.sizes["prefetch.batches"])}
        if is_thread:
            yield {"prefetch.executor": "process", "prefetch.processes": 1}
            yield {"prefetch.executor": "inline"}
        yield from ({"prefetch.concurrency": other} for other in _neighbours(workers))

    def _value(self, key: str) -> Any:
        value = self.best[key] if key in self.best else value_of(self._config, key)
        return self._config.executor_with_workers if (key, value) == ("prefetch.executor", "auto") else value

    def _size(self, key: str) -> int:
        """The value, or, if that is `auto`, the tuner's value."""
        value = self._value(key)
        return int(self.sizes[key] if value == "auto" else value)

    def try_change(self, change: Overrides, seconds: float) -> TuneTrial:
        """Keep a change that seems to be better."""
        other = {**self.best, **change}
        try:
            old, new = self.interleaved(self.best, other, seconds, _TRIAL_WINDOWS, _TRIAL_WRONG)
        except LoaderkitError as error:  # a function that cannot be sent to a process, say
            return TuneTrial(settings=change, speedup=None, interval=None, kept=False, note=str(error))
        kept = PairedGains.of(new.windows, old.windows).outcome(_TRIAL_WRONG) != "no better"
        if kept:
            self.best = other
        speedup, interval = ratio_of(new, old)
        return TuneTrial(settings=change, speedup=speedup, interval=interval, kept=kept)

    def interleaved(
        self, one: Overrides, other: Overrides, seconds: float, num_windows: int, most_wrong: float
    ) -> Pair:
        """Two variants after windows of 1 / num_windows of the time, until it is clear which is better."""
        with self._make(one, None) as as_is, self._make(other, None) as changed:
            old, new = Variant(as_is, self._step), Variant(changed, self._step)

            def is_clear() -> bool:
                return PairedGains.of(new.windows, old.windows).is_clear(most_wrong)

            interleave([old, new], window_s=seconds / num_windows, most_s=seconds, is_enough=is_clear)
        return old, new


def _neighbours(value: int) -> list[int]:
    """Rungs of the tuner's ladder: the second above, then the next below."""
    return [rung for rung in LADDER if rung > value][1:2] + [rung for rung in LADDER if rung < value][-1:]


def _say(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())


_HEAD = "# Tuned by `loaderkit tune`"


def with_comment(text: str, tuned: Tuned, day: str) -> str:
    """The text of a file with a comment above it that says what was found; an older comment of this kind is removed."""
    lines = text.splitlines(keepends=True)
    if lines and lines[0].startswith(_HEAD):
        del lines[0]
        while lines and lines[0].startswith("#   "):
            del lines[0]
    speed = f"{tuned.before.samples_per_s:.0f} -> {tuned.after.samples_per_s:.0f} samples/s"
    comment = [
        f"{_HEAD} on {day}, with {num_cpus()} CPUs: {speed} ({tuned.speedup:.2f} +- {tuned.interval:.2f} times as fast)\n",
        *(f"#   {one.key}: {one.value} (was {_plain(one.before)})\n" for one in tuned.found),
    ]
    return "".join([*comment, *lines])


def _plain(value: Any) -> str:
    return "not set" if value is None else str(value)
