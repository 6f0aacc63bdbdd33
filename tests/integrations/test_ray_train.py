"""examples/ray_train.py: a worker is killed and a node is taken away, and the losses are those of a training without Ray."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_clusters import ray_cluster

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_train.py"
DYING = ROOT / "tests" / "helpers" / "ray_train_dying.py"
NUM_STEPS = 12
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}
PATIENT = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}  # beside other programs


@pytest.fixture
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def expected(one_thread: None) -> list[str]:
    """What two ranks compute, one after the other; halves are summed as DistributedDataParallel does. With one thread, as they
    have: sums of several threads differ in their last digits."""
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lines = []
    with example.make_loader(0, 2) as first, example.make_loader(1, 2) as second:
        for step, batches in zip(range(1, NUM_STEPS + 1), zip(first, second, strict=True), strict=False):
            halves = [(model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean() / 2 for batch in batches]
            gradients = [torch.autograd.grad(half, list(model.parameters())) for half in halves]
            for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = one + other
            optimizer.step()
            lines.append(f"step {step}: {(halves[0] + halves[1]).item():.9g}")
    return lines


def losses(address: str, program: Path, *arguments: object) -> list[str]:
    """The lines that the program prints, by step."""
    environment = {**os.environ, **QUICK, **PATIENT, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def nodes_of_attempts(folder: Path, rank: int = 0) -> list[str]:
    """The node of a rank in each."""
    return [path.read_text() for path in sorted(folder.glob(f"attempt-*-{rank}"))]


@pytest.mark.prove
def test_losses_are_the_same_if_a_worker_is_killed(tmp_path: Path, rng: random.Random, expected: list[str]) -> None:
    killed_at, save_every = rng.randrange(1, NUM_STEPS + 1), rng.choice([1, 3, 50])
    arguments = ("--steps", NUM_STEPS, "--save-every", save_every, "--folder", tmp_path / "run")
    with ray_cluster(2) as cluster:
        found = losses(cluster.address, DYING, tmp_path, killed_at, 0, *arguments)
    assert len(nodes_of_attempts(tmp_path)) == 2
    assert found == expected, (killed_at, save_every)


@pytest.mark.prove
@pytest.mark.parametrize("number", range(4))
def test_losses_are_the_same_if_a_node_is_taken_away(
    tmp_path: Path, rng: random.Random, number: int, expected: list[str]
) -> None:
    (killed_at, drained_at), save_every = rng.sample(range(1, NUM_STEPS), 2), rng.choice([1, 3, 50])
    half = ("--steps", NUM_STEPS // 2, "--save-every", save_every, "--folder", tmp_path / "quiet")
    whole = ("--steps", NUM_STEPS, "--save-every", save_every, "--folder", tmp_path / "run")
    with ray_cluster(2, nodes=2) as cluster:
        quiet = losses(cluster.address, EXAMPLE, *half)
        found = losses(cluster.address, DYING, tmp_path, killed_at, drained_at, *whole)
    drained_in, drained = (tmp_path / "drained").read_text().split()
    for rank in range(2):
        nodes = nodes_of_attempts(tmp_path, rank)
        assert len(nodes) == 3, "killed, and taken away"
        assert drained not in nodes[int(drained_in) + 1 :], "the next workers are not on the node that was taken away"
    assert found == expected, (killed_at, drained_at, save_every)
    assert quiet == found[: NUM_STEPS // 2]
