"""A manager in a directory with checkpoints of another make takes them or raises: training never begins anew beside one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import save_dcp

import loaderkit
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")


def write(path: Path, state: dict[str, Any]) -> None:
    """As dcp.save, torch.save or safetensors do, by the name."""
    if path.suffix in (".pt", ".ckpt", ".tar"):
        torch.save(state, path)
    elif path.suffix == ".safetensors":
        flat = {f"{key}.{name}": tensor for key, table in state.items() for name, tensor in table.items()}
        safetensors.torch.save_file(flat, path)
    else:
        save_dcp(state, path)


def restored(folder: Path, step: int | None = None) -> tuple[int | None, torch.nn.Linear]:
    model = torch.nn.Linear(3, 2)
    with loaderkit.CheckpointManager(folder) as checkpoints:
        found = checkpoints.restore({"model": model}, step)
        if step is None:
            assert checkpoints.latest_step() == found
    return found, model


def test_the_newest_whole_one_is_taken(tmp_path: Path, rng: random.Random) -> None:
    templates = ["step-{}", "step-{:010d}", "checkpoint-{}.pt", "{}.pt", "iter_{}.safetensors", "epoch=1-step={}.ckpt"]
    for number in range(5):
        (folder := tmp_path / str(number)).mkdir()
        models = {step: torch.nn.Linear(3, 2) for step in rng.sample(range(100), rng.randrange(2, 4))}
        for step, model in models.items():
            write(folder / rng.choice(templates).format(step), {"model": model.state_dict()})
        write(folder / "model_best.pt", {"model": torch.nn.Linear(3, 2).state_dict()})
        torch.save({"args": 1}, folder / "training_args.bin")
        newest, chosen = max(models), rng.choice([*models])
        for wanted, (found, filled) in ((newest, restored(folder)), (chosen, restored(folder, chosen))):
            assert found == wanted
            assert torch.equal(filled.weight, models[wanted].weight)
        with loaderkit.CheckpointManager(folder, keep={"last": 1}) as checkpoints:
            state = {"model": torch.nn.Linear(3, 2)}
            for step in (newest + 1, newest + 2):
                checkpoints.save(step, state)
        before = len([*folder.iterdir()])
        found, filled = restored(folder)
        assert found == newest + 2
        assert torch.equal(filled.weight, state["model"].weight)
        assert before == len(models) + 3, "retention keeps what is of another make"


@pytest.mark.parametrize("name", ["model_best.pt", "final", "", "last.ckpt", "weights.safetensors"])
def test_one_whose_name_tells_no_step_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / name if name else tmp_path, {"model": torch.nn.Linear(3, 2).state_dict()})
    with pytest.raises(CheckpointError, match="a whole checkpoint whose name tells no step"):
        restored(tmp_path)
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="training would begin anew"):
            checkpoints.latest_step()
        checkpoints.save(1, {"model": torch.nn.Linear(3, 2)})
    assert restored(tmp_path)[0] == 1


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "step-3", {"net": torch.nn.Linear(3, 2).state_dict()})
    with pytest.raises(CheckpointError, match="does not fit the state; nothing was written"):
        restored(tmp_path)


def test_if_none_is_whole_that_is_an_error(tmp_path: Path) -> None:
    for step in (2, 3):
        write(tmp_path / f"step-{step}", {"model": torch.nn.Linear(3, 2).state_dict()})
        (tmp_path / f"step-{step}" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* the newest: .*step-3"):
        restored(tmp_path)


def test_a_damaged_one_that_is_called_as_a_manager_would(tmp_path: Path, rng: random.Random) -> None:
    """Is an error all the same; what a manager's own removal has left is not."""
    step = rng.randrange(1000)
    folder = tmp_path / "foreign" / f"step-{step:010d}"
    write(folder, {"model": torch.nn.Linear(3, 2).state_dict()})
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=f"none of the 1 checkpoints .*step-{step:010d} is not whole"):
        restored(folder.parent)
    with loaderkit.CheckpointManager(tmp_path / "own") as checkpoints:
        checkpoints.save(step, {"model": torch.nn.Linear(3, 2)})
    for path in (tmp_path / "own").glob("step-*/*"):
        if path.name != ".metadata":
            path.unlink()
    assert restored(tmp_path / "own")[0] is None


def test_a_damaged_one_without_a_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "last.ckpt", {"model": torch.nn.Linear(3, 2).state_dict()})
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:300])
    assert restored(tmp_path)[0] is None
    assert sum("last.ckpt" in record.getMessage() for record in caplog.records) == 1


def test_other_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("x")
    (tmp_path / "events.bin").write_bytes(bytes(100))
    torch.save({"args": 1}, tmp_path / "training_args.bin")
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": torch.nn.Linear(3, 2)})
    (tmp_path / "step-0000000001" / "loaderkit-manifest.json").unlink()  # of a manager, and being removed
    assert restored(tmp_path)[0] is None
