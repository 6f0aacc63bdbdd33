"""`loaderkit pack`: what it prints, its exit codes, and how it is interrupted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HELPERS, ROOT
from packed_shards import files_in

import loaderkit
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.cli import main

SCRIPT = Path(sys.executable).parent / "loaderkit"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{HELPERS}:{ROOT}")
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def described(photos: Path) -> dict[str, Any]:
    return {
        "name": "small",
        "source": {"kind": "files", "url": str(photos), "label": "parent"},
        "order": {"seed": 5},
        "stages": ["read", "decode", {"resize": {"size": [40, 48]}}, "random_horizontal_flip", {"batch": {"size": 4}}],
        "prefetch": {"batches": 2},
    }  # fmt: skip


@pytest.fixture
def pipeline(described: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(to_yaml(described))
    return tmp_path / "small.yaml"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command, which must succeed, with --json, and give its document."""

    def run(*arguments: str | Path) -> Any:
        code = main(["pack", *map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    return run


def test_a_dry_run_writes_nothing_and_says_what_would_be(pipeline: Path, ask: Callable[..., Any]) -> None:
    planned = ask(pipeline, "--out", "shards", "--shard", "30kB", "--dry-run")
    assert not Path("shards").exists()
    made = ask(pipeline, "--out", "shards", "--shard", "30kB")
    for name in ("num_samples", "num_shards", "stages_run", "stages_left", "train", "out", "format"):
        assert planned[name] == made[name], name
    assert (planned["stages_run"], planned["stages_left"]) == (["decode", "resize"], ["random_horizontal_flip"])
    assert 0.8 < planned["expected_bytes"] / made["num_bytes"] < 1.2
    assert (planned["num_found"], planned["was_whole"], made["was_whole"]) == (0, False, False)
    again = ask(pipeline, "--out", "shards", "--shard", "30kB", "--dry-run")
    assert (again["num_found"], again["was_whole"]) == (planned["num_shards"], True)


def test_a_dry_run_knows_the_extensions_of_all_files_that_are_copied(
    described: dict[str, Any], photos: Path, tmp_path: Path, ask: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of 60, which is none of the 16 that are tried."""
    mine = tmp_path / "mine"
    shutil.copytree(photos, mine)
    second = sorted(mine.rglob("*.jpg"))[1]
    second.rename(second.with_suffix(".jpeg"))
    described |= {"source": {"kind": "files", "url": str(mine), "label": "parent"}, "order": {"shuffle": "none"}}
    del described["stages"][2]
    Path("p.yaml").write_text(to_yaml(described))
    planned = ask("p.yaml", "--out", "shards", "--dry-run")
    assert "jpeg;jpg" in planned["train"]
    assert planned["train"] == ask("p.yaml", "--out", "shards")["train"]
    described["stages"].insert(2, {"resize": {"size": [40, 48]}})
    Path("p.yaml").write_text(to_yaml(described))
    assert main(["pack", "p.yaml", "--out", "others", "--dry-run"]) == 0
    assert "those of 16 samples tried" in capsys.readouterr().out


def test_the_pipeline_that_it_prints_trains(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(pipeline), "--out", "shards", "--quality", "80"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "60 samples in 1 shard," in said.out
    assert "stages that run once: decode, resize\n" in said.out
    text = said.out.partition("to train from them:\n\n")[2]
    Path("train.yaml").write_text("".join(line[2:] for line in text.splitlines(keepends=True)))
    with loaderkit.build("train.yaml") as loader:
        assert sum(len(batch["label"]) for batch in loader) == 60
        described = loader.stats().to_dict()
    assert described["num_batches"] == 15
    assert main(["pack", str(pipeline), "--out", "shards", "--quality", "80"]) == 0
    assert "whole already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shard", "many"], "--shard"),
        (["--shard", "0"], "--shard"),
        (["--format", "zip"], "expected tar or array"),
        (["--quality", "0"], "--quality"),
        (["--format", "array"], "an array has one field, and samples have image, label"),
        (
            ["--format", "array", "--set", "output=[label]"],
            "random_horizontal_flip is left for training and needs images",
        ),
        (["--set", "stages.resize.size=0"], "resize.size: expected"),
    ],
)
def test_wrong_use(pipeline: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["pack", str(pipeline), "--out", "shards", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not Path("shards").exists()


@pytest.mark.parametrize(
    ("out", "code", "said"),
    [
        (
            "/proc/x",
            1,
            "'/proc/x' cannot be made (the file system of '/proc' has no place for it); choose another place",
        ),
        ("/dev/null", 1, "a part of its path is a file"),
        ("shards/" + 300 * "n", 1, "cannot be made (File name too long)"),
        ("shards.tar", 2, "takes a name that ends in .tar for one archive: choose another name"),
        ("", 2, "--out is empty"),
    ],
)
def test_places_that_cannot_be(
    pipeline: Path, capsys: pytest.CaptureFixture[str], out: str, code: int, said: str
) -> None:
    assert main(["pack", str(pipeline), "--out", out]) == code
    captured = capsys.readouterr().err
    assert said in captured
    assert "moved or deleted" not in captured
    assert {path.name for path in Path().iterdir()} <= {"small.yaml", "cache", "shards"}


@pytest.mark.parametrize("out", ["b{1,2}", "c[1]*", "d e/é", "~nobody-of-this-name", "-x"])
def test_places_of_any_name(described: dict[str, Any], ask: Callable[..., Any], out: str) -> None:
    del described["stages"][3]
    described |= {"output": ["image"]}
    Path("p.yaml").write_text(to_yaml(described))
    for form in ("tar", "array"):
        made = ask("p.yaml", f"--out={out}.{form[:2]}", "--format", form)
        assert Path(f"{out}.{form[:2]}").is_dir()
        Path("train.yaml").write_text(made["train"])
        with loaderkit.build("train.yaml") as loader:
            assert loader.num_samples == 60


def test_other_settings_at_the_same_place(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(pipeline), "--out", "shards"]) == 0
    assert main(["pack", str(pipeline), "--out", "shards", "--quality", "50"]) == 2
    assert "quality was '90' and is '50'" in capsys.readouterr().err


def test_a_bad_sample(described: dict[str, Any], photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described["stages"].insert(1, {"call": {"function": "packed_shards:refuse_some", "args": {"every": 50}}})
    Path("p.yaml").write_text(to_yaml(described))
    assert main(["pack", "p.yaml", "--out", "shards", "--set", "order.shuffle=none"]) == 1
    assert "call failed for sample 'bee/049.jpg' in" in capsys.readouterr().err
    assert main(["pack", "p.yaml", "--out", "shards", "--set", "errors.on_bad_sample=skip"]) == 2, (
        "begun with other settings"
    )
    capsys.readouterr()
    assert main(["pack", "p.yaml", "--out", "others", "--set", "errors.on_bad_sample=skip"]) == 0
    out = capsys.readouterr().out
    assert "59 samples in 1 shard," in out
    assert "left out, as it is bad: call failed for sample 'bee/049.jpg'" in out


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.prove)])
def test_ctrl_c_leaves_whole_shards_and_the_command_goes_on(described: dict[str, Any], processes: str) -> None:
    """Ctrl-C comes while the 40th sample is made, of the main process and of others."""
    arguments = {"path": "calls", "at": 16 + 40, "name": "SIGINT", "parent": processes == "2"}
    described["stages"].insert(3, {"call": {"function": "packed_shards:interrupt_at", "args": arguments}})
    Path("p.yaml").write_text(to_yaml(described))
    command: list[Any] = [SCRIPT, "pack", "p.yaml", "--out", "shards", "--shard", "20kB", "--processes", processes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "shards done, and they stay; the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    left = files_in(Path("shards"))
    assert not [name for name in left if name.endswith(".tmp")]
    assert "loaderkit-shards.json" not in left
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 < found["num_found"] < found["num_shards"]
    assert main(["pack", "p.yaml", "--out", "again", "--shard", "20kB", "--processes", "1"]) == 0
    assert files_in(Path("shards")) == files_in(Path("again"))


def test_without_ray_the_extra_is_named(
    pipeline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["pack", str(pipeline), "--out", "shards", "--ray"]) == 1
    assert "pip install 'loaderkit[ray]'" in capsys.readouterr().err


@pytest.mark.integration
def test_a_cluster_that_is_not_there(
    pipeline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["pack", str(pipeline), "--out", "shards", "--ray"]) == 2
    assert "127.0.0.1:1: there is no Ray cluster that can be reached" in capsys.readouterr().err
