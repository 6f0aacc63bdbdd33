"""What a kind of work consists of, and that all its loaders give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


class Like(NamedTuple):
    """Of a field of a batch, or of each tensor of one that is a list; None: any length."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    low: float
    high: float
    listed: bool = False


@dataclass(frozen=True)
class Work:
    variable: str  # of the environment, by which the pipeline finds its data
    batch: int
    fields: dict[str, Like]
    write: Callable[[Path, float], int]  # data at a scale into a folder: the batches of an epoch
    peers: Callable[[Path], dict[str, Iterable[Any]]]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other settings of the pipeline, by a word: a peer whose name begins with it is compared with these."""

    def first_epoch(self, who: str, batches: Iterable[Any]) -> None:
        """Raises AssertionError if the first batch is not like `fields`."""
        rest = iter(batches)
        batch = next(rest)
        for name, like in self.fields.items():
            _check(f"{name} of {who}", batch[name], like, self.batch)
        for _ in rest:
            pass


def _check(what: str, found: Any, like: Like, num: int) -> None:
    assert isinstance(found, list) == like.listed, f"{what} is a {type(found)}"
    tensors = found if like.listed else [found]
    assert like.listed is False or len(tensors) == num, f"{what} are {len(tensors)}"
    for tensor in tensors:
        assert tensor.dtype == like.dtype, f"{what} is of {tensor.dtype}"
        shape = [actual if side is not None else None for side, actual in zip(like.shape, tensor.shape, strict=True)]
        assert shape == list(like.shape), f"{what} has the shape {tensor.shape}"
    values = torch.cat([tensor.flatten().double() for tensor in tensors])
    low, high = values.min().item(), values.max().item()
    near, rounding = (like.high - like.low) / 3, (like.high - like.low) / 1e5
    fits = like.low <= low + rounding < like.low + near and like.high - near < high - rounding <= like.high
    assert fits, f"{what} is in {low} ... {high}"


def photograph(rng: np.random.Generator, width: int, height: int) -> Any:
    """Pillow's image with detail of all sizes: as a JPEG of quality 90, 0.2 bytes a pixel."""
    levels = rng.normal(128, 3, (height, width, 1)).astype(np.float32)
    for side, amount in ((3, 1.1), (8, 0.55), (24, 0.28), (80, 0.14), (240, 0.08)):
        grid = Image.fromarray(rng.integers(0, 256, (side * height // width + 1, side, 3), np.uint8))
        resized = grid.resize((width, height), Image.Resampling.BICUBIC)
        levels = levels + amount * (np.asarray(resized, np.float32) - 128)
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))
