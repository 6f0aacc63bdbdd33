"""Which checkpoint a manager restores, and beside which ones it saves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.arange(1000.0) + step, "n": step}


def test_what_is_damaged_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step))
    os.truncate(tmp_path / "step-0000000003" / "__0_0.distcp", 100)
    (tmp_path / "step-0000000002" / "loaderkit-manifest.json").unlink()
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        found = state_of(0)
        assert checkpoints.restore(found) == 1
        assert checkpoints.all_steps() == [1, 3]
    assert "step-0000000003 is passed over" in caplog.text
    assert found["n"] == 1


def test_if_all_are_damaged_that_is_an_error(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step))
    for step in (1, 2):
        (tmp_path / f"step-000000000{step}" / "__0_0.distcp").unlink()
    with (
        loaderkit.CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(
            CheckpointError, match=r"none of the 2 checkpoints in .* is whole.*the newest: .*step-0000000002"
        ),
    ):
        checkpoints.restore(state_of(0))


def test_later_steps_of_an_earlier_run_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loaderkit.CheckpointManager(tmp_path, keep={"last": 2}) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step))
    assert "later ones" not in caplog.text
    with loaderkit.CheckpointManager(tmp_path, keep={"last": 2}) as checkpoints:
        checkpoints.save(2, state_of(2))
    assert "step 2 is saved, and " in caplog.text
    assert "has 1 later ones" in caplog.text
    assert "the next start restores step 3" in caplog.text


def test_after_going_back_later_steps_are_refused_until_they_are_gone(tmp_path: Path) -> None:
    """Each call says so, due or not, as the first one comes a step after the start and not hours later."""
    with loaderkit.CheckpointManager(tmp_path, every=2) as checkpoints:
        for step in range(1, 7):
            checkpoints.save(step, state_of(step))
    with loaderkit.CheckpointManager(tmp_path, every=2) as checkpoints:
        assert checkpoints.restore(state_of(0), step=2) == 2
        for step in (3, 4, 3):
            with pytest.raises(
                ConfigError, match=rf"step {step} is not saved: step 2 was restored .* the newest of them, and not"
            ):
                checkpoints.save(step, state_of(step))
        for step in (4, 6):
            shutil.rmtree(tmp_path / f"step-000000000{step}")
        for step in range(3, 9):
            checkpoints.save(step, state_of(step))
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(state_of(0), step=6) == 6
        assert checkpoints.restore(state_of(0)) == 8
        checkpoints.save(7, state_of(7))  # whoever took the newest is not asked
        assert checkpoints.restore(state_of(0), step=6) == 6
        checkpoints.save(9, state_of(9))  # and that is the newest now
        assert checkpoints.restore(state_of(0)) == 9


def test_after_going_back_later_steps_that_are_not_whole_do_not_count(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state_of(step))
    for step in (3, 5):
        os.truncate(tmp_path / f"step-000000000{step}" / "__0_0.distcp", 100)
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(state_of(0), step=1) == 1
        with pytest.raises(ConfigError, match=r"has 2 later steps \(step-0000000002, step-0000000004\)"):
            checkpoints.save(1, state_of(1))
        with pytest.raises(ConfigError, match=r"has 1 later steps \(step-0000000004\)"):
            checkpoints.save(3, state_of(3))
        checkpoints.save(4, state_of(40))
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        state = state_of(0)
        assert checkpoints.restore(state) == 4
        assert state["n"] == 40


def test_a_step_that_is_not_there_is_an_error_that_says_which_are(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step-0000000007.* none is there"):
            checkpoints.restore(state_of(0), step=7)
        for step in (3, 5):
            checkpoints.save(step, state_of(step))
        with pytest.raises(CheckpointError, match=r"step-0000000007.*committed there are 5, 3"):
            checkpoints.restore(state_of(0), step=7)
