"""SIGTERM to one of torchrun's ranks at a random moment: all save the same step and exit with 0; the next start goes on."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HELPERS, ROOT

import loaderkit

PROGRAM = ROOT / "examples" / "restore_fsdp.py"
NUM_STEPS = 99
PATIENCE_S = 300.0
STEP = re.compile(r"step (\d+): (.*)")
STOPPED = re.compile(r"rank \d+ stops after step (\d+)")


def run(num_ranks: int, folder: Path, victim: int = -1, call: int = -1) -> tuple[list[tuple[int, str]], int | None]:
    """Start it; (step, loss) of each of its steps, and the step at which a notice stopped it."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    noticed = [HELPERS / "noticed.py", victim, call, PROGRAM]
    arguments = ["--steps", NUM_STEPS, "--folder", "runs", "--save-every", "10"]
    command = [sys.executable, *launcher, *map(str, (*noticed, *arguments))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    stopped = STOPPED.findall(done.stdout)
    assert not stopped or stopped == stopped[:1] * num_ranks, done.stdout
    return [(int(step), loss) for step, loss in STEP.findall(done.stdout)], int(stopped[0]) if stopped else None


def batches_of(folder: Path, num_ranks: int) -> list[list[str]]:
    return [(folder / f"batches-{rank}.txt").read_text().split() for rank in range(num_ranks)]


@pytest.mark.prove
@pytest.mark.parametrize(("num_ranks", "num_notices"), [(2, 1), (2, 10), (3, 10), (4, 10)])
def test_all_stop_at_one_step_and_go_on_there(
    num_ranks: int, num_notices: int, tmp_path: Path, rng: random.Random
) -> None:
    whole, stopped = run(num_ranks, tmp_path / "whole")
    assert ([step for step, _ in whole], stopped) == ([*range(1, NUM_STEPS + 1)], None)
    num_calls = min(int((tmp_path / "whole" / f"calls-{rank}.txt").read_text()) for rank in range(num_ranks))
    folder, losses = tmp_path / "parts", []
    for _ in range(num_notices):
        # So many calls of the whole run that all notices come before its end.
        victim, call = rng.randrange(num_ranks), rng.randrange(num_calls // (2 * num_notices + 4))
        found, stopped = run(num_ranks, folder, victim, call)
        losses += found
        assert stopped == losses[-1][0]
        with loaderkit.CheckpointManager(folder / "runs") as checkpoints:
            assert checkpoints.latest_step() == stopped
    losses += run(num_ranks, folder)[0]
    assert losses == whole
    assert batches_of(folder, num_ranks) == batches_of(tmp_path / "whole", num_ranks)
