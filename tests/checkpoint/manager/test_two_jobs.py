"""Two jobs that save into one directory are told of one another; a dead one's traces are cleared without a word."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit.checkpoint.save.owner import this_process


def markers(folder: Path) -> list[Path]:
    return sorted(folder.glob(".saving-job.*.json"))


def another_job(folder: Path, **owner: Any) -> Path:
    """What another process has left, or keeps, in a directory."""
    with loaderkit.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, {"x": torch.ones(3)}, wait=True)
        (marker,) = markers(folder)
        said = json.loads(marker.read_text())
    said["owner"] |= owner
    said["attempt"] = "0123456789abcdef"
    path = folder / ".saving-job.0123456789abcdef.json"
    path.write_text(json.dumps(said))
    return path


def save(folder: Path) -> None:
    with loaderkit.CheckpointManager(folder) as checkpoints:
        checkpoints.save(2, {"x": torch.ones(3)}, wait=True)
        checkpoints.save(3, {"x": torch.ones(3)})


def test_the_marker_is_there_while_a_manager_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        assert not markers(tmp_path)
        checkpoints.save(1, {"x": torch.ones(3)}, wait=True)
        (marker,) = markers(tmp_path)
        save(tmp_path)  # of this process
        assert markers(tmp_path) == [marker]
    assert not markers(tmp_path)
    assert not caplog.messages


def test_a_live_job_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent = os.getppid()
    started = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
    marker = another_job(tmp_path, pid=parent, started=started)
    save(tmp_path)
    (message,) = caplog.messages
    assert message.startswith(
        f"process {parent} on {this_process().host} saves into {tmp_path}, too: each removes what"
    )
    assert marker.exists()


@pytest.mark.parametrize(("silent_s", "is_told"), [(60.0, True), (3600.0, False)])
def test_a_job_elsewhere_counts_until_it_is_silent(
    silent_s: float, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been killed, and this one be its successor."""
    marker = another_job(tmp_path, host="node7", machine="another", pid=77)
    said = json.loads(marker.read_text())
    marker.write_text(json.dumps(said | {"renewed_s": time.time() - silent_s}))
    save(tmp_path)
    assert [", or has died within the last 15 minutes: " in message for message in caplog.messages] == [True] * is_told
    assert ["process 77 on node7 saves into" in message for message in caplog.messages] == [True] * is_told
    assert marker.exists() == is_told


def test_a_job_that_was_killed_here_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = another_job(tmp_path, pid=2**22 + 1)
    save(tmp_path)
    assert not caplog.messages
    assert not marker.exists()


def test_ranks_that_know_nothing_of_one_another_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would save alone what torchrun has begun as one job."""
    for size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        save(tmp_path)
        assert any("Call init_process_group before" in message for message in caplog.messages) == (size == "2")
