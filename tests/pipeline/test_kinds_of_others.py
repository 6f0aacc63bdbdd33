"""Kinds of other packages are held to what they give, and are not taken for ours by a name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from extensions import forget_after
from pydantic import create_model

import loaderkit
from loaderkit.errors import StateError
from loaderkit.extend import StageArgs, StageKind, register
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.fingerprint import arguments_of

OURS = ("timeout", "thread_safe", "max_pixels", "formats", "device", "regions", "on_gpu_error", "on_empty_batch")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch)


# ------------------------------------------------------------------------------------------------- their arguments


def unchanged(args: StageArgs) -> Callable[..., None]:
    def run(sample: dict[str, Any], draws: Any, scratch: Any = None) -> None:
        del sample, draws

    return run


def described(stage: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "dataset", "object": [{"x": number} for number in range(6)]},
        "stages": ["read", stage, {"batch": {"size": 2}}],
        "order": {"epochs": 1},
        "prefetch": {"executor": "inline"},
    }


def state_of(stage: Any) -> Any:
    with loaderkit.build(described(stage)) as loader:
        return json.loads(json.dumps(loader.state_dict()))


def is_accepted(state: Any, stage: Any) -> bool:
    with loaderkit.build(described(stage)) as loader:
        try:
            loader.load_state_dict(state)
        except StateError as error:
            return "stages.odd" not in str(error)
        return True


def register_odd(**fields: Any) -> None:
    args = create_model("OddArgs", __base__=StageArgs, __doc__="Odd.", **fields)
    register("odd", StageKind(args, "sample", make=unchanged))


@pytest.mark.parametrize("name", OURS)
def test_an_argument_named_like_one_of_ours_counts(name: str, rng: random.Random) -> None:
    register_odd(**{name: (int, 0)})
    values = rng.sample(range(9), 3)
    states = {value: state_of({"odd": {name: value}}) for value in values}
    for value in values:
        assert [one for one in values if is_accepted(states[one], {"odd": {name: value}})] == [value]
    assert is_accepted(states[values[0]], {"odd": {name: values[0], "workers": 2}})
    stages = [parse(described({"odd": {name: value}})).stages[1] for value in values]
    told = [json.dumps(arguments_of(stage, of="lengths")) for stage in stages]
    assert len(set(told)) == len(values)


@pytest.mark.parametrize(
    "make", [np.array, torch.tensor, lambda x: {"of": np.array(x)}], ids=["array", "tensor", "dict"]
)
@pytest.mark.parametrize("default", [None, "array"])
def test_arrays_are_arguments(make: Callable[[Any], Any], default: Any, rng: random.Random) -> None:
    one = [rng.randint(0, 9) for _ in range(rng.randint(2, 6))]
    other = [*one[:-1], one[-1] + 1]
    register_odd(table=(Any, None if default is None else make(one)))
    state = state_of({"odd": {"table": make(one)}})
    assert is_accepted(state, {"odd": {"table": make(one)}})
    assert not is_accepted(state, {"odd": {"table": make(other)}})
    assert not is_accepted(state, {"odd": {"table": make([one])}})
    if default is not None and not isinstance(make(one), dict):
        assert is_accepted(state, "odd"), "it is at its default"
