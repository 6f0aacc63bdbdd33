"""The table of docs/jobs/index.md: by every loop training resumes exactly, at other numbers of ranks too and after SIGTERM, and
the loop's own logger has what the loader has waited for.

What each loop does is in tests/helpers/loops.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import HELPERS, ROOT
from loops.common import GLOBAL_BATCH, NUM_STEPS, STEPS_OF_EPOCH

LOOPS = {
    "plain": "its own",
    "by_lightning": "Lightning's Trainer",
    "by_fabric": "Lightning Fabric",
    "by_accelerate": "Accelerate",
    "by_trainer": "the Trainer of Transformers",
    "by_torchtitan": "torchtitan",
    "by_torchdata": "torchdata.nodes",
    "by_torchrun": "torchrun",
}
SAVE_ON_SIGNAL = {*LOOPS} - {"by_torchtitan"}  # which resumes after its last save
MARKS = {"by_torchrun": [pytest.mark.forked_workers]}


class Step(NamedTuple):
    numbers: list[int]
    losses: list[float]


Steps = dict[int, Step]


def lines_of(folder: Path, run: str) -> list[list[dict[str, Any]]]:
    """What each rank has written, in the order of ranks."""
    places = sorted(folder.glob(f"{run}-[0-9].jsonl"))
    return [[json.loads(line) for line in place.read_text().splitlines()] for place in places]


def steps_of(folder: Path, run: str) -> list[Steps]:
    """The steps of each rank. None is trained twice."""
    ranks = []
    for lines in lines_of(folder, run):
        trained = [line for line in lines if "numbers" in line]
        steps = {line["step"]: Step(line["numbers"], line["losses"]) for line in trained}
        assert [*steps] == [line["step"] for line in trained] == [*range(min(steps), max(steps) + 1)]
        ranks.append(steps)
    return ranks


def samples_of(ranks: list[Steps], step: int) -> list[int]:
    return sorted(number for rank in ranks for number in rank[step].numbers)


def check_samples(whole: list[Steps]) -> None:
    """An epoch has no sample twice, and the second another order."""
    epochs = [
        [samples_of(whole, step) for step in range(first, first + STEPS_OF_EPOCH)] for first in (1, STEPS_OF_EPOCH + 1)
    ]
    for epoch in epochs:
        assert len({number for step in epoch for number in step}) == GLOBAL_BATCH * STEPS_OF_EPOCH
    assert epochs[0] != epochs[1]


def check_resumed(whole: list[Steps], resumed: list[Steps], first: int) -> None:
    """At the same number of ranks all is the same, to the last bit of the losses; else the samples of each step are, and the
    loss is their mean."""
    for rank in resumed:
        assert [*rank] == [*range(first, NUM_STEPS + 1)]
    if len(resumed) == len(whole):
        assert resumed == [{step: rank[step] for step in range(first, NUM_STEPS + 1)} for rank in whole]
    for step in range(first, NUM_STEPS + 1):
        assert samples_of(resumed, step) == samples_of(whole, step), step
        assert mean_losses(resumed, step) == pytest.approx(mean_losses(whole, step), rel=1e-3), step


def mean_losses(ranks: list[Steps], step: int) -> list[float]:
    return [sum(losses) / len(ranks) for losses in zip(*(rank[step].losses for rank in ranks), strict=True)]


def check_logged(folder: Path) -> None:
    """The logger has what `loaderkit.metrics.log` has returned on rank 0."""
    returned = {line["step"]: line["logged"] for line in lines_of(folder, "whole")[0] if "logged" in line}
    found = {int(step): values for step, values in json.loads((folder / "logged.json").read_text()).items()}
    assert len(found) == NUM_STEPS
    assert found.keys() == returned.keys()
    for step, values in found.items():
        assert values == pytest.approx(returned[step], rel=1e-6)
        assert 0 <= values["loaderkit/rows/stall_percent"] <= 100
    assert any(values["loaderkit/rows/samples_per_second"] > 0 for values in found.values())


@pytest.mark.integration
@pytest.mark.parametrize("loop", [pytest.param(name, id=name, marks=MARKS.get(name, [])) for name in LOOPS])
def test_loop(loop: str, tmp_path: Path, rng: random.Random) -> None:
    stop, signalled = sorted(rng.sample([step for step in range(2, NUM_STEPS - 2) if step != STEPS_OF_EPOCH], 2))
    command = [sys.executable, "-m", "loops", loop, str(tmp_path), str(stop), str(signalled)]
    path = os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    whole = steps_of(tmp_path, "whole")
    assert [[*rank] for rank in whole] == [[*range(1, NUM_STEPS + 1)]] * 2
    check_samples(whole)
    for num_ranks in (2, 1, 4):
        resumed = steps_of(tmp_path, f"at-{num_ranks}")
        assert len(resumed) == num_ranks
        check_resumed(whole, resumed, stop + 1)

    ended = steps_of(tmp_path, "signalled")
    assert len(ended) == 2
    for rank, steps in zip(whole, ended, strict=True):
        assert steps == {step: rank[step] for step in range(1, max(steps) + 1)}
    last = min(max(steps) for steps in ended)
    assert signalled - 1 <= last < NUM_STEPS
    check_resumed(whole, steps_of(tmp_path, "after"), (last if loop in SAVE_ON_SIGNAL else stop) + 1)
    check_logged(tmp_path)
