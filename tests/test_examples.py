"""Every program in examples/ runs, as its user would run it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from buckets import upload

import loaderkit

FOLDER = Path(__file__).parent.parent / "examples"
ELSEWHERE = ("ray_train.py", "make_")  # run by tests/integrations, and by the tests of the pipelines on what they make
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith(ELSEWHERE))
ARGUMENTS = {  # a program that is not here fails: give it small work to do
    "train.py": ["PHOTOS", "--batch-size", "20", "--checkpoints", "run"],
    "torch_dataset.py": ["--samples", "100"],
    "train_from_s3.py": ["s3://examples/shards", "--endpoint", "ENDPOINT", "--cache", "cache", "--batch-size", "20"],
    "restore.py": ["--steps", "6", "--check"],
    "restore_fsdp.py": ["--steps", "3"],
    "train_gpt.py": ["--steps", "3", "--speeches", "60"],
}
WITH_TOKENIZERS = ("make_chats.py", "make_image_text.py")  # which only `make integration` installs
MARKS = {
    "restore_fsdp.py": [pytest.mark.integration],
    "train_gpt.py": [pytest.mark.prove],  # tests/elastic/test_gpt.py trains by it, too
}
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
LAUNCHED = {name: [*TORCHRUN, "2"] for name in ("restore_fsdp.py", "train_gpt.py")}  # by what, if not by python alone


def run(program: Path, arguments: list[str], folder: Path, launcher: list[str] | None = None) -> str:
    launcher = LAUNCHED.get(program.name, []) if launcher is None else launcher
    command = [sys.executable, *launcher, str(program), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if launcher else None  # else torchrun says that it has set it
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path, list[str]], str]:
    """`run`, in this process: to import torch takes a program longer than all else."""

    def run_program(program: Path, arguments: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        runpy.run_path(str(program), run_name="__main__")
        written = capsys.readouterr()
        assert written.err == ""
        return written.out

    return run_program


@pytest.mark.parametrize(
    "program",
    [pytest.param(path, id=path.name, marks=MARKS.get(path.name, [])) for path in PROGRAMS],
)
def test_every_example_runs(
    program: Path,
    photos: Path,
    shards: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    run_here: Callable[[Path, list[str]], str],
) -> None:
    words = {"PHOTOS": str(photos)}
    if "ENDPOINT" in ARGUMENTS[program.name]:
        server = request.getfixturevalue("seaweed")
        request.getfixturevalue("s3_keys")
        upload(server, shards, "examples", "shards/")
        words["ENDPOINT"] = server.endpoint
    arguments = [words.get(word, word) for word in ARGUMENTS[program.name]]
    is_apart = program.name in LAUNCHED or program.name == "train.py"
    written = run(program, arguments, tmp_path) if is_apart else run_here(program, arguments)
    assert written.count("\n") >= 3


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.integration] if path.name in WITH_TOKENIZERS else [])
        for path in sorted(FOLDER.glob("make_*.py"))
    ],
)
def test_help_makes_no_data(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0
    assert list(tmp_path.iterdir()) == []


def test_mds_shards_hold_pictures_and_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_mds.py", str(tmp_path / "mds"), "40"])
    runpy.run_path(str(FOLDER / "make_mds.py"), run_name="__main__")
    assert "40 pictures are in 2 shards" in capsys.readouterr().out
    pipeline = loaderkit.Pipeline.mds(str(tmp_path / "mds")).shuffle(False).read().decode().batch(40)
    with loaderkit.build(pipeline) as loader:
        (batch,) = loader
    assert batch["label"].tolist() == [number % 3 for number in range(40)]
    assert batch["image"].float().mean((2, 3)).argmax(1).tolist() == batch["label"].tolist()  # red, green, blue


def test_every_example_is_in_the_readme() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [program.name for program in FOLDER.glob("*.py") if f"`{program.name}" not in text] == []


def test_training_resumes_exactly(photos: Path, tmp_path: Path, run_here: Callable[[Path, list[str]], str]) -> None:
    program = FOLDER / "train.py"
    arguments = [str(photos), "--batch-size", "12", "--epochs", "2"]

    def trained(*more: str) -> list[str]:
        """Epoch and first key of every batch."""
        lines = run_here(program, [*arguments, *more]).splitlines()
        return [f"{line.split()[1]} {line.split()[-1]}" for line in lines if line.startswith("epoch")]

    whole = trained("--checkpoints", "whole")
    assert len(whole) == 10
    first = trained("--checkpoints", "parts", "--max-batches", "3")
    assert first == whole[:3]
    assert trained("--checkpoints", "parts") == whole[3:]
    assert not list(tmp_path.glob("*/.saving-*"))


@pytest.mark.prove
def test_a_finished_training_has_nothing_left_to_do(photos: Path, tmp_path: Path) -> None:
    arguments = [str(photos), "--batch-size", "30", "--epochs", "1", "--checkpoints", "run"]
    assert "epoch" in run(FOLDER / "train.py", arguments, tmp_path)
    lines = run(FOLDER / "train.py", arguments, tmp_path).splitlines()
    assert not [line for line in lines if line.startswith("epoch")]


@pytest.mark.prove
def test_fsdp_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    program = FOLDER / "restore_fsdp.py"

    def trained(num_ranks: int, num_steps: int, folder: str) -> list[str]:
        arguments = ["--steps", str(num_steps), "--folder", folder]
        return run(program, arguments, tmp_path, [*TORCHRUN, str(num_ranks)]).splitlines()

    whole = trained(1, 6, "whole")[1:]
    parts = [*trained(2, 2, "parts")[1:], *trained(3, 4, "parts")[1:], *trained(1, 6, "parts")[1:]]
    assert parts == whole
    assert len(whole) == 6
