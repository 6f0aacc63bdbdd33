"""Measures how far training is from never waiting: the speed of the consumer alone, and of the pipeline alone with warm
and with cold data.

For the warm rate, the first batches of an epoch are read again and again. For the cold rate, their files are put out of
the page cache before every pass. As the order is shuffled, they are samples like any others; without shuffling they are
the first ones.

A rate that varies by more than half is measured for longer, as is one below the rate of the loop that has just run,
since the loop cannot be faster than its pipeline alone. If that does not help, it is unknown.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from loaderkit.connectors.base import Connector, traits_of
from loaderkit.connectors.page_cache import evict
from loaderkit.diagnosis.stats import Stats
from loaderkit.profile.experiments.interleave import ExperimentLoader, Make, RateWindow, rate_of
from loaderkit.profile.experiments.loops import Step, endless
from loaderkit.profile.report_parts import Headroom, Rate
from loaderkit.sources.base import Source

_NUM_WINDOWS = 4
MOST_BATCHES = 32  # of the subset
_STILL_CACHED = 0.5
_MOST_UNSURE = 50.0  # percent: half the width of an interval beyond which a rate is no figure
_NEARLY = 0.9  # of the loop's rate: what is below contradicts it
_LONGER = 3.0  # times as long, where a rate is not good enough


@dataclass(frozen=True)
class Subset:
    """The first batches of the first epoch, and where their samples lie: paths, or None where they are no files of this
    machine."""

    num_batches: int
    paths: Sequence[str] | None
    why_no_files: str = ""


def files_of(source: Source, connector: Connector | None, indices: Iterable[int]) -> list[str] | None:
    """The paths in which these samples lie; None where they are no files of this machine."""
    if connector is None or traits_of(connector).is_remote:
        return None
    keys: dict[str, None] = {}
    for index in indices:
        keys.update((sample_range.range.key, None) for sample_range in source.ranges(index))
    paths = [connector.describe(key) for key in keys]
    return paths if all(os.path.isfile(path) for path in paths) else None


def measure_headroom(
    make: Make, step: Step | None, subset: Subset, *, cold: bool, seconds: float, least_per_s: float = 0.0
) -> Headroom:
    """The three rates, in about `seconds` each, or three times that where they vary. `step` is None without a training
    step to compare with. `least_per_s`: samples/s of the loop, which its pipeline alone has to reach."""
    with make({}, None) as loader:
        ready = _pass(loader, subset, seconds, num_kept=4).batches  # in memory now, if they fit
        warm = _passes(loader, subset, seconds, is_cold=False, least_per_s=least_per_s)
        cold_rate, note = _cold(loader, subset, seconds) if cold else (None, "")
    consumer = consumer_rate(step, ready, seconds) if step is not None else None
    return conclude(consumer, rate_of([one.window for one in warm]), cold_rate, note, least_per_s)


class _Pass(NamedTuple):
    window: RateWindow
    batches: list[Any]  # the first few
    stats: Stats


def _passes(
    loader: ExperimentLoader, subset: Subset, seconds: float, *, is_cold: bool, least_per_s: float = 0.0
) -> list[_Pass]:
    """Two to eight passes, as the time allows; more, for up to three times as long, until they give a rate."""
    begin_s = time.perf_counter()
    passes: list[_Pass] = []
    while True:
        if is_cold and subset.paths is not None:
            loader.set_epoch(1)  # what was read ahead is dropped
            evict(subset.paths)
        passes.append(_pass(loader, subset, seconds / 2))
        passed_s = time.perf_counter() - begin_s
        if len(passes) < 2 or (passed_s < seconds and len(passes) < 2 * _NUM_WINDOWS):
            continue
        rate = rate_of([one.window for one in passes])
        if passed_s >= _LONGER * seconds or _why_unknown(rate, least_per_s) is None:
            return passes


def _pass(loader: ExperimentLoader, subset: Subset, most_s: float, *, num_kept: int = 0) -> _Pass:
    """Read the subset from its beginning. It counts samples that have landed since the first batch, not samples that
    were handed over. The end of the subset is not counted, as other samples are read then, too. If the subset is read
    ahead as a whole, it may have landed with its first batch: then all of it is counted, from the time it was asked
    for."""
    loader.set_epoch(1)
    loader.set_epoch(0)
    batches = endless(loader)  # an epoch may have a batch or two only
    before, until_s = loader.stats(), time.perf_counter() + most_s
    num_left = subset.num_batches - (before.tuning.batches or 4)
    is_read_ahead = num_left <= 1
    kept = [next(batches)]
    if not is_read_ahead:
        before, until_s = loader.stats(), time.perf_counter() + most_s
    for _ in range(1, subset.num_batches if is_read_ahead else num_left):
        batch = next(batches)
        if time.perf_counter() >= until_s:
            break
        if len(kept) < num_kept:
            kept.append(batch)
    stats = loader.stats().since(before)
    num_samples = stats.num_samples if is_read_ahead else _landed(stats)
    return _Pass(RateWindow(num_samples, stats.wall_s, 0.0, stats.num_batches), kept[:num_kept], stats)


def _landed(stats: Stats) -> int:
    return next((row.num_items for row in stats.stages if row.kind == "batch"), stats.num_samples)


def _cold(loader: ExperimentLoader, subset: Subset, seconds: float) -> tuple[Rate | None, str]:
    if subset.paths is None:
        return None, f"no cold rate: {subset.why_no_files}"
    passes = _passes(loader, subset, seconds, is_cold=True)
    hits = [hit for hit in (one.stats.host.page_cache_hits for one in passes) if hit is not None]
    note = ""
    if hits and min(hits) > _STILL_CACHED:
        note = (
            f"{100 * min(hits):.0f} % of what was read came from memory nevertheless: the files are in use elsewhere, or their "
            "file system keeps them there"
        )
    return rate_of([one.window for one in passes]), note


def consumer_rate(step: Step, ready: Sequence[Any], seconds: float) -> Rate:
    """The speed of the step alone, on batches that are ready."""
    for batch in ready[:2]:
        step(_copied(batch))
    windows: list[RateWindow] = []
    until_s = time.perf_counter() + _LONGER * seconds
    while True:
        begin_s, num_batches, num_samples = time.perf_counter(), 0, 0
        while num_batches < 2 or time.perf_counter() - begin_s < seconds / _NUM_WINDOWS:
            batch = ready[num_batches % len(ready)]
            step(_copied(batch))
            num_batches += 1
            num_samples += num_samples_of(batch)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what the step has started is part of it
        windows.append(RateWindow(num_samples, time.perf_counter() - begin_s, 0.0, num_batches))
        if len(windows) >= _NUM_WINDOWS and (time.perf_counter() >= until_s or _why_unknown(rate_of(windows)) is None):
            return rate_of(windows)


def _copied(batch: Any) -> Any:
    """A batch as it was delivered: a step may take fields out of it."""
    return dict(batch) if isinstance(batch, dict) else batch


def num_samples_of(batch: Any) -> int:
    """Samples of a batch: a dict of fields, or a tuple of them."""
    fields = list(batch.values()) if isinstance(batch, dict) else list(batch)
    return len(fields[0]) if fields else 0


def _say_factor(factor: float, unsure: float, pipeline: str) -> str:
    """What a ratio of pipeline to training means; `unsure` is the share of it that may be noise."""
    made = f"{pipeline} makes {factor:.2f} times what training takes"
    if factor >= 1 and factor * (1 - unsure) >= 1:
        return f"{made}: " + ("training need never wait" if factor >= 1.1 else "there is nothing to spare")
    if factor < 1 and factor * (1 + unsure) < 1:
        return f"{made}: training waits {100 * (1 - factor):.0f} % of the time, whatever is read ahead"
    return f"{made}, +- {100 * unsure:.0f} %: too noisy to say whether training has to wait"


def _why_unknown(rate: Rate, least_per_s: float = 0.0) -> str | None:
    """The reason why a rate cannot be given, or None if it can."""
    if rate.interval_percent > _MOST_UNSURE:
        return f"it varied by more than half within {rate.seconds:.1f} s"
    if rate.samples_per_s < _NEARLY * least_per_s:
        return f"it came out below the {least_per_s:.0f} samples/s of the loop that had just run"
    return None


def conclude(consumer: Rate | None, warm: Rate, cold: Rate | None, note: str, least_per_s: float = 0.0) -> Headroom:
    """The conclusion from the rates. `least_per_s`: samples/s of the loop, which warm data has to reach."""
    reasons = {
        "training alone": None if consumer is None else _why_unknown(consumer),
        "data warm": _why_unknown(warm, least_per_s),
        "data cold": None if cold is None else _why_unknown(cold),
    }
    unknown = [f"{name}: unknown, as {why}" for name, why in reasons.items() if why is not None]
    known = dict(zip(reasons, (consumer, warm, cold), strict=True))
    rates = {name: None if reasons[name] is not None else rate for name, rate in known.items()}
    consumer, warm_rate, cold_rate = rates["training alone"], rates["data warm"], rates["data cold"]
    fetch_percent = None
    if cold_rate is not None and warm_rate is not None:
        fetch_percent = 100.0 * max(0.0, 1.0 - cold_rate.samples_per_s / max(warm_rate.samples_per_s, 1e-9))
    pipeline = warm_rate if cold is None else cold_rate
    factor, parts = None, []
    if consumer is not None and pipeline is not None:
        factor = pipeline.samples_per_s / max(consumer.samples_per_s, 1e-9)
        unsure = math.hypot(pipeline.interval_percent, consumer.interval_percent) / 100
        parts.append(_say_factor(factor, unsure, "with cold data the pipeline" if cold is not None else "the pipeline"))
    if fetch_percent is not None:
        parts.append(f"of a cold sample's time {fetch_percent:.0f} % is fetching, the rest preprocessing")
    if not parts and pipeline is not None:
        parts.append(f"the pipeline alone makes {pipeline.samples_per_s:.0f} samples/s")
    return Headroom(
        consumer=consumer,
        warm=warm_rate,
        cold=cold_rate,
        cold_note=note,
        unknown=unknown,
        fetch_percent=fetch_percent,
        preprocess_percent=None if fetch_percent is None else 100.0 - fetch_percent,
        factor=factor,
        summary="; ".join([*parts, *unknown]),
    )
