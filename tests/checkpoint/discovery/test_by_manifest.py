"""A list of checkpoints whose manifests tell them is that of their descriptions, whole and damaged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loaderkit import CheckpointManager
from loaderkit.checkpoint.discovery import listing
from loaderkit.checkpoint.discovery.listing import list_checkpoints

MANIFEST = "loaderkit-manifest.json"


def save(folder: Path, kind: str, num: int) -> list[Path]:
    state = {"a": torch.rand(40, 7), "b": {"c": torch.ones(3), "step": 3}, "big": torch.rand(300_000)}
    with CheckpointManager(folder, format=kind) as manager:
        for step in range(1, num + 1):
            manager.save(step, state)
        manager.wait_until_finished()
    return sorted(path for path in folder.iterdir() if path.name.startswith("step-"))


def damage(step: Path, rng: random.Random) -> None:
    files = sorted(path for path in step.rglob("*") if path.is_file())
    path = rng.choice([path for path in files if path.name != MANIFEST])
    how = rng.choice(["none", "cut", "gone", "begin", "no manifest", "odd manifest", "beside"])
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "gone":
        path.unlink()
    elif how == "begin" and path.suffix != ".distcp":
        data = bytearray(path.read_bytes())
        data[rng.randrange(min(len(data), 60))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif how == "no manifest":
        (step / MANIFEST).unlink()
    elif how == "odd manifest":
        (step / MANIFEST).write_text(rng.choice(["{}", "", "[1]"]))
    elif how == "beside":
        (step / "notes.txt").write_text("mine")


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_the_same_as_by_descriptions(
    kind: str, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = save(tmp_path, kind, 9)
    for step in steps[2:]:
        damage(step, rng)
    opened: list[str] = []
    summary_of = listing._summary

    def noted(url: str, given: Any) -> Any:
        opened.append(url)
        return summary_of(url, given)

    monkeypatch.setattr(listing, "_summary", noted)
    found = list_checkpoints(tmp_path)
    assert str(steps[0]) not in opened
    assert str(steps[1]) not in opened
    monkeypatch.setattr(listing, "_by_manifest", lambda *_: None)
    assert found == list_checkpoints(tmp_path)
    assert found[0].is_whole
    assert found[1].is_whole
