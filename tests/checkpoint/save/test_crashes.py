"""Saves that die one after the other, and a first one that dies; each by itself: manager/test_crash_matrix.py."""

from __future__ import annotations

import random
import re

import pytest
from crashing import Clock, DeadError, Mortal, made_store, names_in, number_in, save_to
from power_cut import DroppingConnector
from torch.distributed.checkpoint.api import CheckpointException

from loaderkit.checkpoint import latest
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError

KINDS = ["file", "memory", "memory-in-place", "power-cut"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def mortal(store: Connector, kind: str, clock: Clock) -> Mortal:
    return Mortal(store, clock, renames=kind != "memory-in-place")


def is_clean(store: Connector, steps: list[str]) -> bool:
    """True if nothing is there but these checkpoints, each with one file of one rank."""
    own = re.compile(r"(\.metadata|loaderkit-manifest\.json|__0_\d+\.distcp)")
    names = [name.split("/", 1) for name in names_in(store)]
    return sorted(own.sub("x", "/".join(name)) for name in names) == sorted(
        f"{step}/x" for step in steps for _ in range(3)
    )


def die(store: Connector, kind: str, name: str, number: int, clock: Clock) -> bool:
    """Save until the clock stops; True if it did."""
    try:
        save_to(mortal(store, kind, clock), name, number)
    except CheckpointException as error:
        if not isinstance(error.failures[0][0], DeadError):
            raise
    return clock.is_dead


@pytest.mark.parametrize("kind", KINDS)
def test_dead_again_and_again(kind: str, rng: random.Random) -> None:
    with made_store(kind) as store:
        save_to(mortal(store, kind, Clock()), "step-1", 0)
        present = 0
        for number in range(1, 12):
            die(store, kind, "step-1", number, Clock(rng.randrange(20), is_before=rng.random() < 0.5))
            if isinstance(store, DroppingConnector):
                store.cut(rng)
            found = number_in(store, "step-1")
            assert found in (present, number)
            present = found
        save_to(mortal(store, kind, Clock()), "step-1", 12)
        assert number_in(store, "step-1", verify=True) == 12
        assert is_clean(store, ["step-1"]), names_in(store)


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_save_that_died_is_no_checkpoint(kind: str) -> None:
    with made_store(kind) as store:
        assert die(store, kind, "step-1", 1, Clock(5))
        with pytest.raises(CheckpointError, match=r"no complete checkpoint|no such file"):
            latest("given://", connectors={"given": store})
