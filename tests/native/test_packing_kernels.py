"""The kernels of packing, against their twins in Python."""

from __future__ import annotations

import random

import kernel_twins
import numpy as np
import pytest

from loaderkit import native

CAPACITIES = (1, 5, 63, 64, 65, 100, 4096, 8192, 300_000)


def test_best_fit_is_that_of_its_twin(rng: random.Random) -> None:
    draw = np.random.default_rng(rng.randrange(2**32))
    for number in range(200):
        capacity, num = int(draw.choice(CAPACITIES)), int(draw.integers(1, 300))
        largest = capacity if number % 2 else max(1, capacity // int(draw.integers(1, 30)))
        sizes = draw.integers(0, largest + 1, num)
        bounds = np.unique(np.concatenate(([0, num], draw.integers(0, num + 1, 3))))
        results = []
        for module in (native, kernel_twins):
            bins, counts = np.empty(num, np.int64), np.empty(len(bounds) - 1, np.int64)
            module.best_fit(sizes, capacity, bounds, bins, counts)
            results.append((bins.tolist(), counts.tolist()))
        assert results[0] == results[1]


def test_marks_are_those_of_the_twin(rng: random.Random) -> None:
    draw = np.random.default_rng(rng.randrange(2**32))
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        for length in (40, 37, 1000):
            lengths = draw.integers(0, length // 5 + 1, 23)
            lengths[2] = length - lengths[:2].sum() - lengths[3]  # the first bin is full
            bounds = np.array([0, 4, 4, 9, 14, 18, 23])
            is_wanted = draw.random(2) < 0.7
            results = []
            for module in (native, kernel_twins):
                places, numbers = (np.full((6 * wanted, length), 7, np.int32) for wanted in is_wanted)
                tokens, starts, ends = np.full((6, length), 7, dtype), np.zeros(23 + 6, np.int32), np.zeros(6, np.int64)
                module.mark_documents(lengths, bounds, length, places, numbers, tokens, 3 * length, starts, ends)
                results.append([array.tolist() for array in (places, numbers, tokens, starts[: ends[-1]], ends)])
            assert results[0] == results[1]


def test_marks_are_what_they_say() -> None:
    places, numbers, tokens = (np.full((2, 5), 7, np.int32) for _ in range(3))
    starts, ends = np.zeros(5, np.int32), np.zeros(2, np.int64)
    native.mark_documents(np.array([2, 3, 1]), np.array([0, 2, 3]), 5, places, numbers, tokens, 10, starts, ends)
    assert places.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 2, 3]]
    assert numbers.tolist() == [[0, 0, 1, 1, 1], [0, -1, -1, -1, -1]]
    assert tokens.tolist() == [[7] * 5, [7, 0, 0, 0, 0]]
    assert (starts[:4].tolist(), ends.tolist()) == ([10, 12, 15, 16], [2, 4])


def test_pieces_are_taken_as_by_the_twin(rng: random.Random) -> None:
    draw = np.random.default_rng(rng.randrange(2**32))
    samples, firsts, lengths, places = draw.integers(0, 100, (4, 50))
    bounds = np.concatenate(([0], np.sort(draw.integers(0, 51, 9)), [50]))
    for num in (0, 1, 7, 30):
        wanted = draw.integers(0, 10, num)
        taken = [
            np.frombuffer(module.take_pieces(samples, firsts, lengths, places, bounds, wanted, 5), np.int64)
            for module in (native, kernel_twins)
        ]
        assert taken[0].tolist() == taken[1].tolist()


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
    field, starts, ends = np.zeros((1, 4), np.int32), np.zeros(4, np.int32), np.zeros(1, np.int64)
    for lengths, firsts in (
        ([3, 2], [0, 2]),
        ([-1], [0, 1]),
        ([1], [0, 2]),
        ([5], [0, 1]),
        ([3, 2**62, 2**62], [0, 3]),
    ):
        with pytest.raises(ValueError, match="documents"):
            native.mark_documents(np.array(lengths), np.array(firsts), 4, field, field, field, 0, starts, ends)
    one = np.array([1]), np.array([0, 1])
    for begin, few, more in (
        (0, starts[:1], ends),
        (2**31 - 4, starts, ends),
        (-1, starts, ends),
        (0, starts, ends[:0]),
    ):
        with pytest.raises(ValueError, match="documents"):
            native.mark_documents(*one, 4, field, field, field, begin, few, more)
    two = np.array([1, 2])
    for bounds, wanted in (([0, 2], [1]), ([0, 2], [-1]), ([0, 3], [0]), ([2, 0], [0]), ([-1, 2], [0])):
        with pytest.raises(IndexError, match="among those given"):
            native.take_pieces(two, two, two, two, np.array(bounds), np.array(wanted), 5)
    with pytest.raises(IndexError, match="among those given"):
        native.take_pieces(two, two, two[:1], two, np.array([0, 2]), np.array([0]), 5)
