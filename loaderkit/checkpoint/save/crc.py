"""CRC-32 of bytes that are hashed piece by piece, in any order, by several threads."""

from __future__ import annotations

import threading
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zip archives, its bits reversed: the highest bit is the coefficient of x^0
_ONE = 1 << 31


def combine(first: int, second: int, num_bytes: int) -> int:
    """The CRC-32 of two pieces in a row, of which the second has `num_bytes`."""
    return _multiply(_shift_by(num_bytes), first) ^ second if first else second


@lru_cache(maxsize=1024)  # most pieces have the same length
def _shift_by(num_bytes: int) -> int:
    """x^(8 num_bytes) modulo the polynomial."""
    power, result, exponent = _ONE >> 8, _ONE, num_bytes  # x^8
    while exponent:
        if exponent & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


class PieceCrc:
    """The CRC-32 of `num_bytes` bytes, from the CRC-32s of pieces of them."""

    def __init__(self, num_bytes: int) -> None:
        self._num_missing = num_bytes
        self._pieces: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """True if all pieces are there."""
        return self._num_missing == 0

    def add(self, start: int, num_bytes: int, crc: int) -> None:
        """Add the piece from `start` on."""
        with self._lock:
            self._pieces[start] = num_bytes, crc
            self._num_missing -= num_bytes

    def value(self) -> int:
        """The CRC-32 of all bytes."""
        assert self.is_whole
        result = 0
        for _, (num_bytes, crc) in sorted(self._pieces.items()):
            result = combine(result, crc, num_bytes)
        return result
