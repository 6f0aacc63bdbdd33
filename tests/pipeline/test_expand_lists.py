"""`expand`: lists, and tensors in them, are each sample's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loaderkit


def crops_and_names(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Both are given the same list, and views of the same tensor in lists."""
    names = [*sample["names"], "crop"]
    return [{"names": names, "crops": [sample["x"][begin:]], "number": begin} for begin in range(2)]


def names_itself(sample: dict[str, Any], number: int) -> dict[str, Any]:
    sample["names"].append("crop")
    return {"crops": [sample["x"][number:]], "number": number}


def marks(sample: dict[str, Any]) -> None:
    sample["names"].append(f"seen {sample['number']}")
    sample["crops"][0] *= 10


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
@pytest.mark.parametrize("function", [crops_and_names, names_itself])
def test_no_sample_shares_a_list_with_another(function: Any, executor: str) -> None:
    data: list[dict[str, Any]] = [{"x": torch.tensor([1.0, 2.0]) + 10 * number, "names": ["a"]} for number in range(4)]
    pipeline = {
        "source": {"kind": "dataset", "object": data},
        "stages": [
            "read",
            {"expand": {"function": function, "num": 2}},
            {"call": {"function": marks}},
            {"batch": {"size": 3}},
        ],
        "order": {"shuffle": "none"},
        "prefetch": {"executor": executor},
    }
    with loaderkit.build(pipeline) as loader:
        for _ in range(2):
            batches = list(loader)
            names = [names for batch in batches for names in batch["names"]]
            assert names == 4 * [["a", "crop", "seen 0"], ["a", "crop", "seen 1"]]
            crops = [crops[0].tolist() for batch in batches for crops in batch["crops"]]
            whole = [[10.0 + 100 * number, 20.0 + 100 * number] for number in range(4)]
            assert crops == [values[begin:] for values in whole for begin in range(2)]
            for batch in batches:
                assert all(x.tolist() in [one["x"].tolist() for one in data] for x in batch["x"])
    assert [one["names"] for one in data] == 4 * [["a"]]
