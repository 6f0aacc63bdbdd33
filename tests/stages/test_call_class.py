"""A class in `call` or `filter`: one object in each process, made with the arguments of `args`, and called."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError


class Shifted:
    """Adds a number, and says which object of which process did."""

    num_made = 0

    def __init__(self, by: int, scale: int = 1) -> None:
        type(self).num_made += 1
        self.by, self.scale, self.serial = by, scale, type(self).num_made

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] * self.scale + self.by, "process": os.getpid(), "serial": self.serial}


class Noisy:
    """Takes a generator for each sample."""

    def __init__(self, most: float) -> None:
        self.most = most

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> None:
        sample["x"] = sample["x"] + rng.uniform(0, self.most)


class Below:
    """Keeps what is smaller."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __call__(self, sample: dict[str, Any]) -> bool:
        return bool(sample["x"] < self.bound)


def described(numbers: list[int], stage: dict[str, Any], executor: str = "thread", **more: Any) -> dict[str, Any]:
    stages = ["read", stage, {"batch": {"size": 4}}]
    return {
        "source": {"kind": "dataset", "object": [{"x": number} for number in numbers]},
        "order": {"shuffle": "none", "epochs": 1},
        "stages": stages,
        "prefetch": {"executor": executor, **more},
    }


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_one_object_in_each_process(executor: str, as_text: bool, rng: random.Random) -> None:
    numbers = rng.choices(range(100), k=24)
    by, scale = rng.sample(range(2, 9), 2)
    function = f"{__name__}:Shifted" if as_text else Shifted
    more = {"processes": 2} if executor == "process" else {}
    stage = {"call": {"function": function, "args": {"by": by, "scale": scale}}}
    with loaderkit.build(described(numbers, stage, executor, **more)) as loader:
        batches = list(loader)
    assert [x for batch in batches for x in batch["x"].tolist()] == [number * scale + by for number in numbers]
    made = {pair for batch in batches for pair in zip(batch["process"].tolist(), batch["serial"].tolist(), strict=True)}
    assert len(made) == len({process for process, _ in made}) == more.get("processes", 1)


def test_its_arguments_stand_in_yaml(tmp_path: Path) -> None:
    pipeline = Pipeline(described([1], {"call": {"function": Shifted, "args": {"by": 3}}}))
    written = Pipeline.dataset("m:f").read().call(Shifted, {"by": 3}).batch(1).to_yaml()
    assert f"function: {__name__}:Shifted" in written
    assert pipeline.config.stages[1].args.model_dump()["args"] == {"by": 3}


def test_it_may_take_rng_and_act_on_batches(rng: random.Random) -> None:
    numbers = rng.choices(range(100), k=8)

    def values(stage: dict[str, Any], where: int) -> list[float]:
        config = described(numbers, {"call": {"function": Noisy, "args": {"most": 0.5}}})
        config["stages"] = ["read", {"batch": {"size": 4}}]
        config["stages"].insert(where, stage)
        with loaderkit.build(config) as loader:
            return [x for batch in loader for x in batch["x"].tolist()]

    for where in (1, 2):
        stage = {"call": {"function": Noisy, "args": {"most": 0.5}}}
        found = values(stage, where)
        assert found == values(stage, where)
        added = np.array(found) - numbers
        assert ((added > 0) & (added < 0.5)).all()
        assert len(set(added.tolist())) > 1


def test_filter_takes_one() -> None:
    numbers = [5, 1, 9, 2, 8, 3]
    with loaderkit.build(described(numbers, {"filter": {"function": Below, "args": {"bound": 5}}})) as loader:
        assert [x for batch in loader for x in batch["x"].tolist()] == [1, 2, 3]


@pytest.mark.parametrize("args", [{}, {"buy": 3}])
def test_wrong_arguments_are_refused_before_anything_is_read(args: dict[str, Any]) -> None:
    expected = r"stages\.call\.args: the class Shifted cannot be made with .*TypeError: .*'b.y?'"
    with pytest.raises(ConfigError, match=expected):
        loaderkit.build(described([1, 2], {"call": {"function": Shifted, "args": args}}))


def test_a_class_whose_objects_cannot_be_called_gets_the_sample() -> None:
    class Holds:
        def __init__(self, sample: dict[str, Any]) -> None:
            self.sample = sample

    with (
        pytest.raises(StageError, match="returned Holds; it must return a dict"),
        loaderkit.build(described([1], {"call": {"function": Holds}})) as loader,
    ):
        next(iter(loader))
