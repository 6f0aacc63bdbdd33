"""Several sources as one sequence, in which each source has its share of tokens: `mix: {by: tokens}`.

Samples have lengths. Let T tokens have come in a segment, and P of them from a source with the share w. Its next sample, of the
length l, may come once P <= w T, and should be over at T = (P + l) / w. Of the samples that may come, the one that should be
over first does. So no source is ever ahead of its share by its longest sample, or behind it by the longest of any (WF2Q:
Bennett and Zhang: Worst-case Fair Weighted Fair Queueing, 1996); with samples of one length these are the turns of
`interleaving`.

The place of a source at a position depends on the lengths of all samples before, in their random order, so no formula leads to
a position: one walks. A plan keeps how far the sources were at every 65,536th position, and walks a block again from
there when it is needed. It is made as far as positions are asked for, and to the end of an epoch for its number of
samples.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from loaderkit import native
from loaderkit.errors import ConfigError
from loaderkit.sampling.interleaving import Int64
from loaderkit.sampling.mix_rules import MixedSource, MixRules, Segment, Stop, WeightChange
from loaderkit.sampling.mixture import SourceOrders, explained
from loaderkit.sampling.order import SampleOrder, digest_of
from loaderkit.sampling.schedule import UNKNOWN

_BLOCK = 1 << 16
_MOST_LAG = 1 << 60  # the sum of the weights times the longest sample
_KEPT_BLOCKS, _KEPT_EPOCHS = 4, 3


class _Progress(NamedTuple):
    """How far the sources are at a position of an epoch: int64 [sources] each."""

    position: int
    places: Int64  # in their own sequences, from epoch 0 on
    tokens: Int64  # since the epoch began
    lags: Int64  # in the segment, how much less than their share they have, times the sum of the weights
    segment: Segment | None  # that continues here; None if one begins


class _Walk:
    """Walks through an epoch from a `_Progress` on."""

    def __init__(self, mixture: TokenMixture, begin: Int64, progress: _Progress) -> None:
        """`begin`: the places of the sources at the begin of the epoch."""
        self._mixture = mixture
        self._begin = begin
        self.position, self._segment = progress.position, progress.segment
        self.places, self.tokens, self._lags = progress.places.copy(), progress.tokens.copy(), progress.lags.copy()
        self.ended: list[Segment] = []
        self.is_over = False
        nothing = np.zeros(0, np.int64)
        self._ahead = [(nothing, nothing)] * len(begin)  # by source indices and lengths of samples from its place on

    @property
    def progress(self) -> _Progress:
        """Where it has come to."""
        return _Progress(self.position, self.places.copy(), self.tokens.copy(), self._lags.copy(), self._segment)

    def turns(self, num: int) -> Int64:
        """The indices of the next `num` samples, or of as many as are left in the epoch."""
        parts: list[Int64] = []
        end = self.position + num
        while self.position < end and not self.is_over:
            segment = self._segment = self._segment or self._next_segment()
            change = self._mixture.rules.next_change(self.position)
            parts.append(self._take(segment, (end if change is None else min(end, change)) - self.position))
            used_up = set(segment.sources).intersection(self._used_up())
            if used_up or self.position == change:
                self._end_segment(segment, min(used_up, default=None))
        return np.concatenate(parts)

    def _counts(self) -> list[int]:
        """The samples of every source since the epoch began."""
        counts: list[int] = (self.places - self._begin).tolist()
        return counts

    def _used_up(self) -> list[int]:
        limits = self._mixture.rules.limits
        return [number for number, count in enumerate(self._counts()) if count == limits[number]]

    def _next_segment(self) -> Segment:
        sources, weights = self._mixture.sources_from(self.position, self._used_up())
        tokens = tuple(self.tokens.tolist())
        return Segment(self.position, UNKNOWN, tuple(self._counts()), sources, weights, None, tokens)

    def _end_segment(self, segment: Segment, used_up: int | None) -> None:
        self.ended.append(replace(segment, end=self.position, used_up=used_up))
        self._segment = None
        self._lags[:] = 0
        if used_up is not None:
            self.is_over = self._mixture.rules.is_over(self.position, self._used_up())

    def _take(self, segment: Segment, num: int) -> Int64:
        """The next turns of a segment, up to `num`: fewer where a source is used up, or has no more fetched."""
        numbers, weights = np.array(segment.sources, np.int64), np.array(segment.weights, np.int64)
        self._fetch(numbers, weights, num)
        ahead = [self._ahead[number] for number in segment.sources]
        ends = np.cumsum([len(indices) for indices, _ in ahead])
        firsts = np.concatenate(([0], ends[:-1]))
        indices, lengths = (np.concatenate(columns) for columns in zip(*ahead, strict=True))
        lags, nexts, rows = self._lags[numbers], firsts.copy(), np.empty(num, np.int64)
        rows = rows[: native.interleave_lengths(lags, weights, lengths, nexts, ends, rows)]
        taken = nexts - firsts
        sums = np.concatenate(([0], np.cumsum(lengths)))
        self._lags[numbers] = lags
        self.places[numbers] += taken
        self.tokens[numbers] += sums[nexts] - sums[firsts]
        self.position += len(rows)
        for number, (own, own_lengths), count in zip(segment.sources, ahead, taken.tolist(), strict=True):
            self._ahead[number] = own[count:], own_lengths[count:]
        return indices[rows]

    def _fetch(self, numbers: Int64, weights: Int64, num: int) -> None:
        """Fetch samples of the sources that have few, for about `num` turns."""
        mixture = self._mixture
        rates = weights / mixture.mean_lengths[numbers]
        wanted = (rates * (1.02 * num / rates.sum())).astype(np.int64) + 32
        for number, most in zip(numbers.tolist(), wanted.tolist(), strict=True):
            indices, lengths = self._ahead[number]
            if len(indices) > most // 8:
                continue
            begin = int(self.places[number]) + len(indices)
            end = begin + most - len(indices)
            limit = mixture.rules.limits[number]
            if limit is not None:
                end = min(end, int(self._begin[number]) + limit)
            if end > begin:
                more, more_lengths = mixture.samples_at(number, np.arange(begin, end, dtype=np.int64))
                self._ahead[number] = np.concatenate((indices, more)), np.concatenate((lengths, more_lengths))


class _WalkedEpoch:
    """An epoch as far as it was walked: how far the sources are at the start of each of its blocks."""

    def __init__(self, begin: Int64) -> None:
        zeros = np.zeros(len(begin), np.int64)
        self.begin = begin
        self.reached = [_Progress(0, begin, zeros, zeros, None)]
        self.segments: list[Segment] = []  # those that have ended
        self.end: _Progress | None = None
        self._walk: _Walk | None = None  # from the last progress on

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_walk": None}

    def next_block(self, mixture: TokenMixture) -> Int64:
        """The samples of the block that follows the walked part of an epoch whose end is not known."""
        walk = self._walk or _Walk(mixture, self.begin, self.reached[-1])
        indices = walk.turns(_BLOCK)
        self.segments += walk.ended
        walk.ended = []
        if walk.is_over:
            self.end, self._walk = walk.progress, None
        else:
            self.reached.append(walk.progress)
            self._walk = walk
        return indices


class TokenMixture(SampleOrder):
    """The order of a mixture by tokens. From any thread. In memory it has 24 bytes a source for every 65,536 positions
    that were walked, of the last epochs, and some blocks. About 5 M positions a second. Indices are as in
    `SourceOrders`.
    """

    epochs_differ = True
    share_of = "tokens"
    knows_lengths = True

    def __init__(
        self,
        sources: Sequence[MixedSource],
        changes: Sequence[WeightChange],
        stop: Stop,
        *,
        orders: Sequence[SampleOrder],
        lengths: Int64,
    ) -> None:
        """`changes` begin with one at 0, in ascending order. `orders` are the orders of the sources. `lengths` are the
        lengths of all samples, source by source. Raises ConfigError if a source has a weight and no tokens, and as
        `num_positions` does."""
        self.rules = MixRules(sources, changes, stop)
        self.sources = self.rules.sources
        self._orders = SourceOrders(sources, orders)
        self._lengths = lengths
        firsts = np.cumsum([0, *(source.num_samples for source in sources)])
        sums = np.add.reduceat(lengths, firsts[:-1])
        self.mean_lengths = sums / np.diff(firsts)
        for number, source in enumerate(sources):
            if not sums[number] and any(change.weights[number] > 0 for change in changes):
                raise ConfigError(
                    f"sources.{source.name}: all {source.num_samples} samples are empty, so it has no share of the tokens: "
                    "leave it out, or mix by sample"
                )
        self._most_total = _MOST_LAG // max(1, int(lengths.max()))
        self._begins = [np.zeros(len(sources), np.int64)]  # the places of the sources at the begin of the first epochs
        self._courses: dict[int, _WalkedEpoch] = {}
        self._blocks: dict[tuple[int, int], Int64] = {}
        self._lock = threading.RLock()
        for change in self.rules.changes if stop == "never" else ():
            self.sources_from(change.at, ())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def for_thread(self) -> Self:
        return self

    def num_positions(self, epoch: int) -> int:
        """See `SampleOrder`. Raises ConfigError as `MixRules.sources_from` does."""
        return UNKNOWN if self.rules.stop == "never" else self._end_of(epoch).position

    def indices(self, epoch: int, positions: Int64) -> Int64:
        flat = positions.reshape(-1)
        indices = np.empty_like(flat)
        numbers = flat // _BLOCK
        for number in np.unique(numbers).tolist():
            block = self._block(epoch, number)
            chosen = numbers == number
            indices[chosen] = block[flat[chosen] - number * _BLOCK]
        return indices.reshape(positions.shape)

    def spans(self, name: str, epoch: int) -> list[tuple[int, int]]:
        number = [source.name for source in self.sources].index(name)
        if self.rules.stop == "never":
            ends = [*(change.at for change in self.rules.changes[1:]), UNKNOWN]
            pairs = zip(self.rules.changes, ends, strict=True)
            return [(change.at, end) for change, end in pairs if change.weights[number] > 0]
        self._end_of(epoch)
        return [(one.begin, one.end) for one in self._course(epoch).segments if number in one.sources]

    def places(self, epoch: int, position: int) -> list[int]:
        number, inside = divmod(position, _BLOCK)
        with self._lock:
            course = self._course(epoch)
            if not position:
                return [int(place) for place in course.begin]
            if course.end is not None and position >= course.end.position:
                return [int(place) for place in course.end.places]
            block = self._block(epoch, number)[:inside]
            counts = np.bincount(self._orders.sources_of(block), minlength=len(self.sources))
            return [int(place) for place in course.reached[number].places + counts]

    def course(self, epoch: int, position: int) -> list[Segment]:
        with self._lock:
            course = self._course(epoch)
            while course.end is None and course.reached[-1].position < position:
                course.next_block(self)
            last = course.reached[-1].segment if course.end is None else None
            return [one for one in [*course.segments, *([last] if last else [])] if one.begin < position]

    def explained(self) -> list[Mapping[str, object]]:
        """What the first epoch takes from each source, segment by segment, see `explained`. An epoch that has no end is
        walked up to its last change of weights."""
        with self._lock:
            course, last = self._course(0), self.rules.changes[-1].at
            if self.rules.stop != "never":
                end = self._end_of(0)
                return explained(self.sources, course.segments, end.places.tolist(), end.tokens.tolist())
            while course.reached[-1].position <= last:
                course.next_block(self)
            here = course.reached[-1]
            assert here.segment is not None
            segments = [*course.segments, here.segment]
            return explained(self.sources, segments, here.places.tolist(), here.tokens.tolist())

    def digests(self) -> dict[str, str]:
        return {"mix": self.rules.fingerprint("tokens"), "lengths": digest_of(self._lengths)}

    # ---------------------------------------------------------------------------------------- what a walk asks for

    def sources_from(self, position: int, used_up: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `MixRules.sources_from`. With weights of up to 2**60 divided by the longest sample the lags are in 64 bits."""
        return self.rules.sources_from(position, used_up, self._most_total)

    def samples_at(self, source: int, places: Int64) -> tuple[Int64, Int64]:
        """The indices and lengths of a source's samples at places of its own sequence: int64 [n] each."""
        indices = self._orders.indices(source, places)
        return indices, self.lengths_of(indices)

    def lengths_of(self, samples: Int64) -> Int64:
        lengths: Int64 = self._lengths[samples % len(self._lengths)]
        return lengths

    # ------------------------------------------------------------------------------------------------------ the plan

    def _block(self, epoch: int, number: int) -> Int64:
        with self._lock:
            block = self._blocks.get((epoch, number))
            if block is None:
                while len(self._blocks) >= _KEPT_BLOCKS:
                    del self._blocks[next(iter(self._blocks))]
                block = self._blocks[epoch, number] = self._made(self._course(epoch), number)
            return block

    def _made(self, course: _WalkedEpoch, number: int) -> Int64:
        while course.end is None and len(course.reached) <= number:
            course.next_block(self)
        if course.end is None and len(course.reached) == number + 1:
            return course.next_block(self)
        return _Walk(self, course.begin, course.reached[number]).turns(_BLOCK)

    def _course(self, epoch: int) -> _WalkedEpoch:
        with self._lock:
            course = self._courses.get(epoch)
            if course is None:
                begin = self._begin_of(epoch)  # it may walk the epochs before
                while len(self._courses) >= _KEPT_EPOCHS:
                    del self._courses[next(iter(self._courses))]
                course = self._courses[epoch] = _WalkedEpoch(begin)
            return course

    def _begin_of(self, epoch: int) -> Int64:
        """The places at which the sources begin an epoch: where the last one left them."""
        rules = self.rules
        if rules.stop == "never":
            return self._begins[0]
        if rules.stop == "all" and all(limit is not None and limit >= 0 for limit in rules.limits):
            limits = np.array(rules.limits, np.int64)
            if all(weight > 0 for weight in rules.changes[-1].weights):  # all are used up in every epoch
                return epoch * limits
        while len(self._begins) <= epoch:
            self._begins.append(self._end_of(len(self._begins) - 1).places)
        return self._begins[epoch]

    def _end_of(self, epoch: int) -> _Progress:
        with self._lock:
            course = self._course(epoch)
            while course.end is None:
                course.next_block(self)
            return course.end
