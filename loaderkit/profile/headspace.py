"""How far training is from never waiting: the consumer alone, the pipeline alone with warm data, and with cold data.

A subset of the samples, small enough to be seen twice, is read again and again for the warm rate. For the cold one its files
are put out of the page cache before every pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loaderkit.prefetch.stats import Stats
from loaderkit.profile.cold import evict
from loaderkit.profile.driving import Step, resting
from loaderkit.profile.experiments import Make, Variant, Window, rate_of
from loaderkit.profile.model import Headspace, Rate

_NUM_WINDOWS = 4
_LEAST_BATCHES = 32  # of the subset
_STILL_CACHED = 0.5


@dataclass(frozen=True)
class Subset:
    """The first samples, and where they lie: paths, or None where they are no files of this machine."""

    num_samples: int
    paths: Sequence[str] | None
    why_no_files: str = ""

    @property
    def overrides(self) -> dict[str, Any]:
        return {"source.limit": self.num_samples}


def subset_size(num_samples: int, samples_a_batch: int) -> int:
    """How many samples to read again and again; `samples_a_batch` over all ranks."""
    return min(num_samples, _LEAST_BATCHES * samples_a_batch)


def measure_headspace(make: Make, step: Step | None, subset: Subset, *, cold: bool, seconds: float) -> Headspace:
    """The three rates, in about `seconds` each. `step` None: there is no training step to compare with."""
    with make(subset.overrides, None) as loader:
        alone = Variant(loader, resting(0.0))
        _pass_once(alone, subset, seconds)
        for _ in range(_NUM_WINDOWS):
            alone.run(seconds / _NUM_WINDOWS)
        ready = [batch for batch, _ in zip(alone.batches, range(4), strict=False)] if step is not None else []
    consumer = consumer_rate(step, ready, seconds) if step is not None else None
    cold_rate, note = _cold(make, subset, seconds) if cold else (None, "")
    return conclude(consumer, alone.rate, cold_rate, note)


def _pass_once(variant: Variant, subset: Subset, most_s: float) -> None:
    """Read the subset once, or for so long: after that it is in memory as far as it fits."""
    until_s = time.perf_counter() + most_s
    while variant.loader.stats().num_samples < subset.num_samples and time.perf_counter() < until_s:
        next(variant.batches)


def consumer_rate(step: Step, ready: Sequence[Any], seconds: float) -> Rate:
    """The step alone, on batches that are there."""
    for batch in ready[:2]:
        step(batch)
    windows = []
    for _ in range(_NUM_WINDOWS):
        begin_s, num_batches, num_samples = time.perf_counter(), 0, 0
        while num_batches < 2 or time.perf_counter() - begin_s < seconds / _NUM_WINDOWS:
            batch = ready[num_batches % len(ready)]
            step(batch)
            num_batches += 1
            num_samples += num_samples_of(batch)
        windows.append(Window(num_samples, time.perf_counter() - begin_s, 0.0, num_batches))
    return rate_of(windows)


def num_samples_of(batch: Any) -> int:
    """Samples of a batch: a dict of fields, or a tuple of them."""
    fields = list(batch.values()) if isinstance(batch, dict) else list(batch)
    return len(fields[0]) if fields else 0


def _cold(make: Make, subset: Subset, seconds: float) -> tuple[Rate | None, str]:
    if subset.paths is None:
        return None, f"no cold rate: {subset.why_no_files}"
    windows: list[Window] = []
    hits: list[float] = []
    until_s = time.perf_counter() + 3 * seconds
    while len(windows) < _NUM_WINDOWS and (not windows or time.perf_counter() < until_s):
        evict(subset.paths)
        with make(subset.overrides, None) as loader:
            batches = iter(loader)
            next(batches)
            before, num_left = loader.stats(), len(loader) - 1
            # What has landed is counted, not what was handed over; and the end of the pass, with ever less to do, is not.
            for _ in range(max(1, num_left - int(before.tuning.get("batches", 4)))):
                if next(batches, None) is None:
                    break
            after = loader.stats()
            found = after.since(before)
        windows.append(Window(_landed(found), found.now_s - before.now_s, 0.0, found.num_batches))
        if found.host.page_cache_hits is not None:
            hits.append(found.host.page_cache_hits)
    note = ""
    if hits and min(hits) > _STILL_CACHED:
        note = (
            f"{100 * min(hits):.0f} % of what was read came from memory nevertheless: the files are in use elsewhere, or their "
            "file system keeps them there"
        )
    return rate_of(windows), note


def _landed(stats: Stats) -> int:
    return next((row.num_items for row in stats.stages if row.kind == "batch"), stats.num_samples)


def conclude(consumer: Rate | None, warm: Rate, cold: Rate | None, note: str) -> Headspace:
    """What the rates say together."""
    fetch_percent = None
    if cold is not None:
        fetch_percent = 100.0 * max(0.0, 1.0 - cold.samples_per_s / max(warm.samples_per_s, 1e-9))
    pipeline = cold or warm
    factor = None if consumer is None else pipeline.samples_per_s / max(consumer.samples_per_s, 1e-9)
    parts = []
    if factor is not None:
        parts.append(
            f"the pipeline makes {factor:.2f} times what training takes"
            + (": training need never wait" if factor >= 1.1 else ": there is nothing to spare" if factor >= 1 else "")
        )
        if factor < 1:
            parts.append(f"training waits {100 * (1 - factor):.0f} % of the time, whatever is read ahead")
    if fetch_percent is not None:
        parts.append(f"of a cold sample's time {fetch_percent:.0f} % is fetching, the rest preprocessing")
    return Headspace(
        consumer=consumer,
        warm=warm,
        cold=cold,
        cold_note=note,
        fetch_percent=fetch_percent,
        preprocess_percent=None if fetch_percent is None else 100.0 - fetch_percent,
        factor=factor,
        summary="; ".join(parts) or f"the pipeline alone makes {warm.samples_per_s:.0f} samples/s",
    )
