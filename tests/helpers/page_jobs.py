"""What the pages on schedulers train, and what an undisturbed run of it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_examples import named

ROOT = Path(__file__).parents[2]
NUM_STEPS = 90 * 6  # of six batches an epoch
PATIENCE_S = 300.0
STEP = re.compile(r"^step (\d+): (\S+)$", re.MULTILINE)
STOPPED = re.compile(r"^stopped after step (\d+)$", re.MULTILINE)
GOES_ON = re.compile(r"^goes on after step (\d+)$", re.MULTILINE)
# As from a slow disk, while the file `slow` is there.
_PIPELINE = """
source: {kind: files, url: data/train, include: "**/*.jpg", label: parent}
order: {seed: 3}
stages:
  - read
  - decode
  - random_resized_crop: {size: 32}
  - call: {function: "slow:wait"}
  - batch: {size: 5, drop_last: true}
  - normalize
prefetch: {executor: inline}
"""
_SLOW = """
import os
import time

def wait(sample):
    time.sleep(0.02 if os.path.exists("slow") else 0)
    return sample
"""


def write_job(folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's program, a pipeline of 12 batches for each of two ranks, and the environment of both."""
    for name, value in {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(folder / "indexes"))
    (folder / "train.py").write_text(named("docs/jobs/slurm.md", "train.py"))
    (folder / "pipeline.yaml").write_text(_PIPELINE)
    (folder / "slow.py").write_text(_SLOW)
    (folder / "slow").touch()
    (folder / "data").mkdir()
    (folder / "data" / "train").symlink_to(photos)


def undisturbed(folder: Path) -> list[tuple[str, str]]:
    """(step, loss) of a run of two ranks that nothing happens to, in a folder of its own."""
    apart = folder / "undisturbed"
    apart.mkdir()
    for name in ("pipeline.yaml", "slow.py", "data"):
        (apart / name).symlink_to(folder / name)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(folder / "train.py"),
    ]
    ran = subprocess.run(command, cwd=apart, check=True, capture_output=True, text=True)
    return STEP.findall(ran.stdout)


def check_log(said: str, num_stops: int, expected: list[tuple[str, str]]) -> None:
    """The job has stopped so often, has gone on at once each time, and its losses are the expected ones."""
    steps = STEP.findall(said)
    assert [int(step) for step, _ in steps] == [*range(1, NUM_STEPS + 1)], "none twice, none left out"
    assert STOPPED.findall(said) == GOES_ON.findall(said)
    assert len(STOPPED.findall(said)) == num_stops
    assert steps == expected
