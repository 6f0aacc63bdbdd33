"""`loaderkit checkpoints --advise`: sizes, times, interval and levers, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit.checkpoint.timing.advice import sizes
from loaderkit.cli import main

JOB = ["checkpoints", "--advise", "--ranks", "64", "--store", "2GB/s", "--mtbf", "3h"]


def test_the_table_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--params", "70e9"]) == 0
    text = capsys.readouterr().out
    for line in (
        "a checkpoint              980.00 GB  15.31 GB a rank",
        "training stops               1.53 s  while a save is copied to host memory",
        "host memory               245.00 GB  a machine, for the copies",
        "save each                  8.15 min  with an interruption in 180 min",
    ):
        assert line in text
    assert main([*JOB, "--params", "70e9", "--local", "16GB/s"]) == 0
    text = capsys.readouterr().out
    assert "behind training, to `to`" in text
    assert "with" in text


def test_json_and_the_size_of_what_is_there(ask: Callable[..., Any], tmp_path: Path) -> None:
    told = ask(*JOB, "--params", "1e9")
    assert sum(told["parts"].values()) == told["job"]["num_bytes"] == 14e9
    assert {lever["lever"] for lever in told["levers"]} >= {"a store twice as fast", "half as many interruptions"}
    assert ask(*JOB, "--params", "1e9", "--local", "1GB/s")["upload_s"] == told["flush_s"]
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": torch.ones(100_000)})
    told = ask(*JOB, tmp_path)
    assert 400_000 < told["job"]["num_bytes"] < 410_000
    assert told["parts"] == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--advise", "--params", "1e9"], "give how fast the store is written to"),
        (["--advise", "--store", "1GB/s"], "give --params, or the URL"),
        (["--advise", "--store", "fast", "--params", "1e9"], "a speed such as 500MB/s"),
        (["--advise", "--store", "0", "--params", "1e9"], "a speed above 0"),
        (["--advise", "--store", "1GB/s", "--params", "-1"], "a number of parameters such as 70e9"),
        (["--advise", "--store", "1GB/s", "--params", "1e9", "--mtbf", "soon"], "a duration such as 500ms"),
        (["--advise", "--store", "1GB/s", "--params", "1e9", "--mtbf", "0"], "a duration above 0"),
        (["--advise", "--verify", "x"], "give one of --verify, --copy, --prune and --advise"),
        ([], "give the URL of checkpoints"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", *arguments]) == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in error


def test_a_directory_without_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, str(tmp_path)]) != 0
    capsys.readouterr()


def test_a_real_save_has_these_sizes(tmp_path: Path) -> None:
    """Weights in bfloat16, float32 master weights, and Adam's two moments of them."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 256))
    master = [param.detach().clone().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(master)
    for param in master:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    num_params = sum(param.numel() for param in master)
    state = {"model": model.to(torch.bfloat16), "master": master, "optimizer": optimizer}
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    saved_bytes = sum(path.stat().st_size for path in (tmp_path / "step-0000000001").iterdir())
    assert sum(sizes(num_params).values()) == pytest.approx(saved_bytes, rel=0.03)
    assert json.dumps(sizes(1e9))
