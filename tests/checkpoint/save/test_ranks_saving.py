"""Several ranks save one checkpoint: sharded states, read again by any number of ranks; one that fails fails for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from crashing import state_of
from rank_programs import run_ranks
from saving_programs import fail_on_one, load_streamed, save_in_a_process, save_many, save_streamed
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import StreamWriter, latest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("num_saving", [2, *(pytest.param(num, marks=pytest.mark.prove) for num in (1, 4))])
@pytest.mark.parametrize("kind", [pytest.param("tensors", marks=pytest.mark.prove), "fsdp"])
def test_saved_by_some_and_loaded_by_others(kind: str, num_saving: int, tmp_path: Path) -> None:
    assert run_ranks(save_streamed, num_saving, tmp_path, kind) == [0] * num_saving
    ours, theirs = (
        loaderkit.restore(tmp_path / name, verify=check) for name, check in (("step-7", True), ("torch", False))
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
    assert names_in(tmp_path) == ["step-7", "torch"]
    for num_loading in (1, 2, 3):
        assert run_ranks(load_streamed, num_loading, tmp_path, kind) == [0] * num_loading


def test_many_saves_with_kept_plans_and_in_threads(tmp_path: Path) -> None:
    assert run_ranks(save_many, 2, tmp_path) == [0, 0]
    assert names_in(tmp_path) == ["step-0", "step-1"]
    assert sorted(path.name for path in (tmp_path / "step-0").iterdir()) == [
        ".metadata", "__0_2.distcp", "__1_2.distcp", "loaderkit-manifest.json",
    ]  # fmt: skip


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(save_in_a_process, 2, tmp_path) == [0, 0]
    assert names_in(tmp_path) == ["step-0", "step-1"]
    assert loaderkit.restore(tmp_path / "step-1", verify=True)["same"].eq(1).all()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_fails_fails_for_all_and_nothing_is_left(failing: int, tmp_path: Path) -> None:
    assert run_ranks(fail_on_one, 2, tmp_path, failing, "fails") == [0, 0]
    assert names_in(tmp_path) == ["step-1", "step-3"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_is_killed(failing: int, tmp_path: Path) -> None:
    codes = run_ranks(fail_on_one, 2, tmp_path, failing, "killed")
    assert codes[failing] == 9
    assert latest(tmp_path) == f"{tmp_path}/step-1"
    assert [name for name in names_in(tmp_path) if name.startswith(".saving-step-2.")]
    save(state_of(3), storage_writer=StreamWriter(tmp_path / "step-3"), no_dist=True)
    assert names_in(tmp_path) == ["step-1", "step-3"]
