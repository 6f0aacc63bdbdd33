"""The crash matrix: 900 points at which a save is disturbed, and test_killed_ranks.py has 100 more; in both formats, and by
threads and by a process.

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
PATIENCE_S = 600.0  # a process that writes takes seconds of CPU time to start


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


def manager_of(world: World, **settings: Any) -> loaderkit.CheckpointManager:
    return loaderkit.CheckpointManager("given://", keep={"last": 2}, connectors={"given": world.connector}, **settings)


def name_of(writer: str, step: int) -> str:
    return f"step-{step}" if writer == "stream" else f"step-{step:010d}"


class Saver:
    """Saves by one of the ways; the name of a checkpoint and the number of its state are two things."""

    def __init__(self, world: World, point: Point) -> None:
        self.world, self.point = world, point
        self._manager: loaderkit.CheckpointManager | None = None
        if point.writer != "stream":
            flush = "process" if point.writer == "process" else "thread"
            self._manager = manager_of(world, format=point.format, flush=flush)

    def save(self, step: int, number: int) -> bool:
        """True if it says that it is saved."""
        try:
            if self._manager is None:
                save_to(self.world.connector, name_of("stream", step), number, self.point.format)
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


def prepared(world: World, point: Point) -> Saver:
    saver = Saver(world, point)
    assert saver.save(1, 1)
    assert saver.save(2, 2)
    return saver


COUNTS: dict[Point, int] = {}


def calls_of(point: Point, server: Seaweed | None) -> int:
    """How many calls the save of such a point makes, if nothing happens."""
    key = point._replace(fault="", share=0.0)
    if key not in COUNTS:
        with made_world(point.store, server, is_shared=point.writer == "process") as world:
            saver = prepared(world, point)
            world.arm("", None)
            assert saver.save(2 if point.again else 3, 3)
            COUNTS[key] = world.num_calls
            saver.close()
    return COUNTS[key]


def newest(world: World, writer: str) -> int:
    """The step that a job would go on with."""
    if writer != "stream":
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


@pytest.mark.matrix(8)
@pytest.mark.parametrize("point", points(), ids=str)
def test_a_disturbed_save(point: Point, server: Seaweed | None, rng: random.Random) -> None:
    last = int(point.share * calls_of(point, server))
    step, writer = (2 if point.again else 3), point.writer
    with made_world(point.store, server, is_shared=writer == "process") as world:
        saver = prepared(world, point)
        world.arm(point.fault, last)
        is_saved = saver.save(step, 3)
        assert world.num_calls > last
        world.settle(point.fault, rng)
        found = newest(world, writer)
        number = number_in(world.connector, name_of(writer, found))
        assert (found, number) in {(2, 2), (step, 3)}
        assert not is_saved or number == 3
        # Where nothing is renamed, the description comes just before the manifest.
        is_renamed = point.store == "file" and not point.again
        assert_restored(world, writer, found, number, verify=writer != "stream" or is_renamed or is_saved or "auto")
        if not is_saved:  # a process that has died saves no more
            saver.close()
            saver = Saver(world, point)
        if writer != "stream":
            assert saver.save(4, 4)
            assert saver.save(5, 5)
            assert_restored(world, writer, 5, 5)
            assert steps_in(world.names()) == [4, 5]
        else:
            assert saver.save(step, 4)
            assert_restored(world, writer, step, 4)
            assert steps_in(world.names()) == [*range(1, step + 1)]
        saver.close()


def test_nothing_is_left_of_a_save_that_a_full_disk_ended(rng: random.Random) -> None:
    """At once, as the disk stays full until somebody makes room."""
    for _ in range(4):
        store, writer = rng.choice(["file", "file", "mount"]), rng.choice(["manager", "stream"])
        point = Point(store, "full", False, writer, rng.choice(["dcp", "safetensors"]), rng.random())
        last = int(point.share * calls_of(point, None))
        with made_world(store, None) as world:
            saver = prepared(world, point)
            world.arm("full", last)
            assert saver.save(3, 3) or steps_in(world.names()) == [1, 2], point
            world.arm("", None)
            saver.close()
