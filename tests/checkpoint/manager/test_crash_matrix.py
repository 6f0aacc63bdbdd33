"""The crash matrix: 900 points at which a save is disturbed, and test_killed_ranks.py has 100 more.

What is there afterwards is the state before or the new one, byte for byte; the next save leaves nothing else.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoint_states import same
from crash_points import BUCKET, Point, World, made_world, points, steps_in
from crashing import DeadError, number_in, save_to, state_of
from seaweed import Seaweed
from torch.distributed.checkpoint.api import CheckpointException

import loaderkit
from loaderkit.checkpoint import latest
from loaderkit.errors import LoaderkitError

pytestmark = pytest.mark.filterwarnings("ignore")
PATIENCE_S = 120.0


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Seaweed | None:
    """The server, for the points that need it."""
    if request.getfixturevalue("point").store != "s3":
        return None
    request.getfixturevalue("s3_keys")
    found: Seaweed = request.getfixturevalue("seaweed")
    found.make_bucket(BUCKET)
    return found


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    yield
    late = [thread.name for thread in threading.enumerate() if re.match("loaderkit-(flush|save|saving)", thread.name)]
    assert late == []


def manager_of(world: World) -> loaderkit.CheckpointManager:
    return loaderkit.CheckpointManager("given://", keep={"last": 2}, connectors={"given": world.connector})


def name_of(writer: str, step: int) -> str:
    return f"step-{step:010d}" if writer == "manager" else f"step-{step}"


class Saver:
    """Saves by one of the two ways; the name of a checkpoint and the number of its state are two things."""

    def __init__(self, world: World, writer: str) -> None:
        self.world, self.writer = world, writer
        self._manager = manager_of(world) if writer == "manager" else None

    def save(self, step: int, number: int) -> bool:
        """True if it says that it is saved."""
        try:
            if self._manager is None:
                save_to(self.world.connector, name_of(self.writer, step), number)
            else:
                saving = self._manager.save(step, state_of(number), force=True)
                assert saving is not None
                saving.join(PATIENCE_S)
                assert saving.is_done
                self._manager.wait_until_finished()
        except (DeadError, LoaderkitError):
            return False
        except CheckpointException as error:
            if not all(isinstance(cause, (DeadError, LoaderkitError)) for cause, _ in error.failures.values()):
                raise
            return False
        return True

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


def prepared(world: World, writer: str) -> Saver:
    saver = Saver(world, writer)
    assert saver.save(1, 1)
    assert saver.save(2, 2)
    return saver


COUNTS: dict[tuple[str, str, bool], int] = {}


def calls_of(point: Point, server: Seaweed | None) -> int:
    """How many calls the save of such a point makes, if nothing happens."""
    key = (point.store, point.writer, point.again)
    if key not in COUNTS:
        with made_world(point.store, server) as world:
            saver = prepared(world, point.writer)
            world.arm("", None)
            assert saver.save(2 if point.again else 3, 3)
            COUNTS[key] = world.num_calls
            saver.close()
    return COUNTS[key]


def newest(world: World, writer: str) -> int:
    """The step that a job would go on with."""
    if writer == "manager":
        with manager_of(world) as checkpoints:
            step = checkpoints.latest_step()
        assert step is not None
        return step
    return int(latest("given://", connectors={"given": world.connector}).rpartition("-")[2])


def assert_restored(world: World, writer: str, step: int, number: int, *, verify: Any = True) -> None:
    """The checkpoint is that state to the last bit, and with `verify` every byte of it fits the manifest."""
    assert number_in(world.connector, name_of(writer, step), verify=verify) == number
    if writer == "stream":
        return
    expected = state_of(number)
    model = {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()}
    state = {"model": model, "step": -1, "names": None}
    with manager_of(world) as checkpoints:
        assert checkpoints.restore(state) == step
    assert (state["step"], state["names"]) == (number, expected["names"])
    assert all(same(model[name], tensor) for name, tensor in expected["model"].items())


@pytest.mark.matrix(54)
@pytest.mark.parametrize("point", points(), ids=str)
def test_a_disturbed_save(point: Point, server: Seaweed | None, rng: random.Random) -> None:
    last = int(point.share * calls_of(point, server))
    step, writer = (2 if point.again else 3), point.writer
    with made_world(point.store, server) as world:
        saver = prepared(world, writer)
        world.arm(point.fault, last)
        is_saved = saver.save(step, 3)
        assert world.num_calls > last
        world.settle(point.fault, rng)
        found = newest(world, writer)
        number = number_in(world.connector, name_of(writer, found))
        assert (found, number) in {(2, 2), (step, 3)}
        assert not is_saved or number == 3
        # Where nothing is renamed, torch's part of the commit comes just before the manifest.
        is_renamed = point.store == "file" and not point.again
        assert_restored(world, writer, found, number, verify=writer == "manager" or is_renamed or is_saved or "auto")
        if not is_saved:  # a process that has died saves no more
            saver.close()
            saver = Saver(world, writer)
        if writer == "manager":
            assert saver.save(4, 4)
            assert saver.save(5, 5)
            assert_restored(world, writer, 5, 5)
            assert steps_in(world.names()) == [4, 5]
        else:
            assert saver.save(step, 4)
            assert_restored(world, writer, step, 4)
            assert steps_in(world.names()) == [*range(1, step + 1)]
        saver.close()
