"""A training script of one file, as people write them: its data set, transform and seeded function are in `__main__`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import loaderkit
from loaderkit import Pipeline

OFFSET = 3


@dataclass
class Label:
    number: int


class Scaled(torch.utils.data.Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform
        self.classes, self.ops = ["even", "odd"], [torch.add]  # as modules of torch are called, too

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.classes.index("odd" if index % 2 else "even")
        return {
            "x": self.transform(self.ops[0](torch.tensor([index - 1.0 - number]), 1 + number)),
            "label": Label(index),
        }


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"noise": torch.rand(2), "other": np.random.random()}


def totals(executor: str) -> tuple[float, float, int]:
    dataset = Scaled(lambda x: x * 2 + OFFSET)
    pipeline = (
        Pipeline.dataset(dataset).shuffle(seed=5).epochs(1).read().call(noisy, seeded=executor != "thread").batch(8)
    )
    pipeline = pipeline.call(lambda batch: {"known": [type(label) is Label for label in batch["label"]]})
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        batches = list(loader)
        assert all(all(batch["known"]) for batch in batches)
        assert all(type(label) is Label for batch in batches for label in batch["label"])
    noise = (
        0.0 if executor == "thread" else sum(float(batch["noise"].sum() + batch["other"].sum()) for batch in batches)
    )
    return sum(float(batch["x"].sum()) for batch in batches), noise, len(batches)


if __name__ == "__main__":
    of_all = {executor: totals(executor) for executor in sys.argv[1:]}
    first = of_all[sys.argv[1]]
    for executor, found in of_all.items():
        assert found[::2] == first[::2], of_all
        assert executor == "thread" or found[1] == first[1], of_all
    print("the same", *first[::2])
