"""Ways to damage a file, for readers that have to refuse it in words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def truncate(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data) + 1)]


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    found = bytearray(data)
    for place in rng.integers(len(data), size=rng.integers(1, 9)):
        found[place] ^= 1 << int(rng.integers(8))
    return bytes(found)


def change_header(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes of the first few hundred become those that lengths, sizes and counts are misunderstood by."""
    found = bytearray(data)
    for place in rng.integers(min(len(data), int(rng.choice([32, 128, 700]))), size=rng.integers(1, 4)):
        found[place] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF, int(rng.integers(256))])
    return bytes(found)


def run_of_one(data: bytes, rng: np.random.Generator) -> bytes:
    start, end = sorted(int(place) for place in rng.integers(len(data) + 1, size=2))
    return data[:start] + bytes([int(rng.choice([0, 0, 0xFF]))]) * (end - start) + data[end:]


def splice(data: bytes, rng: np.random.Generator) -> bytes:
    """A piece of it goes, comes twice, or stands somewhere else."""
    start, end, place = (int(n) for n in rng.integers(len(data) + 1, size=3))
    start, end = min(start, end), max(start, end)
    rest = data[:start] + data[end:] if rng.random() < 0.5 else data
    return rest[:place] + (data[start:end] if rng.random() < 0.7 else b"") + rest[place:]


OPERATORS: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    truncate, flip, change_header, run_of_one, splice,
)  # fmt: skip


def mutations(data: bytes, rng: np.random.Generator) -> bytes:
    """The data damaged in one way, or in two."""
    for _ in range(rng.integers(1, 3)):
        if data:
            data = OPERATORS[rng.integers(len(OPERATORS))](data, rng)
    return data
