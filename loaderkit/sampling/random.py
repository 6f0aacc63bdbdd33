"""Arithmetic that stands in for lists and generators: keyed bijections and keyed random numbers.

Both are pure functions of integers, vectorised with NumPy, and need no memory of what came before. Changing any constant
here changes the order of every data set and the augmentation of every sample, and so breaks saved states: the test
vectors in `tests/sampling/test_random.py` are frozen.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
MASK = (1 << 64) - 1
_TWO_POW_MINUS_53 = 2.0**-53


def key_of(*parts: int | str) -> int:
    """A 64-bit key from any integers and texts; the same on every machine and in every version of Python."""
    assert all(type(part) in (int, str) for part in parts), "numbers that print differently would be other keys"
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8, person=b"loaderkit")
    return int.from_bytes(digest.digest(), "little")


def mix(values: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), in place.

    A bijection of 64-bit integers in which every output bit depends on every input bit.
    """
    values ^= values >> np.uint64(30)
    values *= MIX_1
    values ^= values >> np.uint64(27)
    values *= MIX_2
    values ^= values >> np.uint64(31)
    return values


def uniforms(key: int, indices: NDArray[np.int64], num_draws: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1): float64 [len(indices), num_draws], row i a function of (key, indices[i]) alone.

    Draw j of sample i is output j of SplitMix64 seeded with a mix of the key and i, so it does not matter in which order
    or in what company samples are drawn.
    """
    seeds = indices.astype(np.uint64)
    seeds *= GOLDEN
    seeds += np.uint64(key)
    mix(seeds)
    counters = np.arange(1, num_draws + 1, dtype=np.uint64) * GOLDEN
    bits = mix(seeds[:, None] + counters[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * _TWO_POW_MINUS_53


def generator(key: int, index: int) -> np.random.Generator:
    """NumPy's Philox generator for one sample: the same stream whenever and wherever the sample is processed."""
    return np.random.Generator(np.random.Philox(key=np.array([key & MASK, index & MASK], np.uint64)))
