"""What the pages say of Ray clusters: their examples run, also as a Slurm job would run them, and a death is said as shown."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_examples import examples, named
from numbers_dataset import numbers, pids_of
from ray_nodes import Nodes, build_ray, check_nothing_left
from waiting import wait_for

from loaderkit.cli import main

ROOT = Path(__file__).parents[3]
GUIDE, RECIPES = "docs/guide/other-machines.md", "docs/recipes.md"


@pytest.fixture
def folder(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with the guide's pipeline for smaller batches."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(photos)
    (tmp_path / "cluster.yaml").write_text(named(GUIDE, "cluster.yaml").replace("size: 64}", "size: 16}"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_the_guide_runs(
    ray_nodes: Nodes,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (commands,) = (text for kind, text in examples(GUIDE) if kind == "sh" and "cluster.yaml" in text)
    (command,) = (line for line in commands.splitlines() if line.startswith("loaderkit "))
    arguments = command.partition("#")[0].replace("--batches 20", "--batches 3").split()[1:]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    title, *rows = said.partition("\nNodes\n")[2].partition("\n\n")[0].splitlines()
    assert "on the way" in title
    assert "(training)" in said
    assert len([row for row in rows if " of 4 " in row]) == 2, said
    check_nothing_left()


def test_a_death_is_said_as_the_guide_shows_it(
    ray_nodes: Nodes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (shown,) = (text for kind, text in examples(GUIDE) if kind == "text" and "the actor that loads" in text)
    with caplog.at_level(logging.WARNING, "loaderkit"), build_ray(numbers(400)) as loader:
        for number, _ in enumerate(loader):
            if number == 4:
                os.kill(pids_of(loader)[1], signal.SIGKILL)
    (said,) = (
        record.getMessage()
        for record in caplog.records
        if "is left" in record.getMessage() or "are left" in record.getMessage()
    )
    assert _shape(said) == _shape(" ".join(shown.split()))


def _shape(text: str) -> str:
    """Without numbers and addresses."""
    return re.sub(r"[\d.]+ \([0-9a-f]+\)|\d+", "N", text)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait
"""

TRAIN = """
import loaderkit
import ray

ray.init()
whole = ray.nodes()[0]["Resources"]["CPU"]  # so the second actor waits for the second node
with loaderkit.build("cluster.yaml", overrides={"prefetch.ray": {"num_cpus": whole}}) as loader:
    batches = [batch for batch in loader]
    print("batches", len(batches), "nodes", len({*loader.stats().tuning.nodes}))
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For Ray: sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="r-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.prove
def test_the_job_for_slurm_runs(folder: Path, short_folder: Path) -> None:
    """Both nodes are this machine: `srun` of Slurm is a program that does what it does there."""
    (script,) = (text for kind, text in examples(RECIPES) if kind == "sh" and "#SBATCH" in text)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    (folder / "job.sh").write_text(script.replace("6379", str(port)))
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    (folder / "train.py").write_text(TRAIN)
    programs = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "RAY_TMPDIR": str(short_folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    with subprocess.Popen(
        ["bash", "job.sh"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        lines: list[str] = []
        try:
            for line in job.stdout:
                lines.append(line)
                if line.startswith(("batches", "Traceback")):
                    break
        finally:
            os.killpg(job.pid, signal.SIGTERM)  # as Slurm ends what is left of a job
    assert lines[-1] == "batches 4 nodes 2\n", "".join(lines)
    wait_for(lambda: not _of_cluster(short_folder), 60)


def _of_cluster(folder: Path) -> list[str]:
    """The processes that were begun with a cluster's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text():
                found.append(path.parent.name)
        except OSError:  # it has ended
            continue
    return found
