"""Keyed random numbers: keys, uniform draws, permutations and generators.

They are pure functions of integers, without state, vectorised with NumPy. Changing any constant here changes the order
of every data set and the augmentation of every sample, and so breaks saved states: the test vectors in
`tests/sampling/test_random.py` are frozen.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.splitmix import GOLDEN, MASK, U64, mix

_11, _TWO_POW_MINUS_53 = np.array(11, np.uint64), np.array(2.0**-53)


def key_of(*parts: int | str) -> int:
    """A 64-bit key from any integers and texts; the same on every machine and in every version of Python."""
    assert all(type(part) in (int, str) for part in parts), "numbers that print differently would be other keys"
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8, person=b"loaderkit")
    return int.from_bytes(digest.digest(), "little")


def uniforms(key: int, indices: NDArray[np.int64], num_draws: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1): float64 [len(indices), num_draws], row i a function of (key, indices[i]) alone.

    Draw j of sample i is output j of SplitMix64 seeded with a mix of the key and i, so it depends neither on the order of the
    samples nor on the other samples of the call.
    """
    seeds = indices.astype(np.uint64)
    seeds *= GOLDEN
    seeds += np.uint64(key)
    mix(seeds)
    bits = mix(seeds[:, None] + _counters(num_draws))
    bits >>= _11
    numbers = bits.astype(np.float64)
    numbers *= _TWO_POW_MINUS_53
    return numbers


@cache
def _counters(num_draws: int) -> U64:
    return np.arange(1, num_draws + 1, dtype=np.uint64) * GOLDEN


class Bijection:
    """A keyed permutation of [0, n), evaluated anywhere in O(1) memory.

    A generalised Feistel network on Z_a x Z_b with a b >= n and both near the square root of n, walking the cycle until
    the value falls below n (Black and Rogaway: Ciphers with Arbitrary Finite Domains, 2002). As a b - n < a, a value is
    outside with a probability under 1 / sqrt(n), where a network on bits walks up to three quarters of the time.

    `size` and `key` may be arrays of one shape with the positions: then every position has a permutation of its own.
    """

    def __init__(self, size: int | NDArray[np.int64], key: int | U64) -> None:
        sizes = np.asarray(size, dtype=np.int64)
        if sizes.size and int(sizes.min()) < 1:
            raise ValueError("a permutation needs at least one element")
        if sizes.size and int(sizes.max()) > 1 << 60:
            raise ValueError("more than 2**60 elements")
        a = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.int64)
        self._size = sizes
        self._a = a
        self._b = -(-sizes // a)
        self._key = np.asarray(key, dtype=np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The images of `positions` (int64, any shape, each below its size): int64 of the same shape."""
        values = positions.flatten()
        size, a, b = map(np.ascontiguousarray, (self._size, self._a, self._b))
        native.permute(values, size, a, b, np.ascontiguousarray(self._key))
        return values.reshape(positions.shape)


def generator(key: int, index: int) -> np.random.Generator:
    """NumPy's Philox generator for one sample: the same stream whenever and wherever the sample is processed."""
    return np.random.Generator(np.random.Philox(key=np.array([key & MASK, index & MASK], np.uint64)))
