"""The result of `loader.stats()`: a snapshot of the counters, with a verdict on what limits the loop, and rows by source."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from loaderkit._internal.units import say_seconds
from loaderkit.diagnosis.diagnose import diagnose
from loaderkit.diagnosis.interval import HARMLESS, Interval
from loaderkit.diagnosis.verdict import Verdict
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.stalls import START

_MOST_OF_IT = 0.5  # share of the wait that would be gone if a source's samples took as long as the others'
_NUM_KNOWN = 8  # samples; from fewer it is not known how long a source's samples take
_NOT_BY_SOURCE = frozenset({"training", "unknown", "gil", "oversubscription", "quota"})
"""Kinds of limits under which the time in a stage is not spent on the stage's own work."""


@dataclass(frozen=True)
class SourceStats:
    """One of several sources. Times are in seconds, summed over workers, in `read` and in the source's own stages;
    common stages are not counted, as they serve all sources. Samples that were read ahead count in `num_items`,
    `num_bytes` and the times."""

    name: str
    weight: float  # its share as planned, over the positions of these batches
    share: float  # of what was given, samples or tokens as weights are
    share_of: Literal["samples", "tokens"]
    num_samples: int  # given to the loop; with `pack` documents, and one that is cut counts where it begins
    num_tokens: int | None  # of those, with `pack` and where weights are shares of tokens
    samples_per_s: float
    num_items: int  # samples read
    num_bytes: int  # of those
    bytes_per_s: float
    read_s: float
    stages_s: float  # in its own stages behind `read`
    cpu_s: float  # of both, on a CPU
    delayed_s: float  # of both, ready to run, and no CPU was free
    waiting_s: float  # the rest of both: for a store, a device, a lock or the GIL
    stall_s: float  # the loop waited for them
    stall_percent: float  # of the time
    num_bad: int  # bad samples, each counted once an epoch
    num_dropped: int  # samples left out by `filter`
    num_skipped: int  # left out as they were bad
    num_replaced: int  # bad, and another one stands in their slot
    num_passes: float  # over its samples since epoch 0, all ranks together
    is_used_up: bool  # in this epoch

    @property
    def busy_s(self) -> float:
        """The time of both."""
        return self.read_s + self.stages_s


_OF_A_STATE = ("name", "share_of", "num_bad", "num_passes", "is_used_up")
_FIELDS = tuple(field.name for field in fields(Snapshot))


class Stats(Snapshot):
    """A snapshot with a verdict: see `Snapshot` for the counters."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """The same counters."""
        return cls(**{name: getattr(snapshot, name) for name in _FIELDS})

    def verdict(self) -> Verdict:
        """The bottleneck, the confidence, the evidence and what to change; see `diagnose.py`."""
        verdict = diagnose(self)
        return verdict._replace(source=_limiting_source(self, verdict)) if self.sources else verdict

    def source_rows(self) -> list[SourceStats]:
        """A row for each of several sources, in their order; none for a single source."""
        samples, tokens, dropped, skipped, replaced = (
            numbers or (0,) * len(self.sources) for numbers in self.by_source
        )
        given = tokens if self.sources and self.sources[0].share_of == "tokens" else samples
        whole, rows = sum(source.due for source in self.sources), []
        for number, source in enumerate(self.sources):
            counts: dict[str, Any] = {
                "weight": source.due / whole if whole else 0.0,
                "share": given[number] / max(1, sum(given)),
                "num_samples": samples[number],
                "samples_per_s": samples[number] / max(self.wall_s, 1e-12),
                "num_tokens": tokens[number] if self.by_source.tokens else None,
                "num_dropped": dropped[number],
                "num_skipped": skipped[number],
                "num_replaced": replaced[number],
            }
            state: dict[str, Any] = {name: getattr(source, name) for name in _OF_A_STATE}
            rows.append(SourceStats(**state, **counts, **self._times_of(source.name)))
        return rows

    def _times_of(self, source: str) -> dict[str, Any]:
        """What was read from a source, and the time of its own stages."""
        own, wall_s = [row for row in self.stages if row.source == source], max(self.wall_s, 1e-12)
        read = [row for row in own if row.kind == "read"]
        read_s, busy_s = sum(row.busy_s for row in read), sum(row.busy_s for row in own)
        cpu_s, delayed_s = sum(row.cpu_s for row in own), sum(row.delayed_s for row in own)
        num_bytes, stall_s = sum(row.num_bytes for row in own), sum(self.stall_s.get(row.name, 0.0) for row in own)
        return {
            "num_items": sum(row.num_items for row in read),
            "num_bytes": num_bytes,
            "bytes_per_s": num_bytes / wall_s,
            "read_s": read_s,
            "stages_s": busy_s - read_s,
            "cpu_s": cpu_s,
            "delayed_s": delayed_s,
            "waiting_s": max(0.0, busy_s - cpu_s - delayed_s),
            "stall_s": stall_s,
            "stall_percent": 100 * stall_s / wall_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        values = {**super().to_dict(), "verdict": self.verdict().to_dict()}
        return {**values, "sources": [asdict(row) for row in self.source_rows()]} if self.sources else values


def _limiting_source(stats: Stats, verdict: Verdict) -> str | None:
    """The source that alone holds the loop up, and how that is seen; None if there is none, or if it is not known.

    A source is named if at least half of the wait would be gone, were its samples as fast in `read` and its own stages
    as the other sources' samples. So the largest source is not named for its size, and none is named for what all of
    them wait for.
    """
    interval = Interval.of(stats)
    if verdict.kind in _NOT_BY_SOURCE or interval.share_after_start < HARMLESS:
        return None
    rows = [row for row in stats.source_rows() if row.num_items >= _NUM_KNOWN]
    waited_s = interval.waited_s - stats.stall_s.get(START, 0.0)
    for row in rows:
        others = [other for other in rows if other is not row]
        if not others:
            return None
        each_s = (row.busy_s - row.delayed_s) / row.num_items
        others_s = sum(other.busy_s - other.delayed_s for other in others) / sum(other.num_items for other in others)
        if each_s > 0 and row.stall_s * (1 - others_s / each_s) >= _MOST_OF_IT * waited_s:
            start = " after the start" if interval.waited_s - waited_s >= HARMLESS * interval.waited_s else ""
            return (
                f"{row.name}: {100 * row.stall_s / waited_s:.0f} % of the wait{start}, with {100 * row.share:.0f} % of the "
                f"{row.share_of}; one sample takes {say_seconds(each_s)} in read and its "
                f"own stages, one of {'another source' if len(others) == 1 else 'the others'} {say_seconds(others_s)}"
            )
    return None
