"""Layouts of accelerate's FSDP and of Megatron, written by torch alone: one checkpoint each, found by `latest`."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_states import same, save_dcp

import loaderkit
from loaderkit.checkpoint import latest, write_manifest
from loaderkit.checkpoint.save.copy import copy_checkpoint
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = {"model": {"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}}
OPTIMIZER: dict[str, Any] = {
    "optimizer": {
        "state": {"fc.weight": {"step": torch.tensor(2.0), "exp_avg": torch.randn(3, 4)}},
        "param_groups": [{"lr": 0.1, "params": ["fc.weight", "fc.bias"]}],
    }
}


def save_fsdp(folder: Path, number: int = 0) -> None:
    save_dcp(MODEL, folder / f"pytorch_model_fsdp_{number}")
    save_dcp(OPTIMIZER, folder / f"optimizer_{number}")
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")
    (folder / "random_states_0.pkl").write_bytes(b"x")


class TestFsdpFolders:
    def test_model_and_optimizer_are_one_checkpoint(self, tmp_path: Path) -> None:
        for step in (2, 10):
            save_fsdp(tmp_path / f"checkpoint-{step}")
        assert latest(tmp_path) == f"{tmp_path}/checkpoint-10"
        state = loaderkit.restore(latest(tmp_path), nested=True)
        assert state.keys() == {"model", "optimizer"}
        assert all(same(state["model"][name], tensor) for name, tensor in MODEL["model"].items())
        moments = [tree["optimizer"]["state"]["fc.weight"] for tree in (state, OPTIMIZER)]
        assert all(same(moments[0][name], tensor) for name, tensor in moments[1].items())
        assert state["optimizer"]["param_groups"] == OPTIMIZER["optimizer"]["param_groups"]

    def test_manifest_copy_and_damage(self, tmp_path: Path) -> None:
        save_fsdp(tmp_path / "checkpoint-2")
        write_manifest(tmp_path / "checkpoint-2")
        copied = copy_checkpoint(tmp_path / "checkpoint-2", tmp_path / "to")
        assert loaderkit.restore(copied.url, verify=True).keys() == loaderkit.restore(tmp_path / "checkpoint-2").keys()
        (tmp_path / "checkpoint-2" / "optimizer_0" / "__0_0.distcp").unlink()
        with pytest.raises(CheckpointError, match="not whole"):
            loaderkit.restore(tmp_path / "checkpoint-2")

    def test_of_several_models_one_is_named(self, tmp_path: Path) -> None:
        save_fsdp(tmp_path / "checkpoint-2", 0)
        save_fsdp(tmp_path / "checkpoint-2", 1)
        with pytest.raises(CheckpointError, match="name the one that is meant"):
            loaderkit.restore(tmp_path / "checkpoint-2")
        part = loaderkit.restore(tmp_path / "checkpoint-2" / "pytorch_model_fsdp_1")
        assert part.keys() == {"model.fc.weight", "model.fc.bias"}

    def test_a_part_that_was_not_committed(self, tmp_path: Path) -> None:
        save_fsdp(tmp_path / "checkpoint-2")
        (tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0" / ".metadata").unlink()
        with pytest.raises(CheckpointError):
            loaderkit.restore(tmp_path / "checkpoint-2")

    def test_a_schedule_without_its_optimizer(self, tmp_path: Path) -> None:
        save_fsdp(tmp_path / "checkpoint-2")
        save_fsdp(tmp_path / "checkpoint-3")
        shutil.rmtree(tmp_path / "checkpoint-3" / "optimizer_0")
        with pytest.raises(CheckpointError, match="name the one that is meant"):
            loaderkit.restore(tmp_path / "checkpoint-3")
        assert latest(tmp_path) == f"{tmp_path}/checkpoint-2"
        torch.save({}, tmp_path / "checkpoint-3" / "optimizer.bin")  # as of an optimizer that is saved whole
        assert latest(tmp_path) == f"{tmp_path}/checkpoint-3"
        (tmp_path / "checkpoint-3" / "optimizer.bin").unlink()
        (tmp_path / "checkpoint-3" / "scheduler.bin").unlink()  # the model alone, as with `save_only_model`
        assert loaderkit.restore(latest(tmp_path)).keys() == {"model.fc.weight", "model.fc.bias"}


class TestMegatron:
    def test_what_is_not_sharded_counts(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = tmp_path / "iter_0000100"
        save_dcp({"decoder.norm.weight": torch.ones(3), "decoder._extra_state/shard_0_1": [io.BytesIO(b"fp8")]}, folder)
        common = {"iteration": 100, "args": SimpleNamespace(x=1), "scheduler": {"lr": 0.5}, "rng": torch.arange(3)}
        torch.save(common, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
        restored = loaderkit.restore(tmp_path)
        assert restored.pop("decoder.norm.weight").tolist() == [1, 1, 1]
        assert restored.pop("rng").tolist() == [0, 1, 2]
        assert restored == {"decoder._extra_state/shard_0_1": [b"fp8"], "iteration": 100, "scheduler.lr": 0.5}
        assert "common.pt: args" in caplog.text
        more = {"grad_scaler": {}, "groups": [{"t": (torch.ones(1), 2)}], "none": []}
        torch.save(common | more, folder / "common.pt")
        nested = loaderkit.restore(tmp_path, nested=True)
        assert {name: nested[name] for name in more} == more
        assert latest(tmp_path) == str(folder)

    def test_names_of_iterations(self, tmp_path: Path) -> None:
        save_dcp({"a": torch.ones(1)}, tmp_path / "release")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
        assert loaderkit.restore(tmp_path).keys() == {"a"}
        shutil.move(tmp_path / "release", tmp_path / "iter_0000007")
        with pytest.raises(CheckpointError, match="'release' is the newest"):
            loaderkit.restore(tmp_path)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
        assert loaderkit.restore(tmp_path).keys() == {"a"}


def test_a_torch_file_called_tar_is_the_newest(tmp_path: Path) -> None:
    for epoch in (2, 10):
        torch.save({"epoch": epoch}, tmp_path / f"checkpoint_{epoch:04d}.pth.tar")
    torch.save({"epoch": 7}, tmp_path / "model_best.pth.tar")
    assert loaderkit.restore(latest(tmp_path)) == {"epoch": 10}
