"""Mixtures for tests: photographs of two stores, and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from loaderkit import Pipeline


class Counted:
    """Item i is {"x": begin + i}; those in `bad` cannot be had."""

    def __init__(self, size: int, begin: int = 0, bad: tuple[int, ...] = ()) -> None:
        self.size = size
        self.begin = begin
        self.bad = bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"item {index} cannot be had")
        return {"x": self.begin + index}


def counted(size: int, begin: int = 0, bad: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    """An entry of `sources`."""
    args = {"size": size, "begin": begin, "bad": list(bad)}
    return {"kind": "dataset", "object": "mixtures:Counted", "args": args, **more}


def numbers(*sources: dict[str, Any], batch: int = 4, **sections: Any) -> dict[str, Any]:
    """A pipeline of such entries."""
    return {"sources": list(sources), "stages": ["read", {"batch": {"size": batch}}], **sections}


def negated(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": -sample["x"]}


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"image": sample["image"] ^ torch.from_numpy(rng.integers(0, 4, tuple(sample["image"].shape), np.uint8))}


def labelled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": int(sample["label"])}


def augmented_mixture(photos: Path, shards: Path) -> Pipeline:
    """Photographs from files, decoded by stages of their own with noise, and from shards: everything random there is."""
    web = Pipeline.files(photos, include="**/*.jpg", label="parent", limit=30).decode().call(noisy)
    return (
        Pipeline.mix(
            {"web": web, "code": Pipeline.tar(shards, limit=30).decode().call(labelled)},
            {"web": 0.6, "code": 0.4},
            stop="all",
        )
        .shuffle(seed=3)
        .read()
        .random_resized_crop(24)
        .random_horizontal_flip()
        .color_jitter(brightness=0.3, hue=0.1)
        .batch(8)
        .normalize()
    )
