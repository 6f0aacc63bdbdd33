"""Batches to transfer, and how they are compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pack_sequence

import loaderkit

HAS_CUDA = torch.cuda.is_available()


class Items:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = torch.full((3, 8, 8), index, dtype=torch.uint8)
        return {"image": pixels, "x": torch.full((4,), index), "label": index, "text": str(index)}


class Large:
    """Pictures of one colour, their number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.full((3, 448, 448), index, dtype=torch.uint8), "label": index}


def pipeline(**transfer: Any) -> loaderkit.Pipeline:
    made = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
    return (made.transfer(**transfer) if transfer else made).normalize()


def batches(made: loaderkit.Pipeline) -> list[dict[str, Any]]:
    with loaderkit.build(made) as loader:
        return list(loader)


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[name]), name
            else:
                assert value == other[name]


def pack(batch: dict[str, Any]) -> None:
    batch["packed"] = pack_sequence([x[: 1 + n % 3] for n, x in enumerate(batch["x"])], enforce_sorted=False)
    batch["sparse"] = batch["x"].to_sparse()


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Noted(dict[str, Any]):
    """Its items are noted as attributes, too."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Star(tuple[Any, ...]):
    """Its type is called with its items one by one."""

    def __new__(cls, *items: Any) -> Star:
        return super().__new__(cls, items)


class Frozen(dict[str, Any]):
    def clear(self) -> None:
        raise TypeError("it is not to be changed")


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def nest(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with tensors in whatever a function may make."""
    x = batch["x"].float()
    return {"found": [x, (x, "text"), {"pair": Pair(x, 1)}], "image": batch["image"]}


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"twice": 2 * batch["image"]}


def keyed(batch: dict[str, Any]) -> tuple[list[str], torch.Tensor]:
    return batch["__key__"], batch["image"].double()
