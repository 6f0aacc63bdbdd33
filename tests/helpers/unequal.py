"""Samples of unequal length for batches of tokens, and functions that act on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NUM = 260


def lengths_of(num: int = NUM) -> list[int]:
    """From 1 to about 60, the same every time."""
    lengths: list[int] = np.random.default_rng(4).lognormal(2.2, 0.8, num).astype(int).clip(1, 60).tolist()
    return lengths


class Unequal:
    """Item i is {"tokens": i, i, ..., "number": i}; those in `bad` cannot be had."""

    def __init__(self, num: int = NUM, bad: tuple[int, ...] = ()) -> None:
        self._lengths = lengths_of(num)
        self._bad = bad

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._bad:
            raise ValueError(f"item {index} cannot be had")
        return {"tokens": torch.full((self._lengths[index],), index), "number": index}


def is_short(sample: dict[str, Any]) -> bool:
    return len(sample["tokens"]) < 20


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": torch.cat([sample["tokens"], sample["tokens"]])}


def same(sample: dict[str, Any]) -> None:
    pass
