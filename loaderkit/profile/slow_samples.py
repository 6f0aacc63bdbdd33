"""The samples that took longest in a stage, by name, and what stragglers have in common.

A trait is common if nearly all slow samples share it and few of the other samples do: a folder, an extension, a shard,
a source, many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from posixpath import dirname
from statistics import median
from typing import NamedTuple

import numpy as np

from loaderkit._internal.units import say_seconds, say_size
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.slow_samples import NOTHING_SLOW, rows_of
from loaderkit.errors import LoaderkitError
from loaderkit.profile.report_parts import SlowItem
from loaderkit.sources.base import Source

_NUM_SLOWEST = 10
_STRAGGLER = 4.0  # times the median, as in the verdict
_NUM_NAMED = 3
_NUM_USUAL = 256  # samples that slow ones are compared with
_LEAST = 3  # slow samples; fewer have anything in common by chance
_NEARLY_ALL = 0.9  # share of the slow samples
_BY_CHANCE = 1e-3  # likelihood that as many samples drawn at large share it
_LARGE = 3.0  # times the usual bytes


class Traits(NamedTuple):
    """What is known of a sample without reading it. A trait that is not known is empty, or None."""

    source: str
    shard: str
    folder: str
    extension: str
    num_bytes: int | None


def slowest_items(passed: Stats, source: Source, begin_s: float) -> list[SlowItem]:
    """The samples that took longest beyond what is usual in their stage, at most ten. A sample may be in it for two stages."""
    rows = {row.name: row for row in passed.stages}
    ranked = []
    for stage, items in passed.slowest.items():
        usual_s = rows[stage].services.percentile(0.5) if stage in rows else None
        for slow in rows_of(items):
            item = SlowItem(
                stage=stage,
                seconds=slow.seconds,
                usual_s=usual_s,
                key=source.key(slow.sample),
                origin=source.origin(slow.sample),
                source=source.source_name(slow.sample),
                num_together=slow.num_together,
                epoch=slow.epoch,
                at_s=slow.at_s - begin_s,
            )
            ranked.append((slow.each_s - (usual_s or 0.0), item))
    ranked.sort(key=lambda pair: -pair[0])
    return [item for _, item in ranked[:_NUM_SLOWEST]]


def say_stragglers(passed: Stats, stage: str | None, source: Source) -> str:
    """Which samples took long in a stage, and what they have in common; empty where none is known by itself."""
    row = next((row for row in passed.stages if row.name == stage), None)
    usual_s = None if row is None else row.services.percentile(0.5)
    if stage is None or usual_s is None:
        return ""
    kept = rows_of(passed.slowest.get(stage, NOTHING_SLOW))
    slow = [one for one in kept if one.each_s > _STRAGGLER * usual_s and one.num_together == 1]
    took_s: dict[int, float] = {}
    for one in slow:
        took_s[one.sample] = max(one.seconds, took_s.get(one.sample, 0.0))
    ranked = sorted(took_s, key=took_s.__getitem__, reverse=True)
    if not ranked:
        return ""
    ranked = _bulk(ranked, took_s)
    named = ", ".join(f"{source.key(index)} ({say_seconds(took_s[index])})" for index in ranked[:_NUM_NAMED])
    usual = np.unique(np.linspace(0, len(source) - 1, min(_NUM_USUAL, len(source))).astype(np.int64)).tolist()
    common = in_common(_traits(source, ranked), _traits(source, usual))
    return f"the slowest are {named}{f': {common}' if common else ''}"


def _bulk(ranked: Sequence[int], took_s: Mapping[int, float]) -> list[int]:
    """The slow samples that took nearly all of the slow samples' time: the others may have been slow for lack of a CPU."""
    left_s, found = _NEARLY_ALL * sum(took_s.values()), list[int]()
    for index in ranked:
        if left_s <= 0:
            break
        found.append(index)
        left_s -= took_s[index]
    return found


def in_common(slow: Sequence[Traits], usual: Sequence[Traits]) -> str:
    """What nearly all of the slow samples have and few of the usual ones, in words; empty where nothing shows."""
    if len(slow) < _LEAST:
        return ""
    found = []
    for name, say in _SAID.items():
        values = [getattr(one, name) for one in slow]
        value = max(set(values), key=values.count)
        share = [getattr(one, name) for one in usual].count(value) / max(1, len(usual))
        num = values.count(value)
        if value and num >= _NEARLY_ALL * len(values) and share**num < _BY_CHANCE:
            found.append(say.format(value))
    slow_bytes, usual_bytes = (_median_bytes(some) for some in (slow, usual))
    if slow_bytes and usual_bytes and slow_bytes >= _LARGE * usual_bytes:
        found.append(
            f"have {say_size(slow_bytes)} in the median, {slow_bytes / usual_bytes:.0f} times as much as usual"
        )
    return f"nearly all of the {len(slow)} slow ones {' and '.join(found)}" if found else ""


_SAID: Mapping[str, str] = {
    "source": "are of the source {}",
    "shard": "lie in {}",
    "folder": "lie in {}/",
    "extension": "are .{}",
}


def _median_bytes(traits: Sequence[Traits]) -> int:
    return int(median(known)) if (known := [one.num_bytes for one in traits if one.num_bytes is not None]) else 0


def _traits(source: Source, indices: Iterable[int]) -> list[Traits]:
    return [_traits_of(source, index) for index in indices]


def _traits_of(source: Source, index: int) -> Traits:
    key, origin, name = source.key(index), source.origin(index), source.source_name(index) or ""
    try:
        ranges = source.ranges(index)
    except (LoaderkitError, IndexError):  # it knows no bytes, or the sample is a bad one
        ranges = []
    largest = max(ranges, key=lambda one: one.range.length, default=None)
    extension = "" if largest is None else largest.extension.lower()
    num_bytes = sum(one.range.length for one in ranges) if ranges else None
    return Traits(name, "" if origin == key else origin, dirname(key), extension, num_bytes)
