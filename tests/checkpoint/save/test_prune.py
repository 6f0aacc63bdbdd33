"""What saves that died have left behind is removed, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_states import save_dcp

import loaderkit
from loaderkit.checkpoint.discovery.locate import save_target
from loaderkit.checkpoint.save.owner import Heartbeat
from loaderkit.checkpoint.save.placement import place
from loaderkit.checkpoint.save.prune import find_debris, remove_debris
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")
PLACED = """
import sys
from loaderkit.checkpoint.discovery.locate import save_target
from loaderkit.checkpoint.save.placement import place
from loaderkit.connectors.base import writes_of
target = save_target(sys.argv[1], {})
placement = place(target, writes_of(target.connector), ())
writes_of(target.connector).put(placement.folder + "__0_0.distcp", b"half")
"""


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A whole checkpoint, and beside it one that was never committed and one of which the manifest was removed."""
    for step in (1, 2, 3):
        save_dcp({"a": torch.ones(1000)}, tmp_path / f"step-{step}")
        loaderkit.checkpoint.write_manifest(tmp_path / f"step-{step}")
    (tmp_path / "step-2" / ".metadata").unlink()
    (tmp_path / "step-2" / "loaderkit-manifest.json").unlink()
    (tmp_path / "step-3" / "loaderkit-manifest.json").unlink()
    os.truncate(tmp_path / "step-3" / "__0_0.distcp", 10)
    return tmp_path


def names(folder: Path, idle_s: float = 3600.0) -> list[str]:
    return [item.name for item in find_debris(folder, idle_s=idle_s)]


def test_only_what_was_not_written_to_for_long(run_folder: Path) -> None:
    assert names(run_folder) == []
    age(run_folder, 7200)
    assert names(run_folder) == ["step-2", "step-3"]
    os.utime(run_folder / "step-3" / "__0_0.distcp")
    assert names(run_folder) == ["step-2"]
    assert names(run_folder, idle_s=8000.0) == []


def test_whole_ones_and_what_is_not_a_saver_s_stay(run_folder: Path) -> None:
    (run_folder / "step-2" / "notes.txt").write_text("mine")
    (run_folder / "logs").mkdir()
    (run_folder / "logs" / "a.distcp").write_text("mine")
    (run_folder / "step-4").write_text("a file")
    # Committed, and damaged since: what is left may be worth something.
    os.truncate(run_folder / "step-1" / "__0_0.distcp", 10)
    age(run_folder, 7200)
    assert names(run_folder) == ["step-3"]


def test_what_dead_processes_were_saving(tmp_path: Path) -> None:
    """Not what a process saves that is alive, or that cannot be seen from here and was heard of a moment ago."""
    save_dcp({"a": torch.ones(10)}, tmp_path / "step-8")
    for name in ("step-9", "step-10"):
        subprocess.run([sys.executable, "-c", PLACED, str(tmp_path / name)], check=True)
    (elsewhere,) = tmp_path.glob(".saving-step-10.*.json")
    said = json.loads(elsewhere.read_text())
    said["owner"] |= {"machine": "another", "host": "node-7"}
    elsewhere.write_text(json.dumps(said))
    target = save_target(tmp_path / "step-11", {})
    placement = place(target, writes_of(target.connector), ())
    heartbeat = Heartbeat(placement.attempt, lambda: None)
    (debris,) = find_debris(tmp_path)
    assert debris.name.startswith(".saving-step-9.")
    assert re.search(r"process \d+ on .*, which saved it, has ended", debris.reason)
    assert debris.num_files == 2
    remove_debris(tmp_path, [debris])
    assert not [*tmp_path.glob(".saving-step-9*")]
    assert [*tmp_path.glob(".saving-step-10*")]
    heartbeat.stop()
    assert [item.name[:15] for item in find_debris(tmp_path)] == [".saving-step-11"]


def test_removal_keeps_descriptions_to_the_end(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    age(run_folder, 7200)
    debris = find_debris(run_folder, idle_s=3600.0)
    order: list[str] = []
    unlink = os.unlink

    def noting(path: str, **options: int) -> None:
        order.append(str(path).removeprefix(f"{run_folder}/"))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", noting)
    remove_debris(run_folder, debris)
    assert order == ["step-2/__0_0.distcp", "step-3/__0_0.distcp", "step-3/.metadata"]
    assert [path.name for path in run_folder.iterdir()] == ["step-1"]
    assert loaderkit.checkpoint.latest(run_folder) == str(run_folder / "step-1")


def test_what_has_changed_since_is_left(run_folder: Path) -> None:
    age(run_folder, 7200)
    debris = find_debris(run_folder, idle_s=3600.0)
    (run_folder / "step-2" / "__1_0.distcp").write_bytes(b"more")
    with pytest.raises(CheckpointError, match="step-2 is being written to"):
        remove_debris(run_folder, debris)
    assert (run_folder / "step-2" / "__0_0.distcp").exists()


def test_a_store_that_gives_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dcp({"a": torch.ones(10)}, tmp_path / "step-1")
    (tmp_path / "step-1" / ".metadata").unlink()
    age(tmp_path, 7200)
    assert names(tmp_path) == ["step-1"]
    monkeypatch.setattr(FileConnector, "modified_s", lambda self, key: None)
    assert names(tmp_path) == []
