"""Checkpoints of any make, copied in another format, are the same to the last bit; other programs read the copies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import same, save_dcp
from deepspeed_folders import write_zero
from malformed import Evil
from torch.distributed.checkpoint.state_dict_loader import load
from typer.testing import CliRunner

import loaderkit
from loaderkit.checkpoint.manager.convert import convert_checkpoint
from loaderkit.checkpoint.names import flatten
from loaderkit.cli.app import app
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "betas": (0.9, 0.99),
        "empty": {},
    }


def assert_same(one: Any, other: Any) -> None:
    """Equal values under equal names."""
    flat = [
        {name: leaf.value for name, leaf in flatten(tree, lambda v: isinstance(v, torch.Tensor), 10_000).items()}
        for tree in (one, other)
    ]
    assert flat[0].keys() == flat[1].keys()
    assert [name for name in flat[0] if not same(flat[0][name], flat[1][name])] == []


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_torch_file(to: Any, tmp_path: Path) -> None:
    saved = state()
    torch.save(saved, tmp_path / "step-7.pth.tar")
    copied = convert_checkpoint(tmp_path / "step-7.pth.tar", tmp_path / "to", to)
    assert copied.url == f"{tmp_path}/to/step-7"
    restored = loaderkit.restore(copied.url, nested=True, verify=True)
    assert_same(restored, saved)
    assert restored["empty"] == {}
    assert isinstance(restored["betas"], tuple)
    assert restored["optimizer"]["state"].keys() == saved["optimizer"]["state"].keys()


def test_other_programs_read_the_copies(tmp_path: Path) -> None:
    saved = state()["model"]
    torch.save(saved, tmp_path / "pytorch_model.bin")
    convert_checkpoint(tmp_path / "pytorch_model.bin", tmp_path / "to", "safetensors")
    read = safetensors.torch.load_file(tmp_path / "to" / "pytorch_model" / "model.safetensors")
    assert_same(read, dict(saved))
    convert_checkpoint(tmp_path / "pytorch_model.bin", tmp_path / "dcp", "dcp")
    into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load(into, checkpoint_id=tmp_path / "dcp" / "pytorch_model")
    assert_same(into, dict(saved))


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_of_deepspeed_with_names_mapped(to: Any, tmp_path: Path) -> None:
    groups = [{"a.w": torch.randn(3, 5), "b.w": torch.randn(7)}]
    states = {"exp_avg": {name: torch.randn(tensor.shape) for name, tensor in groups[0].items()}}
    write_zero(
        tmp_path / "global_step3", 3, 2, groups, states, frozen={}, buffers={"c": torch.ones(2)}, tied={"d.w": "a.w"}
    )
    done: list[int] = []
    copied = convert_checkpoint(
        tmp_path / "global_step3", tmp_path / "to", to, rename={"module.": "model."}, progress=done.append
    )
    restored = loaderkit.restore(copied.url)
    assert all(same(restored[f"model.{name}"], tensor) for name, tensor in groups[0].items())
    nested = loaderkit.restore(tmp_path / "global_step3", nested=True, rename={"module.": "model."})
    assert_same(loaderkit.restore(copied.url, nested=True), nested)
    num_bytes = sum(value.nbytes for value in restored.values() if isinstance(value, torch.Tensor))
    assert 0 < sum(done) <= num_bytes  # what is the same memory there is read once


def test_what_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = tmp_path / "mark"
    torch.save({"a": torch.ones(2), "args": Evil(os.system, f"touch {mark}")}, tmp_path / "step-1.pt")
    copied = convert_checkpoint(tmp_path / "step-1.pt", tmp_path / "to", "dcp")
    assert loaderkit.restore(copied.url)["a"].tolist() == [1, 1]
    assert "left out" in caplog.text
    assert not mark.exists()
    with pytest.raises(CheckpointError, match="is there already"):
        convert_checkpoint(tmp_path / "step-1.pt", tmp_path / "to", "dcp")
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "step-2.pt")
    with pytest.raises(ConfigError, match="complex128"):
        convert_checkpoint(tmp_path / "step-2.pt", tmp_path / "to", "safetensors")
    assert {path.name for path in (tmp_path / "to").iterdir()} == {"step-1"}


class TestCommand:
    def test_all_checkpoints_of_a_run(self, tmp_path: Path) -> None:
        for step in (1, 2):
            save_dcp({"module": {"w": torch.full((3,), step)}, "step": step}, tmp_path / "run" / f"step-{step}")
        words = ["checkpoints", str(tmp_path / "run"), "--copy", str(tmp_path / "to"), "--format", "safetensors"]
        done = CliRunner().invoke(app, [*words, "--rename", "module.=model."])
        assert done.exit_code == 0, done.output
        for step in (1, 2):
            assert loaderkit.restore(tmp_path / "to" / f"step-{step}")["model.w"].tolist() == [step] * 3
        again = CliRunner().invoke(app, words)
        assert again.exit_code == 1
        assert "is there already" in again.output + again.stderr

    @pytest.mark.parametrize(
        "more", [["--format", "dcp"], ["--copy", "x", "--format", "zip"], ["--rename", "a=b"],
                 ["--copy", "x", "--format", "dcp", "--rename", "a"]],
    )  # fmt: skip
    def test_wrong_use(self, more: list[str], tmp_path: Path) -> None:
        save_dcp({"w": torch.ones(3)}, tmp_path / "step-1")
        assert CliRunner().invoke(app, ["checkpoints", str(tmp_path), *more]).exit_code == 2
