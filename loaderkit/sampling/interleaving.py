"""Interleaves sources by weight: among any first n turns the number of a source's turns is within one of its share.

The j-th turn of a source with the share w may come from position floor((j - 1) / w) on and must have come by position
ceil(j / w): then its number of turns differs from n w by less than 1, at every n. Among the sources that may have a turn, the
one whose turn must come first has it. This meets all deadlines (Baruah, Cohen, Plaxton, Varvel: Proportionate Progress, 1996;
Tijdeman: The Chairman Assignment Problem, 1980, has the bound), for any number of sources and any shares.

The rule walks from turn to turn, but it forgets: whatever turns are pending when it begins, 1 / (the least share) turns later
it does what it would have done from position 0 on. So a walk of that length leads to any position, and positions are made in
blocks. With shares that are fractions of a small common denominator, all blocks are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit import native

Int64 = NDArray[np.int64]
LEAST_SHARE = 1e-6  # a walk takes 1 / share turns
MOST_TOTAL = 1 << 60
_LONGEST_PERIOD = 1 << 20  # 6 MiB
_BLOCK = 1 << 16


def whole_weights(weights: Sequence[Fraction], most_total: int = MOST_TOTAL) -> list[int]:
    """Whole numbers in the proportions of `weights` (none negative, one above 0), with a sum of at most `most_total`.

    With 2**60 they are exact for decimals of up to 17 digits; others are rounded to 2**-60 of the sum, a millionth of a sample
    at position 10**12.
    """
    scale = lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    common = gcd(*numbers)
    numbers = [number // common for number in numbers]
    if sum(numbers) > most_total:
        total = sum(numbers)
        numbers = [round(Fraction(number, total) * (most_total - len(numbers))) for number in numbers]
    common = gcd(*numbers)
    return [number // common for number in numbers]


class _Turns(NamedTuple):
    """Consecutive turns: the source of each, the number of that source's earlier turns in the block, and the turns of
    all sources before the block."""

    sources: NDArray[np.uint16]
    places: NDArray[np.int32]
    before: Int64


class Interleaving:
    """The source whose turn each position is, and the number of that turn among the source's own: functions of the
    position alone, in bounded memory.

    One thread at a time may call it. 5 M positions a second with 50 sources, more with fewer or where they repeat.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """`weights` are above 0, with a sum of at most 2**60 and none below `LEAST_SHARE` of it."""
        self._weights = np.array(weights, np.int64)
        self._total = sum(weights)
        self._period = self._total if self._total <= _LONGEST_PERIOD else None
        self._size = self._period or _BLOCK
        self._memory = self._total // min(weights) + 2  # turns after which the past is forgotten
        self._blocks: dict[int, _Turns] = {}  # the last two
        self._following: tuple[int, Int64] = (0, np.zeros(len(weights), np.int64))  # a block, and the lags before it

    def at(self, positions: Int64) -> tuple[Int64, Int64]:
        """The source of every position, and its number of turns before: int64, same shape."""
        flat = positions.reshape(-1)
        sources, places = np.empty_like(flat), np.empty_like(flat)
        numbers = flat // self._size
        distinct = np.unique(numbers) if self._period is None else [0]
        for number in distinct:
            block = self._block(int(number))
            chosen = slice(None) if len(distinct) == 1 else np.flatnonzero(numbers == number)
            turns = flat[chosen] - numbers[chosen] * self._size
            sources[chosen] = block.sources[turns]
            places[chosen] = block.places[turns] + block.before[sources[chosen]]
        if self._period is not None:
            places += numbers * self._weights[sources]
        return sources.reshape(positions.shape), places.reshape(positions.shape)

    def counts(self, position: int) -> list[int]:
        """The number of turns of every source before `position`."""
        number, turn = divmod(position, self._size)
        block = self._block(number if self._period is None else 0)
        inside = np.bincount(block.sources[:turn], minlength=len(self._weights)).tolist()
        passed = block.before.tolist() if self._period is None else [number * int(weight) for weight in self._weights]
        return [before + more for before, more in zip(passed, inside, strict=True)]

    def window_of(self, source: int, number: int) -> tuple[int, int]:
        """(lo, hi): the position behind the turn `number` (from 1) of a source is in [lo, hi]."""
        weight = int(self._weights[source])
        return (number - 1) * self._total // weight + 1, -(-number * self._total // weight)

    def position_after(self, source: int, number: int) -> int:
        """The position behind the turn `number` (from 1) of a source."""
        lo, hi = self.window_of(source, number)
        sources, places = self.at(np.arange(lo - 1, hi, dtype=np.int64))
        return lo + int(np.flatnonzero((sources == source) & (places == number - 1))[0])

    def _block(self, number: int) -> _Turns:
        block = self._blocks.get(number)
        if block is None:
            block = self._made(number)
            self._blocks = {at: kept for at, kept in self._blocks.items() if at == self._last}
            self._blocks[number] = block
        self._last = number
        return block

    _last = 0

    def _made(self, number: int) -> _Turns:
        first = number * self._size
        lags = self._following[1] if self._following[0] == number else self._lags_at(first)
        # The turns before are what the share of a source has in excess of its lag.
        before = [
            (first * weight - lag) // self._total
            for weight, lag in zip(self._weights.tolist(), lags.tolist(), strict=True)
        ]
        sources, places = self._walk(lags, self._size)
        self._following = number + 1, lags
        return _Turns(sources.astype(np.uint16), places.astype(np.int32), np.array(before, np.int64))

    def _lags_at(self, position: int) -> Int64:
        """For each source: position x weight - turns before x total, which is how many turns it lacks, times the total."""
        start = max(0, position - self._memory)
        lags = [start * weight % self._total for weight in self._weights.tolist()]
        # Any of the sources may be ahead, in the right number.
        for source in sorted(range(len(lags)), key=lambda source: -lags[source])[: sum(lags) // self._total]:
            lags[source] -= self._total
        found = np.array(lags, np.int64)
        for begin in range(start, position, _BLOCK):
            self._walk(found, min(_BLOCK, position - begin))
        return found

    def _walk(self, lags: Int64, num_turns: int) -> tuple[Int64, Int64]:
        """The next turns after those that led to `lags`, which are updated."""
        sources, places = np.empty(num_turns, np.int64), np.empty(num_turns, np.int64)
        native.interleave(lags, self._weights, sources, places)
        return sources, places
