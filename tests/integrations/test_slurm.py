"""The job of the page on Slurm, in a real cluster: it reaches its time limit, is preempted, goes on, and loses nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_examples import examples, named
from slurm_cluster import Slurm, slurm_cluster
from waiting import wait_for

ROOT = Path(__file__).parents[2]
PAGE = "docs/jobs/slurm.md"
NUM_STEPS = 90 * 6  # of six batches an epoch
PATIENCE_S = 300.0
STEP = re.compile(r"^step (\d+): (\S+)$", re.MULTILINE)
# As from a slow disk, while the file `slow` is there.
PIPELINE = """
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
SLOW = """
import os
import time

def wait(sample):
    time.sleep(0.02 if os.path.exists("slow") else 0)
    return sample
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    place = Path(tempfile.mkdtemp(prefix="s-"))
    try:
        with slurm_cluster(place) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


@pytest.fixture
def folder(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with the page's script and program."""
    for name, value in {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    (script,) = (text for kind, text in examples(PAGE) if kind == "bash" and "#SBATCH" in text)
    for name, text in {"job.sh": script, "train.py": named(PAGE, "train.py"), "slow.py": SLOW}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(photos)
    return tmp_path


def undisturbed(folder: Path) -> list[tuple[str, str]]:
    """(step, loss) of a run that nothing happens to, in a folder of its own."""
    apart = folder / "undisturbed"
    apart.mkdir()
    for name in ("pipeline.yaml", "slow.py", "data"):
        (apart / name).symlink_to(folder / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", folder / "train.py"]
    ran = subprocess.run(command, cwd=apart, check=True, capture_output=True, text=True)
    return STEP.findall(ran.stdout)


@pytest.mark.prove
def test_a_job_that_reaches_its_limit_and_is_preempted_loses_nothing(slurm: Slurm, folder: Path) -> None:
    (folder / "slow").touch()
    less = ("--gpus-per-node=1", "--cpus-per-task=1")
    job = slurm.run("sbatch", "--parsable", "--output=log.txt", *less, "job.sh", folder=folder).strip()
    log = folder / "log.txt"

    def has_logged(words: str) -> bool:
        assert slurm.state(job)["JobState"] not in {"FAILED", "COMPLETED", "CANCELLED"}, log.read_text()
        return log.exists() and words in log.read_text()

    wait_for(lambda: has_logged("step 20:"), PATIENCE_S)
    # In less than the 180 s of the script's --signal; Slurm looks at the limits every 30 s, and sends the signal then.
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=3")
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", PATIENCE_S)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=240")
    first = int(STEP.findall(log.read_text())[-1][0])
    wait_for(lambda: has_logged(f"step {first + 20}:"), PATIENCE_S)
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", folder=folder)
    wait_for(lambda: slurm.state(job)["Restarts"] == "2", PATIENCE_S)
    (folder / "slow").unlink()
    wait_for(lambda: slurm.state(job)["JobState"] == "COMPLETED", PATIENCE_S)
    said = log.read_text()
    steps = STEP.findall(said)
    assert [int(step) for step, _ in steps] == [*range(1, NUM_STEPS + 1)], "none twice, none left out"
    stops = re.findall(r"^stopped after step (\d+)$", said, re.MULTILINE)
    assert stops == re.findall(r"^goes on after step (\d+)$", said, re.MULTILINE)
    assert len(stops) == 2
    assert steps == undisturbed(folder)
