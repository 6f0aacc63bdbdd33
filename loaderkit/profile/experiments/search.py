"""`loaderkit tune`: tries settings, keeps the fastest, and compares them with the file as it is.

the tuner, while the loop runs          workers and batches ahead          45 % of the time
then one change after the other         executor, processes, neighbours    35 %, interleaved with the best so far
then the best settings                  against the file as it is          20 %, interleaved
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from pydantic import Field

from loaderkit._internal.cgroups import num_cpus
from loaderkit.engine.autotune.tuned_setting import LADDER
from loaderkit.engine.metrics import Stats
from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.experiments.interleave import LEAST_BATCHES, Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step, endless, run_steps
from loaderkit.profile.report_parts import Part, Rate, Setting
from loaderkit.profile.settings_patch import num_processes, value_of

_SEARCH, _REFINE, _COMPARE = 0.45, 0.35, 0.2
_TRIAL_S = 4.0  # at least, for a change against the best so far
_ROUNDS = 4
_GAIN = 1.03  # what a change has to bring

Overrides = dict[str, Any]


class TuneTrial(Part):
    """A change that was tried against the best so far, in interleaved windows."""

    settings: dict[str, Any]
    speedup: float | None = Field(description="null: it could not run")
    interval: float | None = Field(description="half the width of its 95 % interval")
    kept: bool
    note: str = ""


class Tuned(Part):
    """The result of a search."""

    settings: list[Setting] = Field(description="empty: nothing was found that is faster than the file as it is")
    before: Rate
    after: Rate
    stall_before_percent: float
    stall_after_percent: float
    speedup: float
    interval: float = Field(description="half the width of its 95 % interval")
    decisions: list[dict[str, Any]] = Field(description="of the tuner")
    trials: list[TuneTrial]
    seconds: float


def tune(
    make: Make, step: Step, config: PipelineConfig, *, seconds: float, say: Callable[[str], object] = lambda text: None
) -> Tuned:
    """Search for about `seconds`; longer only where that is less than some thirty batches take. Settings that are not
    measurably faster than the file are not proposed."""
    begin_s = time.perf_counter()
    best, stats = _search(make, step, config, seconds * _SEARCH)
    say(f"the tuner came to {_say(best)}")
    trials: list[TuneTrial] = []
    least_s = LEAST_BATCHES * stats.wall_s / max(stats.num_batches, 1)  # for any comparison of two loaders
    until_s = begin_s + min(seconds * (_SEARCH + _REFINE), seconds - least_s)
    for change in _changes(config, best, int(stats.memory.get("batch_bytes", 0))):
        if time.perf_counter() + max(_TRIAL_S, least_s) > until_s:
            break
        trial = _try(make, step, best, {**best, **change}, _TRIAL_S)
        trials.append(trial.model_copy(update={"settings": change}))
        if trial.kept:
            best = {**best, **change}
            say(f"{_say(change)}: {100 * ((trial.speedup or 1) - 1):+.0f} %")
    with ExitStack() as stack:
        old = Variant(stack.enter_context(make({}, None)), step)
        new = Variant(stack.enter_context(make(best, None)), step)
        left_s = begin_s + seconds - time.perf_counter()
        interleave([old, new], rounds=_ROUNDS, window_s=seconds * _COMPARE / (4 * _ROUNDS), most_s=left_s)
    ratio, half = ratio_of(new, old)
    settings = [Setting(key=key, before=value_of(config, key), value=value) for key, value in best.items()]
    return Tuned(
        settings=[one for one in settings if one.before != one.value] if _is_faster(ratio, half) else [],
        before=old.rate,
        after=new.rate,
        stall_before_percent=old.stall_percent,
        stall_after_percent=new.stall_percent,
        speedup=ratio,
        interval=half,
        decisions=[*map(dict, stats.tuning.decisions)],
        trials=trials,
        seconds=time.perf_counter() - begin_s,
    )


def _is_faster(ratio: float, half: float) -> bool:
    return ratio >= _GAIN and ratio - half > 1.0


def _search(make: Make, step: Step, config: PipelineConfig, seconds: float) -> tuple[Overrides, Stats]:
    """The tuner's settings after a run of the loop, and the stats of that run."""
    given: Overrides = {"prefetch.concurrency": "auto", "prefetch.batches": "auto"}
    if config.prefetch.executor == "inline":
        given["prefetch.executor"] = "thread"
    with make(given, None) as loader:
        run_steps(endless(loader), step, seconds=seconds)
        stats = loader.stats()
    sizes = {"prefetch.concurrency": stats.tuning.concurrency, "prefetch.batches": stats.tuning.batches}
    return {**given, **sizes}, stats


def _changes(config: PipelineConfig, best: Mapping[str, Any], batch_bytes: int) -> list[Overrides]:
    """Changes that the tuner does not try: other executors, fixed numbers of workers, and the neighbouring sizes."""
    changes: list[Overrides] = []
    processes = num_processes(config, batch_bytes)
    executor = best.get("prefetch.executor", config.prefetch.executor)
    if executor == "thread":
        changes.append({"prefetch.executor": "process"})
        several = {"prefetch.executor": "process", "prefetch.processes": processes}
        changes.append({**several, "prefetch.batches": max(int(best["prefetch.batches"]), 2 * processes)})
    else:
        changes.append({"prefetch.executor": "thread"})
    workers = int(best["prefetch.concurrency"])
    changes += [{"prefetch.concurrency": other} for other in _neighbours(workers)]
    for stage in config.stages:
        if stage.args.workers != "auto":
            changes += [{f"stages.{stage.name}.workers": other} for other in _neighbours(stage.args.workers)]
    return changes


def _neighbours(value: int) -> list[int]:
    """The next rungs of the tuner's ladder, the higher one first."""
    above = [rung for rung in LADDER if rung > value][:1]
    return above + [rung for rung in LADDER if rung < value][-1:]


def _try(make: Make, step: Step, best: Overrides, other: Overrides, seconds: float) -> TuneTrial:
    try:
        with ExitStack() as stack:
            old = Variant(stack.enter_context(make(best, None)), step)
            new = Variant(stack.enter_context(make(other, None)), step)
            interleave([old, new], rounds=3, window_s=seconds / 12)
    except LoaderkitError as error:  # a function that cannot be sent to a process, say
        return TuneTrial(settings=other, speedup=None, interval=None, kept=False, note=str(error))
    ratio, half = ratio_of(new, old)
    return TuneTrial(settings=other, speedup=ratio, interval=half, kept=_is_faster(ratio, half))


def _say(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())


_HEAD = "# Tuned by `loaderkit tune`"


def with_comment(text: str, tuned: Tuned, day: str) -> str:
    """The text of a file with a comment above it that says what was found; an older such comment goes."""
    lines = text.splitlines(keepends=True)
    if lines and lines[0].startswith(_HEAD):
        del lines[0]
        while lines and lines[0].startswith("#   "):
            del lines[0]
    speed = f"{tuned.before.samples_per_s:.0f} -> {tuned.after.samples_per_s:.0f} samples/s"
    comment = [
        f"{_HEAD} on {day}, with {num_cpus()} CPUs: {speed} ({tuned.speedup:.2f} +- {tuned.interval:.2f} times as fast)\n",
        *(f"#   {one.key}: {one.value} (was {_plain(one.before)})\n" for one in tuned.settings),
    ]
    return "".join([*comment, *lines])


def _plain(value: Any) -> str:
    return "not set" if value is None else str(value)
