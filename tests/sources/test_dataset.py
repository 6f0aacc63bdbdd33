"""Objects with `__len__` and `__getitem__`: one by one, several at once, and as columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import StageError

INLINE = {"prefetch.executor": "inline"}


class Items(Dataset[Any]):
    """`make(index)` for 10 numbers."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class AtOnce(Items):
    """The same, and torch's way to ask for several."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self.make(index) for index in indices]


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


KINDS: dict[str, Any] = {
    "tensors": lambda i: torch.full((2, 3), i),
    "arrays": lambda i: np.full(4, i, np.float32),
    "numbers": lambda i: i,
    "tuples": lambda i: (torch.tensor([i]), i / 2),
    "named tuples": lambda i: Pair(torch.tensor([i, 1]), i),
    "dicts": lambda i: {"x": torch.tensor([i]), "y": i},
    "large arrays": lambda i: np.full(5000, i),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_set", [Items, AtOnce])
def test_batches_are_those_of_torch(kind: str, data_set: Any) -> None:
    pipeline = Pipeline.dataset(data_set(KINDS[kind])).shuffle("none").read().batch(4)
    with loaderkit.build(pipeline, overrides=INLINE) as loader:
        ours = list(loader)
    for mine, batch in zip(ours, DataLoader(Items(KINDS[kind]), batch_size=4), strict=True):
        named = batch._asdict() if isinstance(batch, Pair) else batch
        theirs = named if isinstance(named, dict) else dict(enumerate(named if isinstance(named, list) else [named]))
        for name, values in theirs.items():
            assert torch.equal(mine[str(name)], values)
            assert mine[str(name)].dtype == values.dtype


def test_several_items_are_asked_for_at_once() -> None:
    data_set = AtOnce(KINDS["tuples"])
    pipeline = Pipeline.dataset(data_set, fields=["x", "y"]).shuffle("none").read().batch(5)
    with loaderkit.build(pipeline, overrides=INLINE) as loader:
        assert [batch["y"].tolist() for batch in loader] == [[0, 0.5, 1, 1.5, 2], [2.5, 3, 3.5, 4, 4.5]]
    assert [5, 6, 7, 8, 9] in data_set.asked


def bad(kind: str) -> Any:
    def make(index: int) -> Any:
        good = torch.tensor([index])
        if index != 6:
            return good
        if kind == "raises":
            raise KeyError("no such thing")
        return {
            "shape": torch.zeros(2, dtype=torch.int64),
            "dtype": good.float(),
            "kind": "text",
            "tuple": (good, good),
        }[kind]

    return make


@pytest.mark.parametrize("data_set", [Items, AtOnce])
@pytest.mark.parametrize("kind", ["raises", "shape", "dtype", "kind", "tuple"])
def test_one_bad_item_among_good_ones_is_named(kind: str, data_set: Any) -> None:
    pipeline = Pipeline.dataset(data_set(bad(kind))).shuffle("none").read().batch(5)
    with loaderkit.build(pipeline, overrides=INLINE) as loader:
        batches = iter(loader)
        assert next(batches)["0"].tolist() == [[0], [1], [2], [3], [4]]
        with pytest.raises(StageError) as caught:
            next(batches)
    assert caught.value.key == "6"
    with loaderkit.build(pipeline, overrides={**INLINE, "errors.on_bad_sample": "skip"}) as loader:
        assert [batch["__key__"] for batch in loader] == [list("01234"), list("5789")]
    with loaderkit.build(pipeline, overrides={**INLINE, "errors.on_bad_sample": "replace"}) as loader:
        for batch in loader:
            assert [str(value) for value in batch["0"].flatten().tolist()] == batch["__key__"]
            assert "6" not in batch["__key__"]


@pytest.mark.parametrize("answer", [None, (), [1], [1, 2, 3, 4, 5, 6]])
def test_what_is_no_list_of_as_many_items_is_not_believed(answer: Any) -> None:
    class Odd(Items):
        def __getitems__(self, indices: list[int]) -> Any:
            return answer

    with loaderkit.build(
        Pipeline.dataset(Odd(KINDS["numbers"])).shuffle("none").read().batch(5), overrides=INLINE
    ) as loader:
        assert [batch["0"].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
