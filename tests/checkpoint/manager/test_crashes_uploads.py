"""An upload that dies at any operation leaves the checkpoints that were there; the next manager goes on with it, and clears."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import HELPERS
from crashing import Clock, DeadError, Mortal, made_store, names_in
from power_cut import DroppingConnector
from seaweed import Seaweed
from tiered import number_in, state_of, steps_in
from tiered_and_killed import NUM, far_store

import loaderkit
from loaderkit.connectors.base import Connector
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.connectors.memory import MemoryConnector

KINDS = ["file", "memory", "memory-in-place", "power-cut", "fsspec", "memory-safetensors"]
MOST_OPERATIONS = 40
NUMBERS = itertools.count()
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def store_of(kind: str) -> Iterator[Connector]:
    if kind == "fsspec":
        store = FsspecConnector(f"memory://uploads-{next(NUMBERS)}")
        yield store
        store.close()
    else:
        with made_store(kind) as made:
            yield made


def manager_of(near: Connector, far: Connector, kind: str) -> loaderkit.CheckpointManager:
    return loaderkit.CheckpointManager(
        "far://",
        local={"path": "near://", "keep": 2},
        keep={"last": 2},
        format="safetensors" if "safetensors" in kind else None,
        connectors={"near": near, "far": far},
    )


def mortal(store: Connector, kind: str, clock: Clock) -> Mortal:
    return Mortal(store, clock, renames=kind not in ("memory-in-place", "memory-safetensors"))


def die(near: Connector, far: Mortal, kind: str, step: int, number: int, clock: Clock | None = None) -> None:
    """Save `number` as a step; the upload dies when the clock stops, which `far` gets once the manager has tried it."""
    checkpoints = manager_of(near, far, kind)
    far.clock = clock or Clock()
    with suppress(DeadError):
        checkpoints.save(step, state_of(number), force=True)
    with suppress(DeadError):
        checkpoints.close()


def number_alone(store: Connector, step: int) -> int:
    """The number of the state that one store holds by itself."""
    with loaderkit.CheckpointManager("far://", connectors={"far": store}) as checkpoints:
        return number_in(checkpoints, step)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("operation", range(MOST_OPERATIONS))
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_at_any_operation(kind: str, again: bool, is_before: bool, operation: int, rng: random.Random) -> None:
    with store_of(kind) as far:
        near = MemoryConnector()
        for step in (1, 2):
            die(near, mortal(far, kind, Clock()), kind, step, step)
        step = 2 if again else 3
        clock = Clock(operation, is_before=is_before)
        die(near, mortal(far, kind, Clock()), kind, step, 7, clock)
        if isinstance(far, DroppingConnector):
            far.cut(rng if operation % 2 else None)
        steps = steps_in(far)
        assert steps in ([[1, 2]] if again else [[1, 2], [1, 2, 3], [2, 3]]), clock.names
        for one in steps:
            assert number_alone(far, one) in ({one, 7} if one == step else {one})
        if not clock.is_dead:
            assert number_alone(far, step) == 7
        assert steps_in(near)[-1] == step
        assert number_alone(near, step) == 7  # it stands, whatever happens to its upload
        with manager_of(near, mortal(far, kind, Clock()), kind) as checkpoints:
            assert number_in(checkpoints) == 7
            if not again:  # a run that goes on saves
                checkpoints.wait_until_finished()
                assert number_alone(far, step) == 7
                checkpoints.save(4, state_of(4))
        assert steps_in(far) == ([1, 2] if again else [3, 4])
        assert number_alone(far, step) == 7
        assert {name.partition("/")[0] for name in names_in(far)} == {f"step-{one:010}" for one in steps_in(far)}
        assert len(names_in(far)) == (8 if "safetensors" in kind else 6)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_upload_has_more_operations(kind: str, again: bool) -> None:
    with store_of(kind) as far:
        near = MemoryConnector()
        for step in (1, 2, 3, 3 if again else 4):
            clock = Clock()
            die(near, mortal(far, kind, Clock()), kind, step, step, clock)
            assert 5 < len(clock.names) < MOST_OPERATIONS, clock.names


@pytest.mark.prove
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_killed_in_the_middle_of_an_upload(
    kind: str, again: bool, tmp_path: Path, rng: random.Random, seaweed: Seaweed, s3_keys: None
) -> None:
    """By kill -9, at one of the parts of the file, and at some other moment."""
    step = 1 if again else 2
    for operation in (3, rng.randrange(12)):
        case = tmp_path / str(operation)
        far = str(case / "far")
        if kind == "s3":
            bucket = f"uploads-{next(NUMBERS)}"
            seaweed.boto().create_bucket(Bucket=bucket)
            far = f"s3://{bucket}/runs"
        arguments = [str(case / "near"), far, str(step), str(operation)]
        program = [sys.executable, str(HELPERS / "tiered_and_killed.py"), *arguments]
        environment = {**os.environ, "AWS_ENDPOINT_URL": seaweed.endpoint}
        done = subprocess.run(program, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == -9 or "done" in done.stdout, done.stderr
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
            store = far_store(far)
        assert number_in_far(store, 1) in ((1, 7) if again else (1,))
        connectors = {"far": store}
        with loaderkit.CheckpointManager("far://", local=case / "near", connectors=connectors) as checkpoints:
            assert number_in(checkpoints, num=NUM) == 7
        assert number_in_far(store, step) == 7
        assert steps_in(store) == ([1] if again else [1, 2])
        assert len(names_in(store)) == 3 * len(steps_in(store))
        if kind == "s3":
            assert not seaweed.boto().list_multipart_uploads(Bucket=bucket).get("Uploads")
        store.close()


@pytest.mark.prove
def test_a_program_that_ends_without_close(tmp_path: Path) -> None:
    """It breaks its upload off, in the middle of the file, and the next run goes on with it."""
    program = """if True:
        import sys, loaderkit, tiered
        local = {"path": sys.argv[1], "upload": {"bandwidth": 1}}  # the second part's turn is in three months
        checkpoints = loaderkit.CheckpointManager(sys.argv[2], local=local)
        checkpoints.save(1, tiered.state_of(1, 10_000_000), wait=True)
    """
    arguments = [str(tmp_path / "near"), str(tmp_path / "far")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "The program ended without `close`; the next run goes on with the upload" in done.stderr
    assert not list((tmp_path / "far").glob("step-*"))
    with loaderkit.CheckpointManager(tmp_path / "far", local=tmp_path / "near"):
        pass
    with loaderkit.CheckpointManager(tmp_path / "far") as checkpoints:
        assert number_in(checkpoints, num=10_000_000) == 1
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["step-0000000001"]


def number_in_far(store: Connector, step: int) -> int:
    with loaderkit.CheckpointManager("far://", connectors={"far": store}) as checkpoints:
        return number_in(checkpoints, step, NUM)
