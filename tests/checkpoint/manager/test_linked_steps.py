"""Steps that are symbolic links, and directories in a step that are: retention removes the links, and nothing behind them."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import Clock, DeadError, Mortal

import loaderkit
from loaderkit.checkpoint.save.prune import find_debris, remove_debris
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import LoaderkitError

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.arange(10.0) + step}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_run(folder: Path, rng: random.Random) -> tuple[Path, list[str]]:
    """(an archive of steps 1 to 4 and other files, the names of the steps of a run whose first ones lead there)."""
    archive, run = folder / "archive", folder / "run"
    with loaderkit.CheckpointManager(archive) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, state_of(step))
    (archive / "extra").mkdir()
    (archive / "extra" / "tokenizer.json").write_text("{}")
    run.mkdir()
    for step in range(1, 5):
        name = f"step-{step:010d}"
        kind = rng.choice(["link", "relative link", "real, with a link", "real"])
        if kind.endswith("link") and not kind.startswith("real"):
            (run / name).symlink_to(Path("../archive") / name if kind.startswith("relative") else archive / name)
        else:
            shutil.copytree(archive / name, run / name)
        if kind == "real, with a link":
            (run / name / "extra").symlink_to(archive / "extra")
    return archive, sorted(path.name for path in run.iterdir())


def test_retention_leaves_what_is_behind_links(tmp_path: Path, rng: random.Random) -> None:
    archive, _ = make_run(tmp_path, rng)
    before = contents(archive)
    with loaderkit.CheckpointManager(tmp_path / "run", keep={"last": 2}) as checkpoints:
        state = state_of(0)
        assert checkpoints.restore(state) == 4
        assert torch.equal(state["x"], state_of(4)["x"])
        for step in (5, 6):
            checkpoints.save(step, state_of(step))
    assert contents(archive) == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-0000000005", "step-0000000006"]


def test_nor_does_what_a_removal_left_that_died(tmp_path: Path, rng: random.Random) -> None:
    """Killed at any operation on the store; the next run clears what is left."""
    for number in range(4):
        folder = tmp_path / str(number)
        archive, _ = make_run(folder, rng)
        before = contents(archive)
        mortal = Mortal(FileConnector(folder), Clock(rng.randrange(60), is_before=rng.random() < 0.5))
        with (
            suppress(DeadError, LoaderkitError),
            loaderkit.CheckpointManager("mortal://run", keep={"last": 1}, connectors={"mortal": mortal}) as checkpoints,
        ):
            checkpoints.save(5, state_of(5))
        assert contents(archive) == before
        with loaderkit.CheckpointManager(folder / "run", keep={"last": 1}) as checkpoints:
            checkpoints.save(6, state_of(6))
            checkpoints.save(7, state_of(7))
        assert contents(archive) == before
        assert [path.name for path in (folder / "run").iterdir()] == ["step-0000000007"]


def test_nor_does_prune(tmp_path: Path) -> None:
    """A link to what is no whole checkpoint."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "archive")
    debris = find_debris(tmp_path / "run", idle_s=0.0)
    assert [item.name for item in debris] == ["step-1"]
    remove_debris(tmp_path / "run", debris)
    assert [*(tmp_path / "run").iterdir()] == []
    assert contents(tmp_path / "archive") == {"__0_0.distcp": b"half"}
