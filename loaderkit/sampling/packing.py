"""Packs samples of unequal length into sequences of one length: decides which samples, or pieces of them, are in every
sequence.

    positions of an epoch ──windows──> samples ──lengths──> pieces ──best fit, decreasing──> bins ──by cost──> sequences

A window is `window` consecutive positions of the epoch's order. Its samples are cut into pieces of at most `length`, and the
pieces packed into bins. The bins of one window, or of a span of several where they have few, are put into an order. The
sequences of an epoch are the sequences of its spans, one behind another, so sequence p is a pure function of (seed,
epoch, p), whatever the number of ranks. An epoch's plan is the number of bins of every span; what is in the bins of a
span is computed when it is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from loaderkit import native
from loaderkit.sampling.order import Int64, Reads, SampleOrder, WrappedOrder, digest_of
from loaderkit.sampling.random import Bijection, key_of

_COUNTED_AT_ONCE = 400_000  # samples
_KEPT_SPANS, _KEPT_EPOCHS, _KEPT_TAKEN = 4, 3, 16
_SWEEP = 2048  # sequences
_READ_AT_ONCE = 256  # sequences
_MOST_WINDOWS = 64  # of a span


class Pieces(NamedTuple):
    """What some sequences hold, int64 [pieces]: of each of `samples`, `lengths` tokens from number `firsts` on, at
    `places` in the sequences laid end to end. The pieces of sequence i are those from bounds[i] to bounds[i + 1]: int64
    [sequences + 1]."""

    samples: Int64
    firsts: Int64
    lengths: Int64
    places: Int64
    bounds: Int64

    def take(self, sequences: Int64, length: int) -> Pieces:
        """The pieces of some of the sequences, which have `length` tokens each."""
        numbers = np.frombuffer(native.take_pieces(*self, sequences, length), np.int64)
        num = (len(numbers) - len(sequences) - 1) // 4
        columns = numbers[: 4 * num].reshape(4, num)
        return Pieces(columns[0], columns[1], columns[2], columns[3], numbers[4 * num :])


Fill = Callable[[Int64, int, Int64, Int64, Int64], None]
"""(sizes of 0 to a capacity, the capacity, bounds of windows, out: the bin of every size in its window, -1 for 0, out: the bins
of every window): puts the sizes of windows into bins. int64: [n], [windows + 1], [n], [windows]."""


class PackedOrder(WrappedOrder):
    """The order of packed sequences. From any thread. In memory it has the lengths, 8 bytes for each span and epoch,
    and some spans."""

    unit = "sequences"
    length: int

    def __init__(
        self,
        order: SampleOrder,
        lengths: Int64,
        *,
        length: int,
        window: int,
        seed: int,
        is_even: bool,
        keeps_order: bool = False,
        fill: Fill = native.best_fit,
    ) -> None:
        """`lengths`: of every sample of `order`, by its index (in a mixture modulo their number). `is_even`:
        neighbouring sequences cost about the same in attention, so that ranks take equally long. Otherwise their order
        is random, or, with `keeps_order`, the order of the bins. `fill` puts pieces into bins."""
        super().__init__(order.for_thread())  # which is called under the lock
        self.length = length
        self._lengths = lengths
        self._window = window
        self._seed = seed
        self._fill = fill
        self._arrange: BinOrder = _even_order if is_even else _same_order if keeps_order else _random_order
        num_bins = max(1.0, float(lengths.mean()) * window / length)  # of a window, about
        num_windows = min(_MOST_WINDOWS, max(1, round(2 * _SWEEP / num_bins))) if is_even else 1
        self._span = num_windows * window
        self._starts: dict[int, Int64] = {}  # by epoch
        self._spans: dict[tuple[int, int], Pieces] = {}
        self._taken: dict[tuple[int, bytes], Pieces] = {}  # of `pieces`
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_starts": {}, "_spans": {}, "_taken": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def num_positions(self, epoch: int) -> int:
        return int(self._starts_of(epoch)[-1])

    def positions_before(self, epoch: int, position: int) -> int:
        num_spans = int(np.searchsorted(self._starts_of(epoch), position, side="left"))
        return min(num_spans * self._span, self.num_packed(epoch))

    def keys(self, epoch: int, indices: Int64, keys_of: Callable[[Int64], list[str]]) -> list[str]:
        """For every sequence the keys of its documents, and for a piece also its tokens: "4 17[8192:9000] 5"."""
        pieces = self.pieces(epoch, indices)
        samples, firsts, lengths = pieces.samples, pieces.firsts, pieces.lengths
        keys = keys_of(samples)
        for row in (lengths < self.lengths_of(samples)).nonzero()[0].tolist():
            keys[row] += f"[{firsts[row]}:{firsts[row] + lengths[row]}]"
        ends = pieces.bounds.tolist()
        return [" ".join(keys[begin:end]) for begin, end in pairwise(ends)]

    def reads(self, epoch: int, positions: Int64, start: int, world_size: int) -> Iterator[Reads]:
        sequences = positions % self.num_positions(epoch)
        for first in range(0, len(sequences), _READ_AT_ONCE):
            pieces = self.pieces(epoch, sequences[first : first + _READ_AT_ONCE])
            counts = np.diff(pieces.bounds)
            slots = np.repeat(np.arange(len(counts)), counts)
            yield Reads(pieces.samples, slots, len(counts), (pieces.firsts, pieces.lengths))

    def pieces(self, epoch: int, sequences: Int64) -> Pieces:
        """What sequences of an epoch hold: int64 [n], each in [0, num_samples(epoch))."""
        key = epoch, sequences.tobytes()
        pieces = self._taken.get(key)  # a batch's are asked for twice: for its tokens and for its keys
        if pieces is None:
            pieces = self._pieces(epoch, sequences)
            with self._lock:
                _keep(self._taken, key, pieces, _KEPT_TAKEN)
        return pieces

    def _pieces(self, epoch: int, sequences: Int64) -> Pieces:
        starts, numbers = self._starts_of(epoch), sequences.tolist()
        first, last = min(numbers, default=0), max(numbers, default=0)
        span = int(starts.searchsorted(first, "right")) - 1
        if last < starts[span + 1]:
            return self._span_of(epoch, span).take(sequences - starts[span], self.length)
        spans = np.searchsorted(starts, sequences, side="right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(spans)) + 1).tolist(), len(spans)]
        parts = []
        for begin, end in pairwise(bounds):
            span = int(spans[begin])
            part = self._span_of(epoch, span).take(sequences[begin:end] - starts[span], self.length)
            parts.append(part._replace(places=part.places + begin * self.length))
        samples, firsts, lengths, places = (
            np.concatenate(column) for column in zip(*(part[:4] for part in parts), strict=True)
        )
        counts = np.concatenate([np.diff(part.bounds) for part in parts])
        return Pieces(samples, firsts, lengths, places, np.concatenate(([0], np.cumsum(counts))))

    def num_before(self, epoch: int, position: int) -> tuple[int, int]:
        # All sequences of earlier spans come before this one; sequences of its own span have samples from anywhere in
        # the span.
        starts = self._starts_of(epoch)
        number = int(np.searchsorted(starts, position, side="right")) - 1
        begin = min(number * self._span, num_positions := self.num_packed(epoch))
        if number + 1 == len(starts):
            return begin, begin
        end = min(begin + self._span, num_positions)
        return begin, begin + (end - begin) * (position - int(starts[number])) // int(
            starts[number + 1] - starts[number]
        )

    def lengths_of(self, samples: Int64) -> Int64:
        lengths: Int64 = self._lengths[samples % len(self._lengths)]
        return lengths

    def digests(self) -> dict[str, str]:
        return {**self._inner.digests(), "lengths": digest_of(self._lengths)}

    def _starts_of(self, epoch: int) -> Int64:
        """The first sequence of every span and, last, the number of sequences: int64 [spans + 1]."""
        with self._lock:
            starts = self._starts.get(epoch)
            if starts is None:
                starts = self._count(epoch)
                _keep(self._starts, epoch, starts, _KEPT_EPOCHS)
            return starts

    def num_packed(self, epoch: int) -> int:
        """The number of samples of an epoch that are packed, including samples of length 0, which are in no sequence."""
        return self._inner.num_positions(epoch)

    def _count(self, epoch: int) -> Int64:
        counts = []
        step = max(1, _COUNTED_AT_ONCE // self._span) * self._span
        num_positions = self.num_packed(epoch)
        for begin in range(0, num_positions, step):
            end = min(begin + step, num_positions)
            whole, _, _, of_windows = self._packed(self._lengths_at(epoch, begin, end)[1])
            of_windows += np.add.reduceat(whole, np.arange(0, end - begin, self._window))
            counts.append(np.add.reduceat(of_windows, np.arange(0, len(of_windows), self._span // self._window)))
        return np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int64)

    def _packed(self, lengths: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """For windows of samples of these lengths: how many whole sequences each sample fills, the length of the rest,
        the bin of the rest in its window, or -1; and the number of these bins in every window."""
        whole = np.maximum(lengths - 1, 0) // self.length  # of a multiple the last piece is a rest like any
        rest = lengths - whole * self.length
        bounds = np.append(np.arange(0, len(lengths), self._window, dtype=np.int64), len(lengths))
        bins, counts = np.empty(len(lengths), np.int64), np.empty(len(bounds) - 1, np.int64)
        self._fill(rest, self.length, bounds, bins, counts)
        return whole, rest, bins, counts

    def _lengths_at(self, epoch: int, begin: int, end: int) -> tuple[Int64, Int64]:
        """The samples at positions [begin, end), and their lengths."""
        samples = self._inner.indices(epoch, np.arange(begin, end, dtype=np.int64))
        return samples, self.lengths_of(samples)

    def _span_of(self, epoch: int, number: int) -> Pieces:
        with self._lock:
            pieces = self._spans.get((epoch, number))
            if pieces is None:
                pieces = self._pack(epoch, number)
                _keep(self._spans, (epoch, number), pieces, _KEPT_SPANS)
            return pieces

    def _pack(self, epoch: int, number: int) -> Pieces:
        begin = number * self._span
        end = min(begin + self._span, self.num_packed(epoch))
        samples, lengths = self._lengths_at(epoch, begin, end)
        whole, rest, bins, counts = self._packed(lengths)
        num_bins = int(counts.sum())
        bins += np.repeat(np.cumsum(counts) - counts, self._window)[: end - begin]
        has_rest = rest > 0
        num_pieces = whole + has_rest
        last = np.cumsum(num_pieces)[has_rest] - 1  # the pieces that share their bins
        order = np.repeat(np.arange(end - begin), num_pieces)  # of every piece its sample in the span
        firsts = _numbers_in_runs(num_pieces) * self.length
        pieces, bins_of = np.full(len(order), self.length), np.empty(len(order), np.int64)
        is_whole = np.ones(len(order), np.bool_)
        pieces[last], bins_of[last], is_whole[last] = rest[has_rest], bins[has_rest], False
        bins_of[is_whole] = num_bins + np.arange(len(order) - len(last))
        key = key_of("pack", self._seed, epoch, number)
        sequences = self._arrange(bins_of, pieces, key)[bins_of]
        num_sequences = num_bins + len(order) - len(last)
        by_sequence = _stable_order(sequences, num_sequences)
        firsts, pieces, numbers = firsts[by_sequence], pieces[by_sequence], sequences[by_sequence]
        bounds = np.concatenate(([0], np.cumsum(np.bincount(sequences, minlength=num_sequences))))
        ends = np.concatenate(([0], np.cumsum(pieces)))
        padding = np.arange(num_sequences) * self.length - ends[bounds[:-1]]  # in all sequences before each
        return Pieces(samples[order[by_sequence]], firsts, pieces, ends[:-1] + padding[numbers], bounds)


def _keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value


def _numbers_in_runs(counts: Int64) -> Int64:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _stable_order(numbers: Int64, below: int) -> Int64:
    """The places of numbers in [0, below) in ascending order; equal numbers stay in order."""
    # NumPy sorts 16 bits by radix, in a tenth of the time.
    return np.argsort(numbers.astype(np.uint16) if below <= 1 << 16 else numbers, kind="stable")


BinOrder = Callable[[Int64, Int64, int], Int64]
"""(bin of every piece, its length, key) -> the place of every bin: int64 [bins]."""


def _shuffled(num: int, key: int) -> Int64:
    return Bijection(num, key)(np.arange(num, dtype=np.int64)) if num else np.zeros(0, np.int64)


def _inverse(permutation: Int64) -> Int64:
    places = np.empty_like(permutation)
    places[permutation] = np.arange(len(permutation))
    return places


def _same_order(bins: Int64, lengths: Int64, key: int) -> Int64:
    return np.arange(int(bins.max(initial=-1)) + 1)


def _random_order(bins: Int64, lengths: Int64, key: int) -> Int64:
    return _shuffled(int(bins.max(initial=-1)) + 1, key)


def _even_order(bins: Int64, lengths: Int64, key: int) -> Int64:
    """Bins by cost, the sum of squares, in sweeps of about 2,048: one from the cheapest to the dearest, the next back, and so
    on.

    Neighbours cost about the same, also where a sweep turns and from one span to the next. So ranks that take them in
    turns take equally long, however many they are. Each sweep has bins of all costs, drawn by `key` from bins that cost
    about the same.
    """
    costs = np.bincount(bins, weights=lengths.astype(np.float64) ** 2)
    num = len(costs)
    num_sweeps = 2 * max(1, round(num / (2 * _SWEEP)))
    by_chance = _inverse(_shuffled(num, key))
    by_cost = by_chance[np.argsort(costs[by_chance], kind="stable")]
    numbers = np.arange(num)
    # Of the bins of a group each goes to another sweep.
    by_chance = _inverse(_shuffled(num, key + 1))
    dealt = by_chance[_stable_order(by_chance // num_sweeps, num)]
    sweep = np.empty(num, np.int64)
    sweep[dealt] = numbers % num_sweeps
    return _inverse(by_cost[np.argsort(sweep * num + np.where(sweep % 2, num - 1 - numbers, numbers))])
