"""Actors and nodes that are lost while a loader runs: the batches stay what they are, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dying import die_always, frozen, records
from numbers_dataset import Numbers, is_running, numbers, pids_of
from ray_nodes import Nodes, build_ray, check_nothing_left, live_actors
from waiting import messages_with, wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.ray import actor_process
from loaderkit.engine.ray.actor_inbox import ActorInbox
from loaderkit.errors import ClosedError, StallTimeout, WorkerDiedError

HELPERS = Path(__file__).parents[2] / "helpers"


def kill_one(loader: loaderkit.Loader, nodes: Nodes, how: str, rng: random.Random) -> None:
    """Kill one of a loader's actors, or a node with actors on it, in whose place comes another one."""
    tuning = loader.stats().tuning
    number = rng.randrange(len(tuning.pids or ()))
    if how == "actor":
        os.kill((tuning.pids or ())[number], signal.SIGKILL)
        return
    name = (tuning.nodes or ())[number]
    nodes.lose(nodes.named(name))
    nodes.add()


def delays_of_deaths(nodes: Nodes, num_deaths: int, hows: list[str], folder: Path, rng: random.Random) -> list[float]:
    """Runs in which actors and nodes die at drawn moments give what `inline` gives. The longest wait after each death, in s."""
    depth, num = 4, 2
    apart = 3 * (depth + num)
    size = 8 * apart * (num_deaths + 2)
    pipeline = records(size, folder, {})
    skips: dict[str, Any] = {"errors.on_bad_sample": "skip", "errors.max_bad_samples": size}
    with loaderkit.build(pipeline, overrides={**skips, "prefetch.executor": "inline"}) as loader:
        expected = [frozen(batch) for batch in loader]
    places = [apart * (number + 1) + rng.randrange(apart // 2) for number in range(num_deaths)]
    delays: list[float] = []
    found = []
    overrides = {**skips, "prefetch.batches": depth, "prefetch.restarts": 3 * num_deaths}
    with build_ray(pipeline, num, **overrides) as loader:
        stream = iter(loader)
        while True:
            begin_s = time.perf_counter()
            batch = next(stream, None)
            if delays:
                delays[-1] = max(delays[-1], time.perf_counter() - begin_s)
            if batch is None:
                break
            found.append(frozen(batch))
            if len(found) in places:
                kill_one(loader, nodes, hows[len(delays) % len(hows)], rng)
                delays.append(0.0)
        stats = loader.stats()
    assert found == expected
    assert stats.num_restarts >= num_deaths
    assert stats.stall_s["worker restart"] > 0
    del batch, stream
    check_nothing_left()
    return delays


@pytest.mark.matrix(1)
@pytest.mark.parametrize("how", ["actor", "node"])
def test_the_same_batches(how: str, ray_nodes: Nodes, tmp_path: Path, rng: random.Random) -> None:
    delays_of_deaths(ray_nodes, 2, [how], tmp_path, rng)


@pytest.mark.prove
def test_the_same_batches_after_a_hundred_deaths(
    ray_nodes: Nodes,
    tmp_path: Path,
    rng: random.Random,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, num_deaths, hows in (
        ("actors", 50, ["actor"]),
        ("nodes", 20, ["node"]),
        ("mixed", 30, ["actor", "node"]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        delays = delays_of_deaths(ray_nodes, num_deaths, hows, folder, rng)
        with capsys.disabled():
            print(f"\n{num_deaths} {name}: median delay {statistics.median(delays):.2f} s, longest {max(delays):.2f} s")


class TestEnds:
    @pytest.fixture(autouse=True)
    def _connected(self, ray_nodes: Nodes) -> None:
        pass

    @pytest.mark.parametrize("position", [0, 40])
    def test_the_second_death_at_a_batch(self, position: int) -> None:
        """Also at the first one that an actor makes, of which it dies as soon as it has begun."""
        pipeline = Pipeline.dataset(Numbers(160)).shuffle("none").read()
        pipeline = pipeline.call(die_always, args={"key": str(position + 4), "how": "SIGKILL"}).batch(8)
        keys: list[str] = []
        with (
            messages_with("restarts (prefetch.restarts) are left") as warnings,
            build_ray(pipeline, 1) as loader,
            pytest.raises(WorkerDiedError, match=rf"position {position} of epoch 0.* is the second") as caught,
        ):
            for batch in loader:
                keys += batch["__key__"]
        assert keys == [str(number) for number in range(position)]
        assert caught.value.samples == tuple(str(number) for number in range(position, position + 8))
        assert "the actor that loads (pid " in warnings.get()
        assert " on node " in str(caught.value)
        batch = None
        del caught
        check_nothing_left()

    def test_no_room(self) -> None:
        """A wait for a place says what is missing, and ends where `on_timeout` says so."""
        settings = {"num_cpus": 64.0}
        overrides = {"prefetch.ray": settings, "prefetch.timeout": 1.0, "prefetch.on_timeout": "raise"}
        with build_ray(numbers(), 1, **overrides) as loader, pytest.raises(StallTimeout) as caught:
            next(iter(loader))
        assert "ray: waits for 64 CPUs; the cluster has 12, of which" in str(caught.value)
        assert "no node has as many" in str(caught.value)
        del caught
        check_nothing_left()

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("way", ["break", "close", "collected"])
    def test_nothing_is_left(self, way: str) -> None:
        loader = build_ray(numbers(800))
        stream = iter(loader)
        for _ in range(5):
            next(stream)
        pids = pids_of(loader)
        assert len(live_actors()) == 2
        if way == "close":
            loader.close()
        del loader, stream
        wait_for(lambda: not any(map(is_running, pids)))
        check_nothing_left()

    def test_nothing_is_left_of_a_start_that_was_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As by a signal's handler that closes the loader."""
        num_begun = itertools.count()

        def interrupted(*arguments: Any, **options: Any) -> ActorInbox:
            if next(num_begun) == 1:
                loader.close()
            return ActorInbox(*arguments, **options)

        monkeypatch.setattr(actor_process, "ActorInbox", interrupted)
        with build_ray(numbers(), 2) as loader, pytest.raises(ClosedError):
            next(iter(loader))
        check_nothing_left()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_the_drivers_end(how: str, ray_nodes: Nodes) -> None:
    """Ctrl-C and kill -9 of the program that trains leave no actor, process or object."""
    program = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import loaderkit\n"
        "from numbers_dataset import numbers, pids_of\n"
        "ray = {'address': sys.argv[1], 'num_cpus': 0.5}\n"
        "settings = {'prefetch.executor': 'ray', 'prefetch.processes': 2, 'prefetch.ray': ray}\n"
        "with loaderkit.build(numbers(10**6), overrides=settings) as loader:\n"
        "    for number, batch in enumerate(loader):\n"
        "        if number == 4: print(*pids_of(loader), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, ray_nodes.address, str(HELPERS)], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        pids = list(map(int, driver.stdout.readline().split()))
        assert len(pids) == 2
        driver.send_signal(signal.Signals[how])
        driver.wait(60)
    wait_for(lambda: not any(map(is_running, pids)))
    check_nothing_left()


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("site", "says"),
    [
        ("import sys; sys.modules['loaderkit'] = None", r"could not be made on node .*ModuleNotFoundError.*loaderkit"),
        (
            "from loaderkit._internal import version; version.__version__ = '0.0.1'",
            r"loaderkit 0\.0\.1 is there, and the program has \d",
        ),
    ],
    ids=["none", "another"],
)
def test_a_node_without_this_loaderkit_is_named(
    ray_nodes: Nodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    site: str,
    says: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HELPERS.parents[1]}")
    (node,) = ray_nodes.add(bare=1)
    try:
        needs = {"prefetch.ray": {"num_cpus": 0.5, "resources": {"bare": 0.1}}}
        with build_ray(numbers(), 1, **needs) as loader, pytest.raises(WorkerDiedError, match=says) as caught:
            next(iter(loader))
        assert "install the same loaderkit, and what your code imports, on all nodes" in str(caught.value)
        assert caught.value.samples == ()
    finally:
        ray_nodes.lose(node)
    del caught
    check_nothing_left()
