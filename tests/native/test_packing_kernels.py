"""The kernels of packing, against their twins in Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from loaderkit import native
from loaderkit.native import fallback

CAPACITIES = (1, 5, 63, 64, 65, 100, 4096, 8192, 300_000)


def test_best_fit_is_the_same_without_the_c_module(rng: random.Random) -> None:
    draw = np.random.default_rng(rng.randrange(2**32))
    for number in range(200):
        capacity, num = int(draw.choice(CAPACITIES)), int(draw.integers(1, 300))
        largest = capacity if number % 2 else max(1, capacity // int(draw.integers(1, 30)))
        sizes = draw.integers(0, largest + 1, num)
        bounds = np.unique(np.concatenate(([0, num], draw.integers(0, num + 1, 3))))
        results = []
        for module in (native, fallback):
            bins, counts = np.empty(num, np.int64), np.empty(len(bounds) - 1, np.int64)
            module.best_fit(sizes, capacity, bounds, bins, counts)
            results.append((bins.tolist(), counts.tolist()))
        assert results[0] == results[1]


def test_marks_are_the_same_without_the_c_module(rng: random.Random) -> None:
    draw = np.random.default_rng(rng.randrange(2**32))
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        length = 40
        lengths = draw.integers(0, 9, 23)
        bounds = np.array([0, 4, 4, 9, 14, 18, 23])
        results = []
        for module in (native, fallback):
            fields = [np.full((6, length), 7, kind) for kind in (np.int32, np.int32, dtype)]
            module.mark_documents(lengths, bounds, length, *(field.reshape(-1).view(np.uint8).data for field in fields))
            results.append([field.tolist() for field in fields])
        assert results[0] == results[1]


@pytest.mark.skipif(not native.HAS_KERNELS, reason="there is no C module")
def test_what_does_not_fit_is_refused() -> None:
    out = np.empty(2, np.int64), np.empty(1, np.int64)
    for sizes, capacity, bounds in (
        ([1, 9], 8, [0, 2]),
        ([-1, 1], 8, [0, 2]),
        ([1, 1], 0, [0, 2]),
        ([1, 1], 8, [0, 3]),
    ):
        with pytest.raises(ValueError, match="capacity"):
            native.best_fit(np.array(sizes), capacity, np.array(bounds), *out)
    field = np.zeros((1, 4), np.int32).reshape(-1).view(np.uint8).data
    for lengths, firsts in (([3, 2], [0, 2]), ([-1], [0, 1]), ([1], [0, 2])):
        with pytest.raises(ValueError, match="documents"):
            native.mark_documents(np.array(lengths), np.array(firsts), 4, field, field, field)
