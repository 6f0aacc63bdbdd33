"""`order.weights`: classes drawn by weight, against the shares asked for, and exact on resume and among ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StateError
from loaderkit.sampling.schedule import WeightedOrder

NUM = {"rare": 3, "usual": 40, "common": 157}


def stored() -> MemoryConnector:
    return MemoryConnector({f"{name}/{n}.bin": b"x" for name, num in NUM.items() for n in range(num)})


def weighted(weights: Any, batch: int = 8, **labels: str) -> Pipeline:
    args: dict[str, Any] = labels or {"label": "parent"}
    return Pipeline.files("memory://x", include="**/*.bin", **args).shuffle(seed=5, weights=weights).read().batch(batch)


def keys(pipeline: Pipeline, epochs: int = 1, **given: Any) -> list[str]:
    with loaderkit.build(pipeline, connectors={"memory": stored()}, **given) as loader:
        return [key for _ in range(epochs) for batch in loader for key in batch["__key__"]]


classes = st.lists(st.integers(-3, 3), min_size=1, max_size=50).map(np.array)


@given(classes, st.integers(0, 2**32), st.data())
def test_only_samples_whose_class_has_weight(numbers: Any, seed: int, data: st.DataObject) -> None:
    present = sorted({*numbers.tolist()})
    weights = {one: data.draw(st.sampled_from([0.0, 1e-300, 1e-9, 0.3, 1.0, 1e300])) for one in present}
    weights[data.draw(st.sampled_from(present))] = 1.0
    order = WeightedOrder(numbers, weights, seed)
    positions = np.arange(order.num_positions(1))
    drawn = order.indices(1, positions)
    assert len(positions) == len(numbers)
    assert all(weights[one] > 0 for one in numbers[drawn].tolist())
    some = np.array(data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=9)), np.int64)
    assert order.for_thread().indices(1, some).tolist() == drawn[some].tolist()  # each position for itself


def test_shares_are_those_of_the_weights() -> None:
    """Within five standard deviations, for classes and for the samples of one."""
    num, weights = 200_000, {0: 1.0, 1: 2.0, 4: 5.0}
    numbers = np.repeat([4, 1, 0], [10, num - 1010, 1000])
    drawn = WeightedOrder(numbers, weights, seed=3).indices(0, np.arange(num))
    for number, weight in weights.items():
        share = weight / 8
        assert abs((numbers[drawn] == number).sum() - num * share) < 5 * (num * share * (1 - share)) ** 0.5
    counts = np.bincount(drawn[numbers[drawn] == 4], minlength=10)
    assert (abs(counts - counts.sum() / 10) < 5 * (counts.sum() * 0.09) ** 0.5).all()


def test_epochs_differ_and_the_rest_of_one_is_the_same(rng: random.Random) -> None:
    pipeline = weighted("by class")
    whole = keys(pipeline, epochs=2)
    assert len(whole) == 400
    assert whole[:200] != whole[200:]
    assert sum(key.startswith("rare") for key in whole) > 80
    num = rng.randrange(1, 25)
    with loaderkit.build(pipeline, connectors={"memory": stored()}) as loader:
        for _, _ in zip(range(num), loader, strict=False):
            pass
        state = loader.state_dict()
    with loaderkit.build(pipeline, connectors={"memory": stored()}) as loader:
        loader.load_state_dict(state)
        assert [key for batch in loader for key in batch["__key__"]] == whole[8 * num : 200]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_sequence(world: int) -> None:
    whole, pipeline = (
        keys(weighted({"rare": 1, "usual": 0, "common": 1}, 4)),
        weighted({"rare": 1, "usual": 0, "common": 1}, 4),
    )
    ranks = [keys(pipeline, rank=rank, world_size=world) for rank in range(world)]
    assert [ranks[n % world][n // world] for n in range(200)] == whole
    assert not any(key.startswith("usual") for key in whole)


def test_another_weight_is_another_order() -> None:
    with loaderkit.build(weighted("by class"), connectors={"memory": stored()}) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for other in ({"rare": 1, "usual": 1, "common": 2}, None):
        with (
            loaderkit.build(weighted(other), connectors={"memory": stored()}) as loader,
            pytest.raises(StateError, match="order"),
        ):
            loader.load_state_dict(state)


def test_it_comes_back_from_yaml(tmp_path: Path) -> None:
    for weights in ("by class", {"rare": 1.5, "usual": 0.0, "common": 2.0}):
        (tmp_path / "p.yaml").write_text(weighted(weights).to_yaml())
        assert keys(Pipeline.from_yaml(tmp_path / "p.yaml")) == keys(weighted(weights))


BAD = {
    "a class that is none": (
        {"rare": 1, "usual": 1, "common": 1, "cat": 2},
        {},
        "'cat' is no class; there are: common, rare",
    ),
    "one left out": ({"rare": 1, "usual": 1}, {}, "'common' has no weight"),
    "none at all": ({"rare": 0, "usual": 0, "common": 0}, {}, "no class that has samples has a weight above 0"),
    "no classes": ("by class", {"label": "none"}, "`files` knows with `label: parent` or `labels`"),
    "below 0": ({"rare": -1}, {}, "greater than or equal to 0|at least 0"),
    "words": ("by weight", {}, "by class"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    weights, labels, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        keys(weighted(weights, 8, **labels))


@pytest.mark.parametrize("shuffle", ["none", "block"])
def test_not_with_another_order(shuffle: str) -> None:
    pipeline = Pipeline.files("memory://x", label="parent").shuffle(shuffle, weights="by class").read().batch(2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use `shuffle: global`"):
        keys(pipeline)


def test_not_for_sources_that_are_mixed() -> None:
    data = {"label": "parent", "include": "**/*.bin"}
    one, two = (Pipeline.files(f"memory://{name}", **data) for name in "ab")  # type: ignore[arg-type]
    mixed = Pipeline.mix({"a": one, "b": two}).shuffle(seed=1, weights="by class").read().batch(10)
    with pytest.raises(ConfigError, match="sources that are mixed have their own"):
        keys(mixed)


def half(sample: dict[str, Any], number: int) -> dict[str, Any]:
    return {"half": number}


def test_not_with_what_makes_several_of_one() -> None:
    data = {"label": "parent", "include": "**/*.bin"}
    pipeline = Pipeline.files("memory://a", **data).shuffle(weights="by class").read().expand(half, 2).batch(2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nor expanded"):
        keys(pipeline)


def draw(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    """Numbers by which each time that a sample comes is told from the others."""
    return {"number": float(rng.random())}


@pytest.mark.parametrize("executor", ["thread", "process", "inline"])
def test_each_time_it_comes_a_sample_has_random_numbers_of_its_own(executor: str) -> None:
    """The same ones whoever draws them, and after resuming."""
    args = {"label": "parent", "include": "**/*.bin"}
    found = Pipeline.files("memory://x", **args).shuffle(seed=5, weights={"rare": 9, "usual": 1, "common": 1})  # type: ignore[arg-type]
    pipeline = found.read().call(draw).batch(8)
    with loaderkit.build(
        pipeline, connectors={"memory": stored()}, overrides={"prefetch.executor": executor}
    ) as loader:
        drawn = [pair for batch in loader for pair in zip(batch["__key__"], batch["number"].tolist(), strict=True)]
    assert len({key for key, _ in drawn}) < len(drawn) == len({number for _, number in drawn})
    with loaderkit.build(
        pipeline, connectors={"memory": stored()}, overrides={"prefetch.executor": "inline"}
    ) as loader:
        for _ in zip(range(7), loader, strict=False):
            pass
        state = loader.state_dict()
    with loaderkit.build(
        pipeline, connectors={"memory": stored()}, overrides={"prefetch.executor": executor}
    ) as loader:
        loader.load_state_dict(state)
        rest = [pair for batch in loader for pair in zip(batch["__key__"], batch["number"].tolist(), strict=True)]
    assert rest == drawn[7 * 8 :]


def refuse(sample: dict[str, Any]) -> None:
    if sample["__key__"] in ("rare/0.bin", "common/7.bin"):
        raise ValueError("bad")


def test_a_bad_sample_is_replaced_by_others_of_its_class() -> None:
    """Each time by another one, and never by one without weight."""
    args = {"label": "parent", "include": "**/*.bin"}
    pipeline = Pipeline.files("memory://x", **args).shuffle(weights={"rare": 1, "usual": 0, "common": 1})  # type: ignore[arg-type]
    overrides = {"errors.on_bad_sample": "replace", "errors.max_bad_samples": 1000, "prefetch.executor": "thread"}
    with loaderkit.build(
        pipeline.read().call(refuse).batch(8), connectors={"memory": stored()}, overrides=overrides
    ) as loader:
        found = [key for _ in range(3) for batch in loader for key in batch["__key__"]]
    with loaderkit.build(pipeline.read().batch(8), connectors={"memory": stored()}) as loader:
        whole = [key for _ in range(3) for batch in loader for key in batch["__key__"]]
    pairs = [(one, other) for one, other in zip(whole, found, strict=True) if one != other]
    assert {one for one, _ in pairs} <= {"rare/0.bin", "common/7.bin"}
    assert {other for one, other in pairs if one == "rare/0.bin"} == {"rare/1.bin", "rare/2.bin"}
    assert all(one.partition("/")[0] == other.partition("/")[0] for one, other in pairs)
