"""A data set of numbers, some of them bad, and functions for `filter`; importable in loading processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from loaderkit import Pipeline


class Numbers:
    """Sample i holds the number i; those of `bad` cannot be read."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.size = size
        self.bad = bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError("unreadable")
        return {"x": index, "row": np.full(3, index)}


def is_kept(number: int, share: float) -> bool:
    """True for about that share of the numbers."""
    return number * 7919 % 1009 < share * 1009


def keep(sample: dict[str, Any], share: float) -> bool:
    return is_kept(sample["x"], share)


def keep_from(sample: dict[str, Any], least: int) -> bool:
    return bool(sample["x"] >= least)


def keep_but(sample: dict[str, Any], low: int, high: int) -> bool:
    """All but those from `low` to `high` - 1."""
    return not low <= sample["x"] < high


def keep_by_draw(sample: dict[str, Any], rng: np.random.Generator) -> bool:
    return rng.random() < 0.4


def fail_at_seven(sample: dict[str, Any]) -> bool:
    if sample["x"] == 7:
        raise RuntimeError("seven")
    return bool(sample["x"] % 3)


def numbers(size: int = 40, bad: tuple[int, ...] = ()) -> Pipeline:
    return Pipeline.dataset(Numbers(size, bad)).shuffle(False).epochs(2).read()
