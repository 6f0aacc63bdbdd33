"""The job of the page on Slurm, in a real cluster: it reaches its time limit, is preempted, goes on, and loses nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_examples import examples
from page_jobs import PATIENCE_S, STEP, check_log, undisturbed, write_job
from slurm_cluster import Slurm, slurm_cluster
from waiting import wait_for


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
    write_job(tmp_path, photos, monkeypatch)
    (script,) = (text for kind, text in examples("docs/jobs/slurm.md") if kind == "bash" and "#SBATCH" in text)
    (tmp_path / "job.sh").write_text(script)
    return tmp_path


@pytest.mark.prove
def test_a_job_that_reaches_its_limit_and_is_preempted_loses_nothing(folder: Path, slurm: Slurm) -> None:
    less = ("--gpus-per-node=1", "--cpus-per-task=1")
    job = slurm.run("sbatch", "--parsable", "--output=log.txt", *less, "job.sh", folder=folder).strip()
    log = folder / "log.txt"

    def has_logged(words: str) -> bool:
        assert slurm.state(job)["JobState"] not in {"FAILED", "COMPLETED", "CANCELLED"}, log.read_text()
        return log.exists() and words in log.read_text()

    wait_for(lambda: has_logged("step 20:"), PATIENCE_S)
    # Less than the 180 s of the script's --signal: when Slurm looks at limits, each 30 s, it sends the signal.
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=3")
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", PATIENCE_S)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=240")
    first = int(STEP.findall(log.read_text())[-1][0])
    wait_for(lambda: has_logged(f"step {first + 20}:"), PATIENCE_S)
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_for(lambda: slurm.state(job)["Restarts"] == "2", PATIENCE_S)
    (folder / "slow").unlink()
    wait_for(lambda: slurm.state(job)["JobState"] in {"COMPLETED", "FAILED"}, PATIENCE_S)
    assert slurm.state(job)["JobState"] == "COMPLETED", log.read_text()
    check_log(log.read_text(), 2, undisturbed(folder))
