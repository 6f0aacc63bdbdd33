"""A checkpoint as a pipeline: `build` yields tensors, and the command line runs it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import save_dcp

import loaderkit
from loaderkit.cli import main
from loaderkit.errors import CheckpointError, ClosedError, ConfigError

PIPELINE = Path(__file__).parents[2] / "pipelines" / "restore.yaml"


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.randn(300, n + 1) for n in range(20)} | {"big": torch.randn(3_000_000)}


@pytest.fixture
def folder(tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Path:
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    monkeypatch.setenv("CHECKPOINT", str(tmp_path))
    return tmp_path


def tensors(**overrides: Any) -> Any:
    return loaderkit.build(PIPELINE, overrides={"stages.transfer.device": "cpu", **overrides})


@pytest.mark.parametrize("executor", ["thread", "inline"])
def test_yields_every_tensor(folder: Path, state: dict[str, torch.Tensor], executor: str) -> None:
    before = set(threading.enumerate())
    with tensors(**{"prefetch.executor": executor}) as loader:
        for _ in range(2):
            delivered = dict(loader)
            assert delivered.keys() == state.keys()
            assert all(torch.equal(delivered[name], state[name]) for name in state)
        assert len(loader) == 21
        stats = loader.stats().to_dict()
    assert stats["num_samples"] > 0
    assert {stage["name"] for stage in stats["stages"]} == {"read", "place"}
    assert set(threading.enumerate()) <= before


def test_tensors_that_wait_count_as_memory(folder: Path) -> None:
    with tensors(**{"prefetch.memory": "4MiB", "prefetch.concurrency": 2}) as loader:
        for _, tensor in loader:
            memory = loader.stats().to_dict()["memory"]
            assert memory["open_bytes"] <= 4 * 2**20 + tensor.nbytes + 12_000_000  # `big` comes alone
        assert loader.stats().to_dict()["memory"]["live_bytes"] == 0


def test_ends_after_a_break_and_a_close(folder: Path) -> None:
    before = set(threading.enumerate())
    loader = tensors()
    for _ in loader:
        break
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ClosedError):
        iter(loader)


def test_keys_dtype_and_limit(folder: Path) -> None:
    with tensors(**{"source.keys": "layer.1*", "source.dtype": "bfloat16", "source.limit": 3}) as loader:
        delivered = dict(loader)
    assert len(delivered) == 3
    assert {tensor.dtype for tensor in delivered.values()} == {torch.bfloat16}


def test_what_does_not_fit_a_checkpoint(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`batch` acts on samples"):
        loaderkit.build(
            {"source": {"kind": "checkpoint", "url": str(folder)}, "stages": ["read", {"batch": {"size": 2}}]}
        )
    with pytest.raises(ConfigError, match="read by threads"):
        tensors(**{"prefetch.executor": "process"})
    with pytest.raises(CheckpointError, match="no such file"):
        tensors(**{"source.url": "/nowhere/x"})


def test_is_its_own_description(folder: Path, tmp_path: Path) -> None:
    pipeline = loaderkit.Pipeline.from_yaml(PIPELINE)
    (tmp_path / "again.yaml").write_text(pipeline.to_yaml())
    assert loaderkit.Pipeline.from_yaml(tmp_path / "again.yaml") == pipeline
    described = loaderkit.Pipeline.checkpoint(folder, keys=["big"]).read()
    assert [name for name, _ in loaderkit.build(described)] == ["big"]


class TestCommandLine:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    def test_the_pipeline(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("check", "explain", "run"):
            assert "restore" in self.run(capsys, command, str(PIPELINE))
            assert "restore" in json.loads(self.run(capsys, command, str(PIPELINE), "--json"))["pipeline"]

    def test_restore(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "big  float32 [3000000]  12000000 bytes" in self.run(capsys, "restore", str(folder), "--list")
        assert "21 tensors" in self.run(capsys, "restore", str(folder))
        listed = json.loads(self.run(capsys, "restore", str(folder), "--list", "--json", "--keys", "b*"))
        assert [row["name"] for row in listed["tensors"]] == ["big"]

    def test_manifest_and_verify(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["restore", str(folder), "--verify-only"]) == 1
        assert "no manifest" in capsys.readouterr().err
        assert "checksums written" in self.run(capsys, "manifest", str(folder))
        result = json.loads(self.run(capsys, "restore", str(folder), "--verify-only", "--json"))
        assert result["verified"]
        assert result["num_tensors"] == 21
        assert result["fetched_bytes"] >= result["num_bytes"]

    def test_a_damaged_one_is_exit_code_1(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "m.safetensors").write_bytes(b"")
        assert main(["restore", str(folder)]) == 1
        assert "m.safetensors" in capsys.readouterr().err

    @pytest.mark.filterwarnings("ignore")
    def test_values_are_listed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_dcp({"a": torch.ones(2), "step": 3}, tmp_path / "d")
        assert "step  a plain value" in self.run(capsys, "restore", str(tmp_path / "d"), "--list")
