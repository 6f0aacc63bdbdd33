"""Runs a pipeline in several ways, and compares what they give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import loaderkit
from loaderkit._internal.compare import differ

EXECUTORS: tuple[dict[str, Any], ...] = (
    {"executor": "inline"},
    {"executor": "thread", "concurrency": 1},
    {"executor": "thread", "concurrency": 3},
)
IN_PROCESSES: dict[str, Any] = {"executor": "process", "processes": 2}


def epochs_of(described: Mapping[str, Any], prefetch: Mapping[str, Any], num_epochs: int = 1) -> list[dict[str, Any]]:
    """The batches of the first epochs."""
    order = {**described.get("order", {}), "epochs": num_epochs}
    with loaderkit.build({**described, "order": order, "prefetch": dict(prefetch)}) as loader:
        return [batch for _ in range(num_epochs) for batch in loader]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], what: str) -> None:
    """Batches equal to the last byte, field by field."""
    assert len(found) == len(expected), f"{what}: {len(found)} batches instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys(), f"{what}: batch {number} has other fields"
        for name in other:
            assert not differ(one[name], other[name]), f"{what}: {name!r} of batch {number} differs"


def assert_resumes(described: Mapping[str, Any], prefetch: Mapping[str, Any]) -> None:
    """From the state after each batch of an epoch, which goes through JSON, exactly the rest comes."""
    config = {**described, "order": {**described.get("order", {}), "epochs": 1}, "prefetch": dict(prefetch)}
    batches, states = [], []
    with loaderkit.build(config) as loader:
        for batch in loader:
            batches.append(batch)
            states.append(json.dumps(loader.state_dict()))
    for number, state in enumerate(states):
        with loaderkit.build(config) as loader:
            loader.load_state_dict(json.loads(state))
            assert_same(list(loader), batches[number + 1 :], f"resumed after batch {number}")
