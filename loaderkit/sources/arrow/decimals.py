"""Decimals as numbers, where nothing is lost: float64 for up to 15 digits, from which the decimal can be restored, and
int64 for whole numbers. Any other decimal makes its sample bad, rather than giving another number."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DIGITS = 15  # that every float64 holds: DBL_DIG of C
_EXACT = 10**_DIGITS
_MOST_SCALE = 22  # 10^22 is the last power of ten that float64 has exactly, so that dividing by it rounds once
_LARGEST_SCALE = 76  # of a decimal256
_INT64 = np.iinfo(np.int64)


def decimal_numbers(words: NDArray[Any], scale: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """The numbers of decimals whose digits are whole numbers in two's complement, [n, words] with the lowest word first; with a
    `scale` above 0 as float64, else as int64. And True for decimals that are represented, bool [n], or None if all are."""
    lowest = words[:, 0].astype(np.int64)
    fits = (words[:, 1:] == (words[:, :1] >> (8 * words.itemsize - 1))).all(axis=1)
    is_held = fits if scale == 0 else fits & (lowest > -_EXACT) & (lowest < _EXACT)
    if scale > _MOST_SCALE or scale < 0:
        is_held = np.zeros(len(words), np.bool_)
    dtype = np.float64 if scale > 0 else np.int64
    numbers: NDArray[Any] = np.where(is_held, lowest, 0).astype(dtype)
    if scale > 0:
        numbers = numbers / 10.0 ** min(scale, _MOST_SCALE)
    if is_held.all():
        return numbers, None
    is_held = is_held.copy()
    width = 8 * words.itemsize
    for row in np.flatnonzero(~is_held).tolist():
        high_first = words[row].tolist()[::-1]
        whole = high_first[0]
        for word in high_first[1:]:
            whole = (whole << width) | (word & ((1 << width) - 1))
        # From text, as arithmetic of decimals rounds; a damaged scale would make a number of gigabytes.
        number = number_of(Decimal(f"{whole}E{-scale}"), is_whole=scale <= 0) if abs(scale) <= _LARGEST_SCALE else None
        if number is not None:
            numbers[row], is_held[row] = number, True
    return numbers, None if is_held.all() else is_held


def number_of(decimal: Decimal, *, is_whole: bool) -> float | int | None:
    """A decimal as a float, or with `is_whole` an int; None if that would lose a digit."""
    if not decimal.is_finite():
        return None
    if is_whole:
        whole = int(decimal)
        return whole if _INT64.min <= whole <= _INT64.max else None
    digits = "".join(map(str, decimal.as_tuple().digits)).strip("0")
    return float(decimal) if len(digits) <= _DIGITS else None
