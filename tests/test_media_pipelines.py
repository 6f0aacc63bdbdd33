"""The pipelines of video and sound, as they stand, on what the examples make."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from doc_examples import ROOT

import loaderkit
from loaderkit.pipeline.config.parsing import parse

NUM = {"make_videos.py": 12, "make_sounds.py": 16}


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which the paths of the page lead to the repository."""
    for name in ("examples", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["video", "audio"])
def test_it_runs_and_resumes(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample of every field on what the example makes, and again from a state."""
    program = f"make_{name.replace('audio', 'sound')}s.py"
    monkeypatch.setattr(sys, "argv", [program, f"data/{program[5:-3]}"])
    runpy.run_path(f"examples/{program}", run_name="__main__")
    assert f"{NUM[program]} {program[5:-3]} of" in capsys.readouterr().out
    overrides = {
        "stages.transfer.device": "cpu",
        "order.epochs": 1,
        "source.url": f"data/{name.replace('audio', 'sound')}s",
    }
    file = ROOT / f"pipelines/{name}.yaml"
    with loaderkit.build(file, overrides=overrides) as loader:
        batches = list(loader)
    with loaderkit.build(file, overrides=overrides) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loaderkit.build(file, overrides=overrides) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    shape = (4, 16, 3, 112, 112) if name == "video" else (4, 1, 64000)
    for batch, other in zip(batches[1:], rest, strict=True):
        assert torch.equal(batch[name], other[name])
        assert batch[name].shape == shape
        assert batch[name].dtype == torch.float32
        assert {*batch["label"].tolist()} <= {0, 1}
        if name == "audio":
            for window, length in zip(batch["audio"], batch["num_samples"], strict=True):
                assert 3 * 16000 - 1 <= length <= 64000
                assert not window[0, length:].any()


@pytest.mark.parametrize("name", ["video", "audio"])
def test_a_file_is_its_own_description(name: str, tmp_path: Path) -> None:
    pipeline = loaderkit.Pipeline.from_yaml(ROOT / f"pipelines/{name}.yaml")
    assert pipeline.config.name == name
    (tmp_path / "again.yaml").write_text(pipeline.to_yaml())
    assert loaderkit.Pipeline.from_yaml(tmp_path / "again.yaml") == pipeline
    assert parse(pipeline.config.to_dict(), expand=False) == pipeline.config
