"""A torch Dataset you already have, through loaderkit: shuffled, batched and prefetched, with an augmentation of yours.

    python examples/torch_dataset.py --samples 512

`read` calls the data set's `__getitem__` from several threads at once.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import loaderkit


class Waves(Dataset[tuple[torch.Tensor, int]]):
    """Stands for your data set: images uint8 [3, 32, 32] of waves, across (class 0) or down (class 1)."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        wave = 128 + 100 * torch.sin(torch.arange(32) * (0.3 + 0.05 * (index % 7)))
        plane = wave.expand(32, 32) if label == 0 else wave.expand(32, 32).T
        return plane.to(torch.uint8).expand(3, 32, 32).clone(), label


def cutout(sample: dict[str, Any], rng: np.random.Generator, size: int = 8) -> None:
    """Blacken a square. `rng` depends on the seed, the epoch and the sample alone, so a run can be repeated."""
    image = sample["image"]
    top, left = rng.integers(0, image.shape[1] - size + 1), rng.integers(0, image.shape[2] - size + 1)
    image[:, top : top + size, left : left + size] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Iterate over a torch Dataset with loaderkit.")
    parser.add_argument("--samples", type=int, default=512)
    options = parser.parse_args()

    pipeline = (
        loaderkit.Pipeline.dataset(Waves(options.samples), fields=["image", "label"])  # names for the tuple's items
        .shuffle(seed=0)
        .read()
        .call(cutout, args={"size": 12})  # before `batch`: once a sample
        .batch(32)
    )
    with loaderkit.build(pipeline) as loader:
        for batch in loader:
            images = batch["image"].float() / 255
            print(f"{tuple(images.shape)} mean {images.mean():.3f}, {int(batch['label'].sum())} of class 1")


if __name__ == "__main__":
    main()
