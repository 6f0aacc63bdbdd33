"""A data set that is given as an object is taken as it is: what looks like a description in it is data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import loaderkit
from loaderkit import Pipeline

TEXTS = ["echo ${HOME}", "${NOT_THERE}", "$${x}", "${HOME:-3}", "~/data"]
STAGES: list[Any] = ["read", {"batch": {"size": 5}}]
OVERRIDES = {"prefetch.executor": "inline"}


def described(where: str) -> tuple[Any, dict[str, Any]]:
    """A description with the texts as its data set, and overrides."""
    source = {"kind": "dataset", "object": TEXTS}
    plain = {"source": source, "order": {"shuffle": "none"}, "stages": STAGES}
    mixed = {**plain, "sources": [{"name": "a", "weight": 1, **source}]}
    del mixed["source"]
    none = {"kind": "dataset", "object": [""]}
    places: dict[str, tuple[Any, dict[str, Any]]] = {
        "dict": (plain, {}),
        "mixture": (mixed, {}),
        "Pipeline": (Pipeline.dataset(TEXTS).shuffle("none").read().batch(5), {}),
        "mix": (Pipeline.mix({"a": Pipeline.dataset(TEXTS)}).shuffle("none").read().batch(5), {}),
        "override": ({**plain, "source": none}, {"source.object": TEXTS}),
        "override of a source": ({**plain, "source": none}, {"source": source}),
        "override in a mixture": (
            {**mixed, "sources": [{"name": "a", "weight": 1, **none}]},
            {"sources.a.object": TEXTS},
        ),
        "override of all": ({**mixed, "sources": []}, {"sources": mixed["sources"]}),
    }
    return places[where]


PLACES = (
    "dict",
    "mixture",
    "Pipeline",
    "mix",
    "override",
    "override of a source",
    "override in a mixture",
    "override of all",
)


@pytest.mark.parametrize("where", PLACES)
def test_texts_are_no_variables(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    pipeline, overrides = described(where)
    with loaderkit.build(pipeline, overrides={**overrides, **OVERRIDES}) as loader:
        assert next(iter(loader))["0"] == TEXTS


def test_paths_stay_paths() -> None:
    with loaderkit.build(Pipeline.dataset([Path("a"), Path("b")]).shuffle("none").read().batch(2)) as loader:
        assert next(iter(loader))["0"] == [Path("a"), Path("b")]


class Counting(Mapping[int, dict[str, int]]):
    """A mapping by number, as a table on disk may be one: each item counts how often it was read."""

    def __init__(self) -> None:
        self.num_read = [0] * 6

    def __len__(self) -> int:
        return len(self.num_read)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, index: int) -> dict[str, int]:
        self.num_read[index] += 1
        return {"x": self.num_read[index]}


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_mapping_is_read_item_by_item_in_each_epoch(is_dict: bool) -> None:
    data = Counting()
    source = {"kind": "dataset", "object": data}
    pipeline: Any = {"source": source, "order": {"shuffle": "none"}, "stages": STAGES}
    if not is_dict:
        pipeline = Pipeline.dataset(data).shuffle("none").read().batch(5)
    with loaderkit.build(pipeline, overrides=OVERRIDES) as loader:
        assert data.num_read == [0] * 6
        first, second = ([x for batch in loader for x in batch["x"].tolist()] for _ in range(2))
    assert second == [x + 1 for x in first]
