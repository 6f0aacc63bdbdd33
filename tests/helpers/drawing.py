"""A data set and functions that draw from the generators of their process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class Indices:
    """Sample i holds i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index}


class Disturbing(Indices):
    """Draws for itself whenever a sample is read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        disturb({})
        return super().__getitem__(index)


def disturb(sample: dict[str, Any]) -> None:
    """Draws, and leaves the sample as it is."""
    for _ in range(20):
        random.random()
        np.random.random_sample(9)
        torch.rand(9)


def by_python(sample: dict[str, Any]) -> None:
    sample["python"] = torch.tensor([random.gauss(0, 1), *(random.random() for _ in range(50))], dtype=torch.float64)


def by_numpy(sample: dict[str, Any]) -> None:
    sample["numpy"] = torch.tensor(
        [np.random.normal(), *(np.random.random_sample() for _ in range(50))], dtype=torch.float64
    )


def erase(sample: dict[str, Any], size: int = 8) -> dict[str, Any]:
    """As torchvision's v2 would: parameters and noise from torch's generator, in a varying number of draws."""
    image = torch.full((3, size, size), 255, dtype=torch.uint8)
    if torch.rand(()) < 0.9:
        top, left = (int(torch.randint(0, size // 2, size=(1,))) for _ in range(2))
        noise = torch.empty(3, size // 2, size // 2).normal_()
        image[:, top : top + size // 2, left : left + size // 2] = (100 * noise.abs()).byte()
    return {"image": image}


def by_rng(sample: dict[str, Any], rng: np.random.Generator) -> None:
    sample["rng"] = torch.tensor([rng.random(), random.random()], dtype=torch.float64)


def by_own(sample: dict[str, Any]) -> None:
    sample["own"] = OWN.random()


OWN = np.random.default_rng()


def by_set(is_sorted: bool = False) -> list[str]:
    """Names in the order of a set, which each process has another of."""
    names = {f"name {number}" for number in range(40)}
    return sorted(names) if is_sorted else list(names)


def mix(batch: dict[str, Any]) -> None:
    batch["order"] = torch.randperm(len(batch["index"]))


def fail(sample: dict[str, Any]) -> None:
    disturb(sample)
    if sample["index"] % 2:
        raise ValueError("after drawing")
