"""Exports beside the checkpoints: in fewer bits, with their error and size, and never taken for a checkpoint."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors_programs
import torch
from checkpoint_states import same
from rank_programs import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file

import loaderkit
from loaderkit.checkpoint import dequantize, latest
from loaderkit.checkpoint.formats.blockwise import absmax_of, quantized
from loaderkit.checkpoint.save.safetensors import export
from loaderkit.errors import CheckpointError, ConfigError

STEP = "step-0000000002"


def saved(folder: Path, state: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Save steps 1 and 2; the stats of the exports of step 2."""
    with loaderkit.CheckpointManager(folder / "run", **settings) as checkpoints:
        for step in (1, 2):
            saving = checkpoints.save(step, state)
        checkpoints.wait_until_finished()
        assert saving is not None
        copies: dict[str, Any] = saving.stats.get("copies", {})
        return copies


@pytest.mark.integration
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_half_the_bits(dtype: str, form: str, tmp_path: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "note": "mine"}
    stats = saved(tmp_path, state, format=form, copies=[{"to": str(tmp_path / "export"), "dtype": dtype, "every": 2}])
    assert [path.name for path in (tmp_path / "export").iterdir()] == [STEP]
    folder = tmp_path / "export" / STEP
    target = getattr(torch, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = {name: tensor.to(target) for name, tensor in model.state_dict().items()}
    found = loaded.state_dict()
    assert found.keys() == wanted.keys()
    assert all(same(found[name], tensor) for name, tensor in wanted.items())
    told = stats[str(folder)]
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert told["source_bytes"] == sum(tensor.nbytes for tensor in own.values()) == 2 * told["num_bytes"]
    differences = sum(float((tensor - tensor.to(target).float()).double().square().sum()) for tensor in own.values())
    norms = sum(float(tensor.double().square().sum()) for tensor in own.values())
    assert told["relative_error"] == pytest.approx((differences / norms) ** 0.5)
    assert 0 < told["relative_error"] < told["worst"]["relative_error"] < 0.01
    assert f"model.{told['worst']['name']}" in {f"model.{name}" for name in [*own, *(f"model.{n}" for n in own)]}


def test_it_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"model": {"w": torch.full((3,), 1 / 3)}, "n": 1}
    saved(tmp_path, state, copies=[{"to": str(tmp_path / "export"), "dtype": "bfloat16"}])
    folder = tmp_path / "export" / STEP
    for call in (loaderkit.restore, lambda url: loaderkit.restore(url, {"model.w": torch.zeros(3)})):
        with pytest.raises(CheckpointError, match=r"is an export in bfloat16 of .*run/step-0000000002.*export=True"):
            call(folder)
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="no complete checkpoint"):
        latest(tmp_path / "export")
    with loaderkit.CheckpointManager(tmp_path / "export") as checkpoints, caplog.at_level(logging.WARNING):
        with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* is an export in bfloat16"):
            checkpoints.restore(state)  # and no start from the beginning
        with pytest.raises(CheckpointError, match="is an export in bfloat16"):
            checkpoints.restore(state, step=2)
    assert state["model"]["w"].tolist() == torch.full((3,), 1 / 3).tolist()  # type: ignore[index]
    found = loaderkit.restore(folder, export=True, verify=True)
    assert same(found["model.w"], torch.full((3,), 1 / 3).bfloat16())
    assert found["loaderkit.step"] == 2
    assert "n" not in found
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "an export in bfloat16" in file.metadata()["loaderkit"]
    assert latest(tmp_path / "run") == str(tmp_path / "run" / STEP)


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_moments_in_eight_bits(flush: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_PIECE", 1024)
    model = torch.nn.Sequential(torch.nn.Linear(100, 77), torch.nn.Linear(77, 3))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for _ in range(3):
        model(torch.randn(9, 100)).square().sum().backward()
        optimizer.step()
    stats = saved(
        tmp_path,
        {"model": model, "optimizer": optimizer},
        flush=flush,
        copies=[{"to": str(tmp_path / "export"), "quantize": "int8"}],
    )
    folder = tmp_path / "export" / STEP
    found = load_file(folder / "optimizer.safetensors")
    names = [name for name, _ in model.named_parameters()]  # of a saved optimizer's state
    moments = {
        f"state.{names[number]}.{name}": tensor
        for number, values in optimizer.state_dict()["state"].items()
        for name, tensor in values.items()
        if name != "step"
    }
    assert found.keys() == {*moments, *(f"{name}.absmax" for name in moments)}
    exact = dequantize(found)
    for name, tensor in moments.items():
        absmax = absmax_of(tensor.flatten())
        assert same(found[f"{name}.absmax"], absmax)
        assert same(found[name], quantized(tensor.flatten(), absmax).view(tensor.shape))
        assert torch.allclose(exact[name], tensor, atol=float(tensor.abs().max()) / 254 * 1.001)
    told = stats[str(folder)]
    assert told["num_bytes"] < 0.3 * told["source_bytes"] == 0.3 * sum(tensor.nbytes for tensor in moments.values())
    differences = sum(float((exact[name] - tensor).double().square().sum()) for name, tensor in moments.items())
    norms = sum(float(tensor.double().square().sum()) for tensor in moments.values())
    assert told["relative_error"] == pytest.approx((differences / norms) ** 0.5)
    written = json.loads((folder / "loaderkit-state.json").read_text())["export"]
    assert (written["dtype"], written["block"], written["relative_error"]) == ("int8", 256, told["relative_error"])
    with pytest.raises(CheckpointError, match=r"export in int8.*loaderkit\.checkpoint\.dequantize"):
        loaderkit.restore(folder)


def test_all_kinds_of_tensors(tmp_path: Path) -> None:
    """0-dim, empty, strided, of types that are not converted, tied, and of a length that ends within a block."""
    wide = torch.randn(700, 33, dtype=torch.float64)
    model = {
        "wide": wide, "turned": wide.T, "again": wide, "one": torch.tensor(0.5), "none": torch.empty(0, 3),
        "ids": torch.arange(5), "small": torch.randn(9).bfloat16(), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    other = {"sparse": torch.zeros(3, dtype=torch.complex128), "what": {1, 2}}
    saved(
        tmp_path,
        {"model": model, "other": other},
        copies=[
            {"to": str(tmp_path / "half"), "dtype": "bfloat16"},
            {"to": str(tmp_path / "int"), "quantize": "int8", "keys": "model.*"},
        ],
    )
    half = loaderkit.restore(tmp_path / "half" / STEP, export=True, verify=True)
    for name, tensor in model.items():
        assert same(half[f"model.{name}"], tensor.bfloat16() if tensor.is_floating_point() else tensor), name
    exact = dequantize(loaderkit.restore(tmp_path / "int" / STEP, export=True, keys="model.*"))
    for name, tensor in model.items():
        found = exact[f"model.{name}"]
        assert found.shape == tensor.shape
        bound = float(tensor.abs().max()) / 254 * 1.01 if tensor.is_floating_point() and tensor.numel() else 0
        assert torch.allclose(found.double(), tensor.double(), rtol=0, atol=bound), name


@pytest.mark.prove
def test_shards_of_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(safetensors_programs.save_copies, 2, tmp_path) == [0, 0]
    wanted = safetensors_programs.whole_grid(1)
    half = load_file(tmp_path / "half" / "step-0000000001" / "model.safetensors")
    codes = load_file(tmp_path / "int" / "step-0000000001" / "model.safetensors")
    for name, tensor in wanted.items():
        assert same(half[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name
        if tensor.is_floating_point():
            absmax = absmax_of(tensor.flatten())
            assert same(codes[f"{name}.absmax"], absmax)
            assert same(codes[name], quantized(tensor.flatten(), absmax).view(tensor.shape)), name
    (stats,) = json.loads((tmp_path / "stats-0.json").read_text()).values()
    assert stats["relative_error"] < 0.01


def test_one_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / STEP).write_text("in the way")
    copies = [
        {"to": str(tmp_path / "other"), "dtype": "bfloat16"},
        {"to": str(tmp_path / "export"), "dtype": "bfloat16", "keys": ["modle.*"]},
    ]
    with caplog.at_level(logging.WARNING):
        stats = saved(tmp_path, {"model": {"w": torch.ones(2)}}, copies=copies)
    first, second = stats.values()
    assert first["error"]
    assert "no tensor has a name that matches modle.*; there are model.w" in second["error"]
    assert "is not made" in caplog.text
    assert loaderkit.restore(tmp_path / "run" / STEP, verify=True)["model.w"].eq(1).all()


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ([{"to": "x"}], "either `dtype` or `quantize`"),
        ([{"to": "x", "dtype": "bfloat16", "quantize": "int8"}], "either `dtype` or `quantize`"),
        ([{"to": "x", "dtype": "float8"}], "'bfloat16' or 'float16'"),
        ([{"to": "x", "dtype": "float16", "keys": []}], "`keys` is empty"),
        ([{"to": "x", "dtype": "float16"}, {"to": "./x", "quantize": "int8"}], "a directory of its own"),
        ([{"to": "run", "dtype": "float16"}], "a directory of its own"),
    ],
)
def test_settings_that_are_wrong(copies: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        loaderkit.CheckpointManager("run", copies=copies)


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.yaml"
    path.write_text("to: run\ncopies: [{to: export/a, every: 5000, dtype: bfloat16, keys: ['model.*']}]\n")
    with loaderkit.CheckpointManager(path) as checkpoints:
        (copy,) = checkpoints.settings.copies
    assert (copy.to, copy.every, copy.globs) == (str(tmp_path / "export" / "a"), 5000, ("model.*",))
