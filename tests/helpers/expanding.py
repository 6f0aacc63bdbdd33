"""Samples of which several are made of one, and the plain loop that says which come when: worker processes import it, too."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import torch

import loaderkit


class Volumes:
    """Arrays [4, 6] of which each names its number; counts how often it is asked for each."""

    def __init__(self, num: int, bad: tuple[int, ...] = ()) -> None:
        self.num, self.bad = num, bad
        self.counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"num": self.num, "bad": self.bad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._lock:
            self.counts[index] += 1
        if index in self.bad:
            raise ValueError(f"volume {index} is unreadable")
        return {"volume": np.arange(24).reshape(4, 6) + 100 * index, "index": index}


def patch(sample: dict[str, Any], number: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row, with a draw of its own."""
    return {"volume": sample["volume"][number % 4], "number": number, "draw": rng.random()}


def patches(sample: dict[str, Any], rng: np.random.Generator, num: int) -> list[dict[str, Any]]:
    """The same rows, by one call."""
    return [{"volume": sample["volume"][number % 4], "number": number, "draw": rng.random()} for number in range(num)]


def described(dataset: Volumes, num: int, size: int, *, at_once: bool = False, **more: Any) -> dict[str, Any]:
    """A pipeline of patches."""
    function = {"function": patches, "args": {"num": num}} if at_once else {"function": patch}
    return {
        "source": {"kind": "dataset", "object": dataset, "thread_safe": True},
        "stages": [
            "read",
            {"expand": {**function, "num": num, "thread_safe": True}},
            {"batch": {"size": size, "drop_last": more.pop("drop_last", False)}},
        ],
        **more,
    }


def order_of(dataset: Volumes, order: dict[str, Any], epoch: int) -> list[int]:
    """The samples of an epoch, by a pipeline that makes one of each."""
    plain = {
        "source": {"kind": "dataset", "object": Volumes(dataset.num)},
        "stages": ["read", {"batch": {"size": 1}}],
        "order": order,
    }
    with loaderkit.build(plain, rank=0, world_size=1) as loader:
        loader.set_epoch(epoch)
        return [int(batch["index"][0]) for batch in loader]


Patch = tuple[int, int]
"""The number of a volume, and that of the patch."""


def expected(samples: list[int], num: int, size: int, world_size: int, *, drop_last: bool) -> list[list[list[Patch]]]:
    """What each rank has in each step of an epoch: by a plain loop over all patches, one behind another."""
    pairs = [(sample, number) for sample in samples for number in range(num)]
    steps: list[list[list[Patch]]] = []
    at = 0
    while at < len(pairs):
        left = len(pairs) - at
        each = size
        if left < size * world_size:
            if drop_last:
                break
            each = -(-left // world_size)
            each = min(each, size)
        step = [[pairs[(at + rank * each + place) % len(pairs)] for place in range(each)] for rank in range(world_size)]
        steps.append(step)
        at += each * world_size
    return steps


def found_in(batch: Any) -> list[Patch]:
    """The patches of a batch, whose rows and keys fit."""
    pairs = list(zip(batch["index"].tolist(), batch["number"].tolist(), strict=True))
    assert batch["__key__"] == [str(index) for index, _ in pairs]
    rows = [100 * index + 6 * (number % 4) for index, number in pairs]
    assert torch.equal(batch["volume"], torch.tensor(rows)[:, None] + torch.arange(6))
    return pairs


def draws_in(batch: Any) -> dict[Patch, float]:
    return dict(zip(found_in(batch), batch["draw"].tolist(), strict=True))
