"""Mixes 64-bit integers: the arithmetic behind the order of samples and their random draws.

Changing any constant changes the order of every data set and the augmentation of every sample, and so breaks saved states:
the test vectors in `tests/sampling/test_random.py` are frozen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


def _constant(number: int) -> U64:
    """As an array: NumPy takes half again as long to combine an array with a scalar."""
    return np.array(number, np.uint64)


GOLDEN = _constant(0x9E3779B97F4A7C15)
MIX_1 = _constant(0xBF58476D1CE4E5B9)
MIX_2 = _constant(0x94D049BB133111EB)
MASK = (1 << 64) - 1
_27, _30, _31 = _constant(27), _constant(30), _constant(31)


def mix(values: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), in place.

    A bijection of 64-bit integers in which every output bit depends on every input bit.
    """
    values ^= values >> _30
    values *= MIX_1
    values ^= values >> _27
    values *= MIX_2
    values ^= values >> _31
    return values
