"""The benchmark's harness, with loaderkit and torch's DataLoader from this interpreter; no times are judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiles.peers.__main__ import main

ROOT = Path(__file__).parents[1]
pytest.importorskip("skimage", reason="the benchmark's photographs come with scikit-image")
pytest.importorskip("sklearn", reason="and with scikit-learn")


def command(place: Path, *arguments: str) -> list[str]:
    own = [sys.executable, "-m", "profiles.peers", "--tiny", "--seconds", "0.05", "--python", f"torch={sys.executable}"]
    folders = ["--out", str(place / "out"), "--data", str(place / "data"), "--demo", str(place / "demo")]
    return [*own, *folders, *arguments]


def run(place: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], str]:
    """The finished harness, its JSON, its table."""
    done = subprocess.run(
        command(place, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    (results,) = (place / "out").glob("peers-*cpu-*.json")
    return done, json.loads(results.read_text()), results.with_suffix(".md").read_text()


def workers(place: Path) -> list[int]:
    """Worker processes that read the data below `place`, and whatever they started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and str(place).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests of this module have their data: made by the first."""
    return tmp_path_factory.mktemp("peers")


@pytest.mark.prove
def test_results_are_complete_and_a_failing_contestant_costs_only_itself(place: Path) -> None:
    done, found, table = run(
        place, "--work", "records", "--contestants", "loaderkit,dataloader-in-process,spdl", "--rounds", "2",
        "--also", "broken:prefetch.executor=nonsense", "--python", f"spdl={place}/nowhere",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    contestants = found["works"]["records"]["contestants"]
    assert set(contestants) == {"loaderkit", "dataloader-in-process", "spdl", "broken"}
    for name in ("loaderkit", "dataloader-in-process"):
        entry = contestants[name]
        assert entry["error"] is None
        assert entry["not_the_same_work"] == []
        assert [turn["round"] for turn in entry["turns"]] == [1, 2]
        assert all(turn["samples"] > 0 and turn["cpu_seconds"] >= 0 for turn in entry["turns"])
        assert entry["figure"]["least"] <= entry["figure"]["median"] <= entry["figure"]["most"]
        assert entry["version"]
        assert f"| {name} |" in table
    assert contestants["dataloader-in-process"]["against"] == "loaderkit"
    assert contestants["dataloader-in-process"]["ratio"]["median"] > 0
    assert contestants["loaderkit"]["ratio"] is None
    assert "nonsense" in contestants["broken"]["error"]
    assert "- broken failed: ConfigError" in table
    assert "make peers" in contestants["spdl"]["error"]
    assert workers(place) == []


@pytest.mark.prove
def test_works_of_the_same_day_are_joined(place: Path) -> None:
    for work in ("dataset", "first-batch"):
        done, found, table = run(
            place, "--work", work, "--contestants", "loaderkit,dataloader,dataloader-pillow", "--rounds", "2"
        )
        assert done.returncode == 0, done.stderr
    assert {"dataset", "first-batch"} <= set(found["works"])
    assert found["works"]["first-batch"]["unit"] == "s"
    assert "## dataset:" in table
    assert "## first-batch:" in table


@pytest.mark.prove
def test_other_modes(place: Path) -> None:
    works = "files,raw-tar-first,busy-step,memory"
    done, found, _ = run(place, "--work", works, "--contestants", "loaderkit,dataloader-pillow", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert found["works"]["files"]["contestants"]["loaderkit"]["checks"]["images"] == "float32 [64, 3, 224, 224]"
    raw = found["works"]["raw-tar-first"]["contestants"]["loaderkit"]
    assert raw["checks"]["num_samples"] == 400  # every sample once
    assert found["works"]["busy-step"]["unit"] == "steps/s"
    assert found["works"]["memory"]["contestants"]["loaderkit"]["turns"][0]["slab_bytes"] == 64 * (
        3 * 224 * 224 * 4 + 8
    )


@pytest.mark.prove
def test_nothing_is_left_when_it_is_stopped(place: Path) -> None:
    arguments = ["--work", "records", "--contestants", "loaderkit,dataloader", "--rounds", "1000"]
    harness = subprocess.Popen(command(place, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert harness.stdout is not None
        for line in harness.stdout:  # until the rounds have begun
            if "round 1" in line:
                break
        assert len(workers(place)) > 2  # the harness and its workers
        os.kill(harness.pid, signal.SIGINT)
        harness.stdout.close()
        assert harness.wait(timeout=60) == 130
    finally:
        harness.kill()
    assert workers(place) == []


@pytest.mark.prove
def test_two_checkouts_in_turns(place: Path) -> None:
    """This one against itself: a loader, one judged against a peer, and a restore."""
    done = subprocess.run(
        [
            sys.executable, "-m", "profiles.before_after", str(ROOT), "--work", "tokens,records,restore-warm", "--tiny",
            "--rounds", "2", "--seconds", "0.05", "--gigabytes", "0.1",
            "--data", str(place / "data"), "--out", str(place / "out"),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: a bar does not hold, by so short a look
    (results,) = (place / "out").glob("before-after-*.json")
    rows = json.loads(results.read_text())["rows"]
    assert [row["work"] for row in rows] == ["tokens", "records, against dataloader", "restore-warm"]
    assert all(row["figures"].keys() >= {"before", "after"} and row["ratio"]["median"] > 0 for row in rows)
    assert f"| {rows[0]['work']} |" in results.with_suffix(".md").read_text()


def test_an_unknown_work_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["profiles.peers", "--work", "fils"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no work fils" in capsys.readouterr().err
