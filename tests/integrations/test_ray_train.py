"""examples/ray_train.py: workers, nodes and drivers die or get SIGTERM, and the losses are those of a training without Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ray_clusters import ray_cluster, started_node

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


class Expected(NamedTuple):
    lines: list[str]
    """What the program prints."""
    samples: dict[int, list[int]]
    """Those of each step, sorted."""


@pytest.fixture
def expected(one_thread: None) -> Expected:
    """What two ranks compute, one after the other; halves are summed as DistributedDataParallel does. With one thread, as they
    have: sums of several threads differ in their last digits."""
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lines, samples = [], {}
    with example.make_loader(0, 2) as first, example.make_loader(1, 2) as second:
        for step, batches in zip(range(1, NUM_STEPS + 1), zip(first, second, strict=True), strict=False):
            halves = [(model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean() / 2 for batch in batches]
            gradients = [torch.autograd.grad(half, list(model.parameters())) for half in halves]
            for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = one + other
            optimizer.step()
            lines.append(f"step {step}: {(halves[0] + halves[1]).item():.9g}")
            samples[step] = sorted(number for batch in batches for number in (batch["y"] * 1200).round().int().tolist())
    return Expected(lines, samples)


def losses(address: str, program: Path, *arguments: object) -> list[str]:
    """The lines that the program prints, by step."""
    done = run(address, program, *arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def run(address: str, program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **QUICK, **PATIENT, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)  # if it hangs


def nodes_of_attempts(folder: Path, rank: int = 0) -> list[str]:
    """The node of a rank in each."""
    return [path.read_text() for path in sorted(folder.glob(f"attempt-*-{rank}"))]


@pytest.mark.prove
def test_losses_are_the_same_if_a_worker_is_killed(tmp_path: Path, rng: random.Random, expected: Expected) -> None:
    killed_at, save_every = rng.randrange(1, NUM_STEPS + 1), rng.choice([1, 3, 50])
    arguments = ("--steps", NUM_STEPS, "--save-every", save_every, "--folder", tmp_path / "run")
    with ray_cluster(2) as cluster:
        found = losses(cluster.address, DYING, tmp_path, f"kill:{killed_at}", *arguments)
    assert len(nodes_of_attempts(tmp_path)) == 2
    assert found == expected.lines, (killed_at, save_every)


@pytest.mark.prove
@pytest.mark.parametrize("number", range(4))
def test_losses_are_the_same_if_a_node_is_taken_away(
    tmp_path: Path, rng: random.Random, number: int, expected: Expected
) -> None:
    (killed_at, drained_at), save_every = rng.sample(range(1, NUM_STEPS), 2), rng.choice([1, 3, 50])
    half = ("--steps", NUM_STEPS // 2, "--save-every", save_every, "--folder", tmp_path / "quiet")
    whole = ("--steps", NUM_STEPS, "--save-every", save_every, "--folder", tmp_path / "run")
    with ray_cluster(2, nodes=2) as cluster:
        quiet = losses(cluster.address, EXAMPLE, *half)
        found = losses(cluster.address, DYING, tmp_path, f"kill:{killed_at},drain:{drained_at}", *whole)
    drained_in, drained = (tmp_path / "drained").read_text().split()
    for rank in range(2):
        nodes = nodes_of_attempts(tmp_path, rank)
        assert len(nodes) == 3, "killed, and taken away"
        assert drained not in nodes[int(drained_in) + 1 :], "the next workers are not on the node that was taken away"
    assert found == expected.lines, (killed_at, drained_at, save_every)
    assert quiet == found[: NUM_STEPS // 2]


def json_lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.read_text().splitlines()]


def check_attempt(folder: Path, attempt: int, num_workers: int, expected: Expected) -> range:
    """The steps that rank 0 has trained. None is left out, and all ranks together had the samples of a training without Ray."""
    places = sorted(folder.glob(f"trained-{attempt}-*.jsonl"))
    ranks = [{line["step"]: line["numbers"] for line in json_lines(place)} for place in places]
    assert len(ranks) == num_workers
    for rank in ranks:
        assert rank.keys() == ranks[0].keys()
    steps = range(min(ranks[0]), max(ranks[0]) + 1)
    for step in steps:
        assert sorted(number for rank in ranks for number in rank[step]) == expected.samples[step], step
    return steps


def check_reports(folder: Path, num_workers: int) -> list[int]:
    """The steps of the reports that Ray Train has given to its callbacks: for each rank what its loader's statistics were."""
    returned = [json_lines(folder / f"returned-{rank}.jsonl") for rank in range(num_workers)]
    reports = [line["ranks"] for line in json_lines(folder / "reported.jsonl")]
    for report in reports:
        assert len(report) == num_workers
        for rank, values in enumerate(report):
            assert values in returned[rank]
            assert 0 <= values["loaderkit/numbers/stall_percent"] <= 100
            assert values["loaderkit/numbers/samples_per_second"] > 0
    return [report[0]["step"] for report in reports]


@pytest.mark.prove
def test_no_step_is_lost_if_the_program_of_a_node_gets_sigterm(
    tmp_path: Path, rng: random.Random, expected: Expected
) -> None:
    node_at, save_every = rng.randrange(1, NUM_STEPS), rng.choice([1, 3, 50])
    arguments = ("--steps", NUM_STEPS, "--save-every", save_every, "--folder", tmp_path / "run")
    with ray_cluster(2) as cluster, started_node(cluster.address, 1) as node:
        (tmp_path / "node").write_text(str(node))
        found = losses(cluster.address, DYING, tmp_path, f"node:{node_at}", *arguments)
    nodes = [set(ranks) for ranks in zip(*(nodes_of_attempts(tmp_path, rank) for rank in range(2)), strict=True)]
    assert [len(names) for names in nodes] == [2, 1], "the next workers are not on the node that was taken away"
    assert check_attempt(tmp_path, 0, 2, expected) == range(1, node_at + 1)
    assert check_attempt(tmp_path, 1, 2, expected) == range(node_at + 1, NUM_STEPS + 1)
    assert found == expected.lines, (node_at, save_every)


def test_signals_and_other_numbers_of_workers(tmp_path: Path, rng: random.Random, expected: Expected) -> None:
    """SIGTERM to a worker, and to the driver; then 4 workers and 1 go on."""
    worker_at, save_every = rng.randrange(2, 7), rng.choice([1, 2])
    driver_at = rng.randrange(worker_at + 3, NUM_STEPS)
    arguments = ("--steps", NUM_STEPS, "--save-every", save_every, "--report-every", 2)
    at_two, at_four, at_one = tmp_path / "two", tmp_path / "four", tmp_path / "one"
    with ray_cluster(4) as cluster:
        events = f"worker:{worker_at},driver:{driver_at}"
        ended = run(cluster.address, DYING, at_two, events, *arguments, "--folder", at_two / "run")
        for folder in (at_four, at_one):
            shutil.copytree(at_two / "run", folder / "run")
        four = (at_four, "", *arguments, "--workers", 4, "--folder", at_four / "run")
        one = (at_one, "", *arguments, "--workers", 1, "--folder", at_one / "run")
        printed = losses(cluster.address, DYING, *four, "--", *one)
    case = (worker_at, driver_at, save_every)

    assert ended.returncode != 0, ended.stderr  # Ray aborts at times while it ends
    first, second = (check_attempt(at_two, attempt, 2, expected) for attempt in range(2))
    assert (first, second[-1]) == (range(1, worker_at + 1), driver_at), case
    check_resumed(second[0], worker_at, save_every)
    check_reports(at_two, 2)

    resumed = check_attempt(at_four, 0, 4, expected)
    assert check_attempt(at_one, 0, 1, expected) == resumed
    check_resumed(resumed[0], driver_at, save_every)
    assert resumed[-1] == NUM_STEPS
    for lines in printed[:NUM_STEPS], printed[NUM_STEPS:]:
        assert lines[: resumed[0] - 1] == expected.lines[: resumed[0] - 1], case  # of the two, to the last bit
        assert values_of(lines) == pytest.approx(values_of(expected.lines), rel=1e-4)
    for folder, num_workers in (at_four, 4), (at_one, 1):
        assert check_reports(folder, num_workers) == [step for step in resumed if step % 2 == 0]


def check_resumed(first: int, signalled: int, save_every: int) -> None:
    """Behind what was saved when the signal came, or, if that was not whole yet, behind the save before."""
    saved = [0, *range(save_every, signalled, save_every)]
    assert first - 1 in saved[-2:], (first, signalled, saved)


def values_of(lines: list[str]) -> list[float]:
    return [float(line.partition(": ")[2]) for line in lines]
