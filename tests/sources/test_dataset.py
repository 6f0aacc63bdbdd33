"""Objects with `__len__` and `__getitem__`: one by one, several at once, and as columns."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import SourceError, StageError
from loaderkit.samples.values import owned

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


def doubles(sample: dict[str, Any]) -> None:
    """In place, a tensor and what is in a list."""
    sample["x"] *= 2
    sample["boxes"][0] *= 2
    sample["names"].append("seen")


class Kept(Dataset[Any]):
    """Gives what it keeps."""

    def __init__(self) -> None:
        self.x = torch.arange(30.0).reshape(10, 3)
        self.boxes = [torch.full((1,), float(number)) for number in range(10)]
        self.names: list[list[str]] = [[] for _ in range(10)]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "boxes": [self.boxes[index]], "names": self.names[index]}


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_function_that_changes_values_in_place_changes_none_of_the_data_set(executor: str) -> None:
    data = Kept()
    pipeline = Pipeline.dataset(data).shuffle("none").read().call(doubles).batch(4)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        for _ in range(2):
            batches = list(loader)
            assert torch.equal(torch.cat([batch["x"] for batch in batches]), 2 * torch.arange(30.0).reshape(10, 3))
            assert [int(boxes[0]) for batch in batches for boxes in batch["boxes"]] == list(range(0, 20, 2))
            assert all(names == ["seen"] for batch in batches for names in batch["names"])
    assert torch.equal(data.x, torch.arange(30.0).reshape(10, 3))
    assert data.names == [[] for _ in range(10)]


def test_what_a_loop_changes_is_none_of_the_data_set() -> None:
    data = Kept()
    with loaderkit.build(Pipeline.dataset(data).shuffle("none").read().batch(4), overrides=INLINE) as loader:
        for batch in loader:
            batch["boxes"][0][0].add_(1)
            batch["names"][0].append("seen")
    assert [int(box) for box in data.boxes] == list(range(10))
    assert data.names == [[] for _ in range(10)]


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_getitems_may_return_any_sequence(make: Any) -> None:
    data = AtOnce(KINDS["numbers"])
    data.__getitems__ = lambda indices: make([10 * index for index in indices])  # type: ignore[method-assign]
    with loaderkit.build(Pipeline.dataset(data).shuffle("none").read().batch(5), overrides=INLINE) as loader:
        assert [batch["0"].tolist() for batch in loader] == [[0, 10, 20, 30, 40], [50, 60, 70, 80, 90]]


@pytest.mark.parametrize("returned", [np.array(3), {"a": 1}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], None, 3])
def test_getitems_that_returns_others_is_refused(returned: Any) -> None:
    data = AtOnce(KINDS["numbers"])
    data.__getitems__ = lambda indices: returned  # type: ignore[method-assign]
    pipeline = Pipeline.dataset(data).shuffle("none").read().batch(5)
    with (
        pytest.raises(SourceError, match=r"__getitems__ was asked for"),
        loaderkit.build(pipeline, overrides=INLINE) as loader,
    ):
        list(loader)


def test_getitems_that_raises_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def raises(indices: list[int]) -> Any:
        raise OSError("the store is down")

    data = AtOnce(KINDS["numbers"])
    data.__getitems__ = raises  # type: ignore[method-assign]
    with loaderkit.build(Pipeline.dataset(data).shuffle("none").read().batch(5), overrides=INLINE) as loader:
        assert [batch["0"].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert caplog.text.count("__getitems__ raised OSError: the store is down") == 1


def test_values_in_memory_of_their_own() -> None:
    size, when, text = torch.Size([2, 3]), time.gmtime(0), "text"
    value: dict[str, Any] = {
        "plain": [1, 2, 3], "mixed": [1, "a", [torch.ones(1)]], "tuple": (np.ones(2), size, when),
        "pair": Pair(torch.ones(1), 2),
        "table": OrderedDict(b=bytearray(b"b"), a=defaultdict(list, x=[1])), "text": text,
    }  # fmt: skip
    copy = owned(value)
    assert repr(copy) == repr(value)
    assert copy["tuple"][1] is size
    assert copy["tuple"][2] is when
    assert copy["text"] is text
    copy["plain"].append(4)
    copy["mixed"][2][0] += 1
    copy["tuple"][0][:] = 5
    copy["pair"].image[:] = 5
    copy["table"]["b"][:] = b"c"
    copy["table"]["a"]["x"].append(2)
    assert value["plain"] == [1, 2, 3]
    assert (value["mixed"][2][0], value["tuple"][0][0], value["pair"].image[0]) == (1, 1, 1)
    assert (value["table"]["b"], value["table"]["a"]["x"]) == (b"b", [1])


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_mixture_changes_none_of_its_data_sets(executor: str) -> None:
    sources = {
        name: torch.utils.data.TensorDataset(torch.full((40, 2), value)) for name, value in (("a", 1.0), ("b", 5.0))
    }
    described = {
        "sources": [
            {"name": name, "kind": "dataset", "object": data, "fields": ["x"], "weight": 1}
            for name, data in sources.items()
        ],
        "stages": ["read", {"call": {"function": doubles_x}}, {"batch": {"size": 4}}],
        "order": {"epochs": 1},
    }
    with loaderkit.build(described, overrides={"prefetch.executor": executor}) as loader:
        assert {*torch.cat([batch["x"] for batch in loader]).flatten().tolist()} == {2.0, 10.0}
    assert [{*data.tensors[0].flatten().tolist()} for data in sources.values()] == [{1.0}, {5.0}]


def doubles_x(sample: dict[str, Any]) -> None:
    sample["x"] *= 2
