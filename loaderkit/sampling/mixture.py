"""Several sources as one sequence: the source at each position of an epoch, and the place in that source's own sequence.

An epoch is cut into segments, which are known in advance: one ends where the weights change, or where a source is used up.
Within a segment sources take turns by weight (`Interleaving`), counted from its begin, so each has its share of any first n
positions of the segment within one sample. A source's own sequence is one whole permutation of its samples after another; over
epochs it continues where the last epoch left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from loaderkit.errors import ConfigError
from loaderkit.sampling.interleaving import LEAST_SHARE, Int64, Interleaving, whole_weights
from loaderkit.sampling.schedule import UNKNOWN, GlobalOrder, SamplePermutation, SequentialOrder
from loaderkit.sampling.state import State


class MixedSource(NamedTuple):
    """One of the sources: its samples, and the passes over them after which it is used up in an epoch; None: never."""

    name: str
    num_samples: int
    num_passes: int | None

    @property
    def most(self) -> int | None:
        """Its samples of an epoch."""
        return None if self.num_passes is None else self.num_samples * self.num_passes


class WeightChange(NamedTuple):
    """From position `at` of an epoch on these weights hold, one for each source."""

    at: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Segment:
    """Positions [begin, end) of an epoch, in which the weights stay. `sources` are the numbers of those that have any."""

    begin: int
    end: int
    before: tuple[int, ...]  # the samples of every source before it
    sources: tuple[int, ...]
    weights: tuple[int, ...]  # of `sources`, whole numbers
    used_up: int | None  # the source that its end uses up

    @property
    def shares(self) -> dict[int, float]:
        """By number of the source, summing to 1."""
        total = sum(self.weights)
        return {source: weight / total for source, weight in zip(self.sources, self.weights, strict=True)}


class Mixture:
    """The sources at all positions of an epoch. One thread at a time may call it."""

    def __init__(
        self, sources: Sequence[MixedSource], changes: Sequence[WeightChange], stop: Literal["first", "all", "never"]
    ) -> None:
        """`changes` begin with one at 0, in ascending order. Raises ConfigError if no source ends the epoch, if there is none
        to take from, or if a share is below `LEAST_SHARE`."""
        self.sources = tuple(sources)
        self._changes = tuple(changes)
        self._stop = stop
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
        most = [None if self._stop == "never" else source.most for source in self.sources]
        segments: list[Segment] = []
        position, before, used_up = 0, [0] * len(self.sources), set[int]()
        later = list(self._changes)
        weights: tuple[float, ...] = ()
        while True:
            while later and later[0].at <= position:
                weights = later.pop(0).weights
            sources = [number for number, weight in enumerate(weights) if weight > 0 and number not in used_up]
            if not sources:
                raise ConfigError(self._empty(position, later))
            until = later[0].at if later else UNKNOWN
            shares = self._shares(sources, weights, position)
            end, ending = self._first_used_up(sources, shares, position, before, most)
            if end > until:
                end, ending = until, None
            segment = Segment(position, end, tuple(before), tuple(sources), tuple(shares), ending)
            segments.append(segment)
            if end >= UNKNOWN:
                if self._stop != "never":
                    raise ConfigError(
                        f"mix.stop: {self._stop} ends an epoch when a source is used up, and from position {position} on none "
                        f"of {self._names(sources)} is ever: give one of them `epochs`, or set `stop: never`"
                    )
                return segments
            inside = self._interleaving(segment.weights).counts(end - position)
            for number, count in zip(sources, inside, strict=True):
                before[number] += count
            position = end
            if ending is not None:
                used_up.add(ending)
                if self._stop == "first" or not self._is_left(used_up, most, weights, later):
                    return segments

    def _first_used_up(
        self,
        sources: list[int],
        weights: list[int],
        position: int,
        before: list[int],
        most: list[int | None],
    ) -> tuple[int, int | None]:
        """The position at which a source is used up first, and which; (UNKNOWN, None) if none ever is."""
        interleaving = self._interleaving(tuple(weights))
        left = [(place, limit - before[number]) for place, number in enumerate(sources) if (limit := most[number])]
        windows = [(place, number, *interleaving.window_of(place, number)) for place, number in left]
        latest = min((hi for _, _, _, hi in windows), default=0)
        ends = [
            (position + interleaving.position_after(place, number), sources[place])
            for place, number, lo, _ in windows
            if lo <= latest
        ]
        return min(ends, default=(UNKNOWN, None))

    def _shares(self, sources: list[int], weights: tuple[float, ...], position: int) -> list[int]:
        shares = whole_weights([Fraction(repr(float(weights[number]))) for number in sources])
        least = min(shares)
        if least < LEAST_SHARE * sum(shares):
            name = self.sources[sources[shares.index(least)]].name
            raise ConfigError(
                f"sources.{name}: its share from position {position} on is {least / sum(shares):.1e}, and must be 0 or at "
                f"least {LEAST_SHARE:.0e}: give it more weight, or mix it with another one beforehand"
            )
        return shares

    @staticmethod
    def _is_left(
        used_up: set[int], most: list[int | None], weights: tuple[float, ...], later: list[WeightChange]
    ) -> bool:
        """True if a source that ends has samples to come."""
        return any(
            limit is not None
            and number not in used_up
            and max(weights[number], *(one.weights[number] for one in later), 0) > 0
            for number, limit in enumerate(most)
        )

    def _empty(self, position: int, later: list[WeightChange]) -> str:
        if position == 0:
            return "sources: at position 0 no source has a weight above 0"
        following = f" before the change at {later[0].at}" if later else ""
        return (
            f"mix: at position {position} every source with a weight above 0 is used up{following}: give one that is left a "
            "weight there, or let one `repeat: true`"
        )

    def _names(self, numbers: Sequence[int]) -> str:
        return ", ".join(self.sources[number].name for number in numbers)

    # ---------------------------------------------------------------------------------------------------- states

    def fingerprint(self) -> str:
        """`stop`, and the position and a digest of the weights of every change: `same_until` compares two of them."""
        names = [source.name for source in self.sources]
        texts = [f"{one.at}:{_digest(tuple(zip(names, one.weights, strict=True)))}" for one in self._changes]
        return " ".join([self._stop, *texts])


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=4).hexdigest()


def same_until(one: str, other: str, position: int) -> bool:
    """True if two mixtures of the same sources, by their fingerprints, have the same samples before `position` of epoch 0."""
    (stop, *changes), (other_stop, *other_changes) = one.split(" "), other.split(" ")
    before = [[text for text in texts if _place(text) < max(position, 1)] for texts in (changes, other_changes)]
    return stop == other_stop and before[0] == before[1]


def _place(text: str) -> int:
    place = text.partition(":")[0]
    return int(place) if place.isdecimal() else 0


def with_later_changes(state: State, fingerprint: dict[str, str]) -> State:
    """The state, with a mixture's changes of weights in place of its own, if they differ only behind its position."""
    before, now = state.fingerprint.get("mix"), fingerprint.get("mix")
    if before is None or now is None or state.epoch or not same_until(before, now, state.position):
        return state
    return replace(state, fingerprint={**state.fingerprint, "mix": now})


class MixedOrder:
    """The order of a mixture: the sample index at each position. Implements `SamplePermutation`.

    Samples are numbered source by source: sample i of source m is number first[m] + i, and in its pass number q it is that plus
    q times the number of all. So random numbers differ from pass to pass (after 2**62 / all passes they repeat).
    """

    def __init__(self, mixture: Mixture, orders: Sequence[SamplePermutation]) -> None:
        """`orders` are those of the sources; what they call an epoch is a pass."""
        self._mixture = mixture
        self._orders = orders
        sizes = [source.num_samples for source in mixture.sources]
        self._firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._total = sum(sizes)
        self._most_passes = (1 << 62) // self._total

    def indices(self, epoch: int, positions: Int64) -> Int64:
        flat = positions.reshape(-1)
        sources, places = self._mixture.locate(epoch, flat)
        indices = np.empty_like(flat)
        for number in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == number)
            passes, inside = np.divmod(places[chosen], self._mixture.sources[number].num_samples)
            own = _of_passes(self._orders[number], passes, inside)
            indices[chosen] = passes % self._most_passes * self._total + self._firsts[number] + own
        return indices.reshape(positions.shape)


def _of_passes(order: SamplePermutation, passes: Int64, places: Int64) -> Int64:
    if isinstance(order, SequentialOrder):
        return places
    if isinstance(order, GlobalOrder):  # passes over a few samples are many
        return order.indices_of_epochs(passes, places)
    indices = np.empty_like(places)
    for one in np.unique(passes).tolist():
        chosen = passes == one
        indices[chosen] = order.indices(one, places[chosen])
    return indices


def source_counts(mixture: Mixture) -> list[Mapping[str, object]]:
    """The course of an epoch, segment by segment: `begin`, `end` (None: no end), `used_up`, and by source its share in it, its
    samples and its passes up to the end."""
    rows: list[Mapping[str, object]] = []
    for segment in mixture.segments:
        ends = segment.end < UNKNOWN
        counts = mixture.counts(segment.end) if ends else [None] * len(mixture.sources)
        rows.append(
            {
                "begin": segment.begin,
                "end": segment.end if ends else None,
                "used_up": None if segment.used_up is None else mixture.sources[segment.used_up].name,
                "sources": {
                    source.name: {
                        "share": segment.shares.get(number, 0.0),
                        "num_samples": None if (count := counts[number]) is None else count - segment.before[number],
                        "num_passes": None if count is None else count / source.num_samples,
                    }
                    for number, source in enumerate(mixture.sources)
                },
            }
        )
    return rows
