"""`executor: ray` with `processes: auto`: the tuner adds actors where the loop waits for what they compute, as long as Ray has
room, and gives them back where it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from growing import digest, held
from ray_clusters import RAY
from ray_nodes import check_nothing_left, live_actors
from waiting import wait_for

import loaderkit
from loaderkit.engine.ray.cluster import RaySettings, num_that_fit

pytestmark = pytest.mark.usefixtures("ray_nodes")

# The tuner sets neither workers nor batches here, and two workers show that they wait for the GIL.
AUTO: dict[str, Any] = {**RAY, "prefetch.processes": "auto", "prefetch.concurrency": 2, "prefetch.batches": 4}
MILLISECONDS, STEP_S = 2, 0.15  # of a sample; and of the slow loop, in which one actor makes two batches and more
_NUM_BETWEEN_LOOKS = 10


class Loop:
    """Takes batches and notes what they hold."""

    def __init__(self, loader: loaderkit.Loader) -> None:
        self.loader = loader
        self.found: list[str] = []
        self._stream = iter(loader)

    def run_until(self, num: int, step_s: float = 0.0) -> None:
        """Until the tuner has settled for so many actors."""
        while not self.has_settled_for(num):
            # An answer of an actor whose GIL is held takes time, in which the loop would not wait for batches.
            for _ in range(_NUM_BETWEEN_LOOKS):
                batch = next(self._stream, None)
                assert batch is not None, self.loader.stats().tuning
                self.found.append(digest(batch))
                threading.Event().wait(step_s)

    def has_settled_for(self, num: int) -> bool:
        tuning = self.loader.stats().tuning
        return bool(tuning.processes == num and tuning.settled)

    def changes(self) -> list[tuple[int, int, bool]]:
        """What the tuner has decided on the number of actors: (before, after, kept)."""
        decisions = self.loader.stats().to_dict()["tuning"]["decisions"]
        return [(one["before"], one["after"], one["kept"]) for one in decisions if one["knob"] == "processes"]


@contextmanager
def looped(**overrides: Any) -> Iterator[Loop]:
    """A loop over samples that take a while under the GIL. At the end its batches are compared with those of `inline`."""
    with loaderkit.build(held(MILLISECONDS / 1000), overrides={**AUTO, **overrides}) as loader:
        loop = Loop(loader)
        yield loop
    with loaderkit.build(held(0.0), overrides={"prefetch.executor": "inline"}) as loader:
        assert loop.found == [digest(batch) for batch, _ in zip(loader, loop.found, strict=False)]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("most", "overrides"),
    [
        (2, {"prefetch.max_processes": 2}),
        (3, {"prefetch.ray": {"num_cpus": 3.0}}),  # three nodes have a CPU left each, which makes no place
    ],
    ids=["max_processes", "room"],
)
def test_as_many_as_there_may_be_and_back(
    most: int, overrides: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    wait_for(lambda: num_that_fit(RaySettings(num_cpus=4.0)) == 3)  # what another test had comes back a while later
    with looped(**overrides) as loop:
        loop.run_until(most)
        assert len(live_actors()) == most
        loop.run_until(1, STEP_S)
        changes = loop.changes()
        assert changes[0][0] == 1
        assert max(after for _, after, _ in changes) == most, "and no more are tried"
        assert any(kept and after == most for _, after, kept in changes)
        assert (changes[-1][1], changes[-1][2]) == (1, True)
        wait_for(lambda: len(live_actors()) == 1)
        nodes = loop.loader.stats().to_dict()["nodes"]
        assert sum(node["num_workers"] for node in nodes) == 1
    assert "could not set processes" not in caplog.text
    check_nothing_left()


@pytest.mark.prove
def test_room_that_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    """Another program takes a node and leaves it while the loop waits; a slow while lies before a second growth."""
    wait_for(lambda: num_that_fit(RaySettings(num_cpus=4.0)) == 3)
    other = _Occupant.options(num_cpus=4).remote()  # type: ignore[attr-defined]
    ray.get(other.is_there.remote())
    wait_for(lambda: num_that_fit(RaySettings(num_cpus=4.0)) == 2)
    with looped(**{"prefetch.ray": {"num_cpus": 3.0}}) as loop:
        loop.run_until(2)
        ray.kill(other)
        del other
        loop.run_until(3)
        loop.run_until(1, STEP_S)
        loop.run_until(3)
        assert max(after for _, after, _ in loop.changes()) == 3
    assert "could not set processes" not in caplog.text
    check_nothing_left()


@ray.remote
class _Occupant:
    def is_there(self) -> bool:
        return True
