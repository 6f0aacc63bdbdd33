"""A permutation of n numbers that is computed, not stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.splitmix import U64


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
