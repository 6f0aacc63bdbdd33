"""What a function given to `call` may return: nothing, the dict it was given, or a dict that is merged into it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import StageError


class Pictures:
    """Item i: an image of level i, its class, a text and a number that some functions drop."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((3, 2, 2), index, dtype=torch.uint8)
        return {"image": image, "label": index, "text": str(index), "depth": float(index)}


def only_the_image(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": 255 - sample["image"]}


def without_depth(sample: dict[str, Any]) -> None:
    del sample["depth"]


def one_dropped_and_one_new(sample: dict[str, Any]) -> dict[str, Any]:
    del sample["depth"]
    return {"image": 255 - sample["image"], "level": sample["label"]}


def first_batch(function: Callable[..., Any], where: str) -> dict[str, Any]:
    read = Pipeline.dataset(Pictures()).shuffle(False).read()
    made = read.call(function).batch(6) if where == "samples" else read.batch(6).call(function)
    with loaderkit.build(made) as loader:
        batch: dict[str, Any] = next(iter(loader))
    return batch


@pytest.mark.parametrize("where", ["samples", "batches"])
@pytest.mark.parametrize(
    ("function", "dropped", "made"),
    [
        (lambda given: None, set(), set()),
        (lambda given: given, set(), set()),
        (dict, set(), set()),
        (lambda given: UserDict(level=given["label"]), set(), {"level"}),
        (only_the_image, set(), set()),
        (without_depth, {"depth"}, set()),
        (one_dropped_and_one_new, {"depth"}, {"level"}),
    ],
)
def test_fields_stay_unless_they_are_deleted(
    function: Callable[..., Any], dropped: set[str], made: set[str], where: str
) -> None:
    batch = first_batch(function, where)
    assert batch.keys() == {"image", "label", "text", "depth", "__key__"} - dropped | made
    assert batch["label"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["__key__"] == batch["text"] == ["0", "1", "2", "3", "4", "5"]
    is_inverted = function in (only_the_image, one_dropped_and_one_new)
    levels = [255 - level if is_inverted else level for level in range(6)]
    assert batch["image"][:, 0, 0, 0].tolist() == levels
    assert batch["image"].dtype == torch.uint8


@pytest.mark.parametrize("where", ["samples", "batches"])
def test_anything_else_is_refused(where: str) -> None:
    with pytest.raises(StageError, match="returned Tensor; it must return a dict, which is merged into the one given"):
        first_batch(lambda given: given["image"], where)


@pytest.mark.parametrize("stage", ["call", "filter", "expand"])
def test_a_key_of_the_samples_own_is_refused(stage: str) -> None:
    """The function would be given the loader's key in its place, and the sample's be lost."""
    args = {"function": dict, **({"num": 1} if stage == "expand" else {})}
    data = {"kind": "dataset", "object": [{"__key__": "mine", "x": 1}]}
    pipeline: dict[str, Any] = {"source": data, "stages": ["read", {stage: args}, {"batch": {"size": 1}}]}
    refused = pytest.raises(StageError, match=f"^{stage} failed .*'__key__' has a reserved name: rename it")
    with refused, loaderkit.build(pipeline) as loader:
        next(iter(loader))
    renamed = {**data, "fields": {"id": "__key__", "x": "x"}}
    with loaderkit.build({**pipeline, "source": renamed, "stages": ["read", {"batch": {"size": 1}}]}) as loader:
        assert next(iter(loader))["id"] == ["mine"]
