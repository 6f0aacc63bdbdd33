"""The part of the crash matrix that kills real ranks: 100 points; what is there afterwards is one state whole."""

from __future__ import annotations

import itertools
import random
import signal
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from crash_points import BUCKET, steps_in
from crashing import names_in
from killed_ranks import save_and_be_killed, store_of, whole
from power_cut import DroppingConnector
from rank_programs import run_ranks
from seaweed import Seaweed

import loaderkit
from loaderkit.checkpoint.discovery.description import Format
from loaderkit.connectors.base import Connector

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_RANKS = 2


class Point(NamedTuple):
    """The store, who is killed, whether a checkpoint is replaced, at which part of the victim's operations, in which format,
    and what writes."""

    store: str
    victim: int
    kills_all: bool
    again: bool
    share: float
    format: Format
    flush: str

    def __str__(self) -> str:
        who = f"all by {self.victim}" if self.kills_all else self.victim
        again = "again" if self.again else "new"
        return f"{self.store}-{who}-{again}-{self.share:.3f}-{self.format}-{self.flush}"


def points() -> list[Point]:
    """100 of them: each combination 5 times, but for one rank killed before power is cut; of these two as safetensors, and one
    of most written by a process."""
    found: list[Point] = []
    formats: tuple[Format, ...] = ("dcp", "safetensors", "dcp", "safetensors", "dcp")
    for store, victim, kills_all, again in itertools.product(
        ("file", "s3", "power"), (0, 1), (False, True), (False, True)
    ):
        if store != "power" or kills_all:
            apart = len(found) // 5 % 5  # so that each share and each format comes to be written by a process
            is_seen = kills_all or victim == 0  # at once by the other rank, as the store that rank 0 serves is gone
            flushes = ["process" if is_seen and number == apart else "thread" for number in range(5)]
            found += [
                Point(store, victim, kills_all, again, (number + 0.5) / 5, formats[number], flushes[number])
                for number in range(5)
            ]
    return found


def template(number: int) -> dict[str, Any]:
    return {
        "model": {name: torch.zeros_like(tensor) for name, tensor in whole(number).items()},
        "number": -1,
        "names": [],
    }


def restored(store: Connector) -> tuple[int | None, int]:
    """The step and the number of what one process restores. Fails unless it is that state to the last bit."""
    state = template(1)
    with loaderkit.CheckpointManager("given://", connectors={"given": store}) as checkpoints:
        step = checkpoints.restore(state)
    number = state["number"]
    assert state["names"] == ["a", str(number)]
    for name, tensor in whole(number).items():
        assert torch.equal(state["model"][name], tensor)
    return step, number


@pytest.mark.matrix(1)
@pytest.mark.parametrize("point", points(), ids=str)
def test_killed_ranks(point: Point, tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest) -> None:
    where = str(tmp_path)
    if point.store == "s3":
        request.getfixturevalue("s3_keys")
        server: Seaweed = request.getfixturevalue("seaweed")
        server.make_bucket(BUCKET)
        where = f"s3://{BUCKET}/{uuid.uuid4().hex} {server.endpoint}"
    settings: dict[str, Any] = {"format": point.format, "flush": point.flush}
    arguments = (tmp_path, point.store, where, point.victim, point.kills_all, point.again, point.share, settings)
    codes = run_ranks(save_and_be_killed, NUM_RANKS, *arguments, patience_s=300.0)
    assert codes[point.victim] == -signal.SIGKILL
    assert codes[1 - point.victim] == 0 or (point.kills_all and codes[1 - point.victim] == -signal.SIGKILL)
    store = store_of(point.store, where)
    if isinstance(store, DroppingConnector):
        store.cut(rng if point.again else None)
    assert restored(store) in {(2, 2), (2 if point.again else 3, 3)}
    connectors = {"given": store}
    with loaderkit.CheckpointManager(
        "given://", keep={"last": 2}, format=point.format, connectors=connectors
    ) as checkpoints:
        for number in (4, 5):
            state = template(number) | {"number": number, "names": ["a", str(number)], "model": whole(number)}
            checkpoints.save(number, state, wait=True)
    assert restored(store) == (5, 5)
    assert steps_in(names_in(store)) == [4, 5]
    store.close()
