"""Several sources as one sequence: the source at each position of an epoch, and the place in that source's own sequence.

An epoch is cut into segments, which are known in advance: one ends where the weights change, or where a source is used up.
Within a segment sources take turns by weight (`Interleaving`), counted from its begin, so each has its share of any first n
positions of the segment within one sample. A source's own sequence is one whole permutation of its samples after another; over
epochs it continues where the last epoch left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from loaderkit.sampling.interleaving import Int64, Interleaving
from loaderkit.sampling.mix_rules import MixedSource, MixRules, Segment, Stop, WeightChange
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.schedule import UNKNOWN, GlobalOrder, SequentialOrder


class Mixture:
    """The sources at all positions of an epoch. One thread at a time may call it."""

    def __init__(self, sources: Sequence[MixedSource], changes: Sequence[WeightChange], stop: Stop) -> None:
        """`changes` begin with one at 0, in ascending order. Raises ConfigError if no source ends the epoch, if there is none
        to take from, or if a share is below `LEAST_SHARE`."""
        self._rules = MixRules(sources, changes, stop)
        self.sources = self._rules.sources
        self._interleavings: dict[tuple[int, ...], Interleaving] = {}
        self.segments = self._cut()
        self._begins = np.array([segment.begin for segment in self.segments], np.int64)
        self.num_samples = self.segments[-1].end
        self.totals = tuple(self.counts(self.num_samples)) if self.num_samples < UNKNOWN else tuple(0 for _ in sources)
        self._totals = np.array(self.totals, np.int64)

    def locate(self, epoch: int, positions: Int64) -> tuple[Int64, Int64]:
        """The source at each position of an epoch, and the place in its own sequence, from epoch 0 on: int64, same shape."""
        flat = positions.reshape(-1)
        sources, places = np.empty_like(flat), np.empty_like(flat)
        numbers = np.searchsorted(self._begins, flat, "right") - 1
        for number in np.unique(numbers).tolist():
            segment = self.segments[number]
            chosen = np.flatnonzero(numbers == number)
            turns, counted = self._interleaving(segment.weights).at(flat[chosen] - segment.begin)
            sources[chosen] = np.array(segment.sources, np.int64)[turns]
            places[chosen] = counted + np.array(segment.before, np.int64)[sources[chosen]]
        if epoch:
            places += epoch * self._totals[sources]
        return sources.reshape(positions.shape), places.reshape(positions.shape)

    def counts(self, position: int) -> list[int]:
        """The samples of every source before `position` of an epoch."""
        segment = [segment for segment in self.segments if segment.begin <= position][-1]
        counts = list(segment.before)
        inside = self._interleaving(segment.weights).counts(position - segment.begin)
        for source, number in zip(segment.sources, inside, strict=True):
            counts[source] += number
        return counts

    def places(self, epoch: int, position: int) -> list[int]:
        """The place of every source in its own sequence, from epoch 0 on, before a position of an epoch."""
        counts = self.counts(min(position, self.num_samples))
        return [epoch * total + count for total, count in zip(self.totals, counts, strict=True)]

    def course(self, position: int) -> list[Segment]:
        """The segments of an epoch that begin before a position."""
        return [segment for segment in self.segments if segment.begin < position]

    def spans(self, name: str) -> list[tuple[int, int]]:
        """The parts [begin, end) of an epoch in which a source has samples."""
        number = [source.name for source in self.sources].index(name)
        return [(segment.begin, segment.end) for segment in self.segments if number in segment.sources]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_interleavings": {}}  # what they keep is for one thread of one process

    def _interleaving(self, weights: tuple[int, ...]) -> Interleaving:
        found = self._interleavings.get(weights)
        if found is None:
            found = self._interleavings[weights] = Interleaving(weights)
        return found

    # -------------------------------------------------------------------------------------------------- segments

    def _cut(self) -> list[Segment]:
        segments: list[Segment] = []
        position, before, used_up = 0, [0] * len(self.sources), set[int]()
        while True:
            sources, weights = self._rules.sources_from(position, used_up)
            end, ending = self._first_used_up(sources, weights, position, before)
            until = self._rules.next_change(position)
            if until is not None and end > until:
                end, ending = until, None
            segment = Segment(position, end, tuple(before), sources, weights, ending)
            segments.append(segment)
            if end >= UNKNOWN:
                return segments
            inside = self._interleaving(segment.weights).counts(end - position)
            for number, count in zip(sources, inside, strict=True):
                before[number] += count
            position = end
            if ending is not None:
                used_up.add(ending)
                if self._rules.is_over(position, used_up):
                    return segments

    def _first_used_up(
        self, sources: tuple[int, ...], weights: tuple[int, ...], position: int, before: list[int]
    ) -> tuple[int, int | None]:
        """The position at which a source is used up first, and which; (UNKNOWN, None) if none ever is."""
        interleaving, limits = self._interleaving(weights), self._rules.limits
        left = [(place, limit - before[number]) for place, number in enumerate(sources) if (limit := limits[number])]
        windows = [(place, number, *interleaving.window_of(place, number)) for place, number in left]
        latest = min((hi for _, _, _, hi in windows), default=0)
        ends = [
            (position + interleaving.position_after(place, number), sources[place])
            for place, number, lo, _ in windows
            if lo <= latest
        ]
        return min(ends, default=(UNKNOWN, None))

    def fingerprint(self) -> str:
        """See `MixRules.fingerprint`."""
        return self._rules.fingerprint()


class SourceOrders:
    """The sample index at each place of the sources' own sequences.

    Samples are numbered source by source: sample i of source m is number first[m] + i, and in its pass number q it is that plus
    q times the number of all. So random numbers differ from pass to pass (after 2**62 / all passes they repeat).
    """

    def __init__(self, sources: Sequence[MixedSource], orders: Sequence[SampleOrder]) -> None:
        """`orders` are the orders of the sources; what they call an epoch is a pass."""
        self._sizes = [source.num_samples for source in sources]
        self._orders = orders
        self._firsts = [sum(self._sizes[:number]) for number in range(len(self._sizes))]
        self._total = sum(self._sizes)
        self._most_passes = (1 << 62) // self._total

    def indices(self, source: int, places: Int64) -> Int64:
        """int64 [n] both."""
        passes, inside = np.divmod(places, self._sizes[source])
        own = _of_passes(self._orders[source], passes, inside)
        indices: Int64 = passes % self._most_passes * self._total + self._firsts[source] + own
        return indices

    def for_thread(self) -> SourceOrders:
        """The same, for one thread more."""
        own = copy(self)
        own._orders = [order.for_thread() for order in self._orders]
        return own

    def sources_of(self, indices: Int64) -> Int64:
        """The sources of some samples: int64 [n]."""
        numbers: Int64 = np.searchsorted(self._firsts, indices % self._total, side="right") - 1
        return numbers


class MixedOrder(SampleOrder):
    """The order of a mixture: the sample index at each position, as of `SourceOrders`."""

    def __init__(self, mixture: Mixture, orders: Sequence[SampleOrder]) -> None:
        self._mixture = mixture
        self._orders = SourceOrders(mixture.sources, orders)
        self.sources = mixture.sources

    def for_thread(self) -> Self:
        own = copy(self)
        own._mixture, own._orders = copy(self._mixture), self._orders.for_thread()
        return own

    def num_positions(self, epoch: int) -> int:
        return self._mixture.num_samples

    def indices(self, epoch: int, positions: Int64) -> Int64:
        flat = positions.reshape(-1)
        sources, places = self._mixture.locate(epoch, flat)
        indices = np.empty_like(flat)
        for number in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == number)
            indices[chosen] = self._orders.indices(number, places[chosen])
        return indices.reshape(positions.shape)

    def digests(self) -> dict[str, str]:
        return {"mix": self._mixture.fingerprint()}

    def places(self, epoch: int, position: int) -> list[int]:
        return self._mixture.places(epoch, position)

    def course(self, epoch: int, position: int) -> list[Segment]:
        return self._mixture.course(position)

    def spans(self, name: str, epoch: int) -> list[tuple[int, int]]:
        return self._mixture.spans(name)

    def explained(self) -> list[Mapping[str, object]]:
        return explained(self.sources, self._mixture.segments, self._mixture.totals)


def _of_passes(order: SampleOrder, passes: Int64, places: Int64) -> Int64:
    if isinstance(order, SequentialOrder):
        return places
    if len(passes) and passes[0] == passes[-1]:  # places ascend, but for those that wrap at an epoch's end
        first = int(passes[0])
        if (passes == first).all():
            return order.indices(first, places)
    if isinstance(order, GlobalOrder):  # passes over a few samples are many
        return order.indices_of_epochs(passes, places)
    indices = np.empty_like(places)
    for one in np.unique(passes).tolist():
        chosen = passes == one
        indices[chosen] = order.indices(one, places[chosen])
    return indices


def explained(
    sources: Sequence[MixedSource], segments: Sequence[Segment], totals: Sequence[int], tokens: Sequence[int] = ()
) -> list[Mapping[str, object]]:
    """What an epoch takes from each source, segment by segment: `begin`, `end` (None if it has none), `used_up`, and
    for each source its share in the segment, its samples and its passes up to the end. `totals` are the samples of
    every source in the epoch. `tokens` are its tokens, which are given, too, where weights are shares of tokens."""
    rows: list[Mapping[str, object]] = []
    after = [*(segment.before for segment in segments[1:]), totals]
    tokens_after = [*(segment.tokens_before for segment in segments[1:]), tokens]
    for segment, counts, num_tokens in zip(segments, after, tokens_after, strict=True):
        ends = segment.end < UNKNOWN
        by_source: dict[str, dict[str, object]] = {}
        for number, source in enumerate(sources):
            row = by_source[source.name] = {
                "share": segment.shares.get(number, 0.0),
                "num_samples": counts[number] - segment.before[number] if ends else None,
                "num_passes": counts[number] / source.num_samples if ends else None,
            }
            if segment.tokens_before:
                row["num_tokens"] = num_tokens[number] - segment.tokens_before[number] if ends else None
        rows.append(
            {
                "begin": segment.begin,
                "end": segment.end if ends else None,
                "used_up": None if segment.used_up is None else sources[segment.used_up].name,
                "sources": by_source,
            }
        )
    return rows
