"""A manager that dies at any operation of a save or of the removal behind it leaves whole checkpoints only."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoint_states import same
from crashing import Clock, DeadError, Mortal, made_store, names_in, state_of
from power_cut import DroppingConnector

import loaderkit
from loaderkit.connectors.base import Connector

KINDS = ["file", "memory", "memory-in-place", "power-cut"]
MOST_OPERATIONS = 45
KEEP = {"last": 2}


def manager_of(store: Connector) -> loaderkit.CheckpointManager:
    return loaderkit.CheckpointManager("given://", keep=KEEP, connectors={"given": store})


def mortal(store: Connector, kind: str, clock: Clock) -> Mortal:
    return Mortal(store, clock, renames=kind != "memory-in-place")


def check(store: Connector, step: int) -> None:
    """The checkpoint of a step is its state to the last bit."""
    expected = state_of(step)
    model = {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()}
    state = {"model": model, "step": -1, "names": None}
    with manager_of(store) as checkpoints:
        assert checkpoints.restore(state, step) == step
    assert (state["step"], state["names"]) == (step, expected["names"])
    assert all(same(model[name], tensor) for name, tensor in expected["model"].items())


def die(store: Connector, kind: str, step: int, clock: Clock) -> None:
    checkpoints = manager_of(mortal(store, kind, clock))
    try:
        checkpoints.save(step, state_of(step))
        checkpoints.close()
    except DeadError:
        assert clock.is_dead


@pytest.mark.matrix(16)
@pytest.mark.parametrize("operation", range(MOST_OPERATIONS))
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_at_any_operation(kind: str, is_before: bool, operation: int, rng: random.Random) -> None:
    with made_store(kind) as store:
        with manager_of(mortal(store, kind, Clock())) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state_of(step))
        clock = Clock(operation, is_before=is_before)
        die(store, kind, 3, clock)  # and the removal of step 1
        if isinstance(store, DroppingConnector):
            store.cut(rng if operation % 2 else None)
        with manager_of(store) as checkpoints:
            steps = checkpoints.all_steps()
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), clock.names
        if not clock.is_dead:
            assert steps == [2, 3]
        for step in steps:
            check(store, step)
        with manager_of(mortal(store, kind, Clock())) as checkpoints:
            for step in (4, 5):
                checkpoints.save(step, state_of(step))
        assert {name.partition("/")[0] for name in names_in(store)} == {"step-0000000004", "step-0000000005"}
        check(store, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_save_has_more_operations(kind: str) -> None:
    with made_store(kind) as store:
        for step in range(1, 5):
            clock = Clock()
            die(store, kind, step, clock)
            assert len(clock.names) < MOST_OPERATIONS, clock.names
        assert "delete" in clock.names
