"""The pipelines of video and sound, and their page, as they stand, on what the examples make."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from doc_examples import ROOT, examples

import loaderkit
from loaderkit.cli import main
from loaderkit.pipeline.config.parsing import parse

NUM = {"make_videos.py": 12, "make_sounds.py": 16}
PAGE = "docs/media.md"


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which the paths of the page lead to the repository."""
    for name in ("examples", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def make(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, folder = re.fullmatch(r"python (\S+) (\S+)", command).groups()  # type: ignore[union-attr]
    monkeypatch.setattr(sys, "argv", [program, folder])
    runpy.run_path(program, run_name="__main__")


def test_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command and each pipeline; on two batches of each a sample of every field, and again from a state."""
    kinds = []
    for kind, text in examples(PAGE):
        kinds.append(kind)
        if kind == "sh":
            for line in text.splitlines():
                if line.startswith("loaderkit "):
                    assert main(line.split()[1:]) == 0
                else:
                    make(line, monkeypatch)
        elif kind == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(text)
            with loaderkit.build(name) as loader:
                assert len(list(loader)) == len(loader) >= 3
        else:
            exec(compile(text, PAGE, "exec"), {"__name__": "example"})
    assert kinds == ["sh", "sh", "yaml", "yaml", "python"]
    said = capsys.readouterr().out
    for program, num in NUM.items():
        assert f"{num} {program[5:-3]} of" in said
    for name in ("video", "audio"):
        assert f"{name}: {3 if name == 'video' else 4} batches" in said
        _runs_and_resumes(name)


def _runs_and_resumes(name: str) -> None:
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
