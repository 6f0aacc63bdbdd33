"""`loaderkit checkpoints`: what it lists, and that it finds every damaged byte."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import pack, save_dcp, saved

import loaderkit
from loaderkit.cli import main
from loaderkit.cli.terminal.byte_progress import ByteProgress, byte_progress

pytestmark = pytest.mark.filterwarnings("ignore")
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """The JSON of a command that ends with the exit code `code`."""

    def run(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
        actual = main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert actual == code, captured.err
        document: dict[str, Any] = json.loads(captured.out)
        return document

    return run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 200 and 1000 of torch.distributed.checkpoint, the newer one with a manifest."""
    folder = tmp_path / "run"
    for step in (200, 1000):
        save_dcp({"weight": torch.arange(300_000.0) + step, "step": step}, folder / f"step-{step:010}")
    loaderkit.checkpoint.write_manifest(folder / "step-0000001000")
    return folder


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["checkpoints"]}


class TestList:
    def test_step_age_and_size(self, run_folder: Path, ask: Ask) -> None:
        older = run_folder / "step-0000000200"
        then_s = time.time() - 7200
        for path in older.iterdir():
            os.utime(path, (then_s, then_s))
        found = ask("checkpoints", run_folder)
        assert [row["step"] for row in found["checkpoints"]] == [200, 1000]
        assert found["newest"] == "step-0000001000"
        one, other = found["checkpoints"]
        assert one["num_bytes"] == sum(path.stat().st_size for path in older.iterdir())
        assert one["num_files"] == 2
        assert one["time_s"] == pytest.approx(then_s)
        assert one["age_s"] >= 7200
        assert (one["is_whole"], one["has_manifest"]) == (True, False)
        assert (other["is_whole"], other["has_manifest"], other["problem"]) == (True, True, None)

    def test_the_age_is_that_of_the_commit(self, run_folder: Path, ask: Ask) -> None:
        newer = run_folder / "step-0000001000"
        for path in newer.iterdir():
            os.utime(path, (5000, 5000))
        os.utime(newer / "loaderkit-manifest.json", (6000, 6000))
        assert ask("checkpoints", newer)["checkpoints"][0]["time_s"] == 6000

    def test_what_is_not_whole_says_what_is_missing(self, run_folder: Path, ask: Ask) -> None:
        save_dcp({"weight": torch.ones(5)}, run_folder / "step-3000")
        (run_folder / "step-3000" / ".metadata").unlink()
        os.truncate(run_folder / "step-0000001000" / "__0_0.distcp", 5000)
        (run_folder / ".saving-step-4000-1").mkdir()
        (run_folder / ".saving-step-4000-1" / "__0_0.distcp").write_bytes(b"half")
        (run_folder / "notes.txt").write_text("no checkpoint")
        found = ask("checkpoints", run_folder)
        rows = rows_of(found)
        assert set(rows) == {"step-0000000200", "step-0000001000", "step-3000", ".saving-step-4000-1"}
        assert "no .metadata" in rows["step-3000"]["problem"]
        assert "5000 bytes" in rows["step-0000001000"]["problem"]
        assert "not committed" in rows[".saving-step-4000-1"]["problem"]
        assert rows[".saving-step-4000-1"]["num_bytes"] == 4
        assert found["newest"] == "step-0000000200"
        assert loaderkit.checkpoint.latest(run_folder) == str(run_folder / "step-0000000200")

    def test_every_format_and_one_by_itself(self, tmp_path: Path, ask: Ask) -> None:
        folder = tmp_path / "many"
        folder.mkdir()
        (folder / "checkpoint-7.pt").write_bytes(saved({"a": torch.ones(3)}))
        (folder / "step-8").mkdir()
        safetensors.torch.save_file({"a": torch.ones(3)}, folder / "step-8" / "model.safetensors")
        pack([folder / "step-8" / "model.safetensors"], folder / "step-8", folder / "step-9.tar")
        (folder / "model.safetensors").write_bytes((folder / "step-8" / "model.safetensors").read_bytes())
        (folder / "loaderkit-manifest.json").write_text("{}")
        rows = rows_of(ask("checkpoints", folder))
        assert {name: (row["step"], row["format"]) for name, row in rows.items()} == {
            "checkpoint-7.pt": (7, "torch"),
            "step-8": (8, "safetensors"),
            "step-9.tar": (9, "safetensors"),
            "model.safetensors": (None, "safetensors"),
        }
        for name, row in rows.items():
            assert ask("checkpoints", folder / name)["checkpoints"][0]["num_bytes"] == row["num_bytes"]

    def test_the_table(self, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["checkpoints", str(run_folder)]) == 0
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        assert lines[0].split() == ["name", "step", "age", "size"]
        assert lines[1].startswith("step-0000000200   200 ")
        assert lines[1].endswith("1.20 MB  whole, dcp, no manifest")
        assert lines[2].endswith("1.20 MB  whole, dcp")
        assert captured.err == ""

    def test_nothing_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "notes.txt").write_text("no checkpoint")
        assert main(["checkpoints", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path}: no checkpoints\n"
        assert main(["checkpoints", str(tmp_path / "bogus")]) == 1
        assert "no such file" in capsys.readouterr().err


class TestVerify:
    def test_any_flipped_byte_is_found(self, run_folder: Path, ask: Ask) -> None:
        newer = run_folder / "step-0000001000"
        found = ask("checkpoints", newer, "--verify")["checkpoints"][0]
        assert (found["verified"], found["damage"]) == (True, [])
        data = newer / "__0_0.distcp"
        whole = data.read_bytes()
        for position in (300, len(whole) // 2, len(whole) - 1):  # of an archive's beginning, a tensor, the last byte
            damaged = bytearray(whole)
            damaged[position] ^= 1
            data.write_bytes(damaged)
            row = ask("checkpoints", newer, "--verify", code=1)["checkpoints"][0]
            assert row["verified"] is False
            assert len(row["damage"]) == 1
            assert "__0_0.distcp" in row["damage"][0]
        data.write_bytes(whole)
        assert ask("checkpoints", newer, "--verify")["checkpoints"][0]["verified"]

    def test_damaged_neighbours_are_one_range(self, run_folder: Path, ask: Ask) -> None:
        data = run_folder / "step-0000001000" / "__0_0.distcp"
        with open(data, "r+b") as file:
            file.seek(2**18 + 5)
            file.write(bytes([9]) * 2**18)
        row = ask("checkpoints", run_folder / "step-0000001000", "--verify", code=1)["checkpoints"][0]
        assert row["damage"] == [f"bytes {2**18} to {3 * 2**18} of {data}"]

    def test_blocks_that_do_not_divide_parts(self, tmp_path: Path, ask: Ask) -> None:
        """20 MB in blocks of 99,991 bytes: every part has blocks that reach over its ends."""
        safetensors.torch.save_file({"a": torch.arange(5_000_000.0)}, tmp_path / "m.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path, block_bytes=99_991)
        assert ask("checkpoints", tmp_path, "--verify")["checkpoints"][0]["verified"]
        with open(tmp_path / "m.safetensors", "r+b") as file:
            file.seek(8 * 2**20 - 1)
            file.write(b"\1\1")
        row = ask("checkpoints", tmp_path, "--verify", code=1)["checkpoints"][0]
        start = 8 * 2**20 // 99_991 * 99_991
        assert row["damage"] == [f"bytes {start} to {start + 99_991} of {tmp_path / 'm.safetensors'}"]

    def test_without_a_manifest_nothing_is_verified(self, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["checkpoints", str(run_folder), "--verify"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert "`loaderkit manifest " in lines[1]
        assert lines[2].endswith("whole, dcp, every block as in its manifest")

    def test_what_is_being_written_is_no_failure(self, run_folder: Path, ask: Ask) -> None:
        loaderkit.checkpoint.write_manifest(run_folder / "step-0000000200")
        save_dcp({"weight": torch.ones(5)}, run_folder / "step-3000")
        (run_folder / "step-3000" / ".metadata").unlink()
        assert [row["verified"] for row in ask("checkpoints", run_folder, "--verify")["checkpoints"]] == [
            True,
            True,
            False,
        ]

    def test_a_committed_one_that_is_cut_short_is(self, run_folder: Path, ask: Ask) -> None:
        loaderkit.checkpoint.write_manifest(run_folder / "step-0000000200")
        os.truncate(run_folder / "step-0000000200" / "__0_0.distcp", 5000)
        ask("checkpoints", run_folder, "--verify", code=1)


def test_a_line_of_progress_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([1.0, 6.0, 8.0, 12.0])
    with byte_progress(lambda: ByteProgress(3_000_000, 9_000_000, next(times), "step-7")) as show:
        for _ in range(4):
            show()
    assert capsys.readouterr().err.splitlines() == [
        "3.00 MB of 9.00 MB, 500.00 kB/s, 12 s left, step-7",
        "3.00 MB of 9.00 MB, 250.00 kB/s, 24 s left, step-7",
    ]


class TestCopy:
    def test_all_whole_ones_are_copied(self, run_folder: Path, tmp_path: Path, ask: Ask) -> None:
        save_dcp({"weight": torch.ones(5)}, run_folder / "step-3000")
        (run_folder / "step-3000" / ".metadata").unlink()
        found = ask("checkpoints", run_folder, "--copy", tmp_path / "far")
        assert [(row["name"], row["status"], row["num_files"]) for row in found["checkpoints"]] == [
            ("step-0000000200", "copied", 2),
            ("step-0000001000", "copied", 2),
        ]
        rows = ask("checkpoints", tmp_path / "far", "--verify")["checkpoints"]
        assert [(row["step"], row["verified"]) for row in rows] == [(200, True), (1000, True)]
        again = ask("checkpoints", run_folder / "step-0000001000", "--copy", tmp_path / "far")
        assert [row["status"] for row in again["checkpoints"]] == ["was there"]

    def test_one_that_fails_does_not_stop_the_others(
        self, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_dcp({"other": torch.ones(5)}, tmp_path / "far" / "step-0000000200")
        loaderkit.checkpoint.write_manifest(tmp_path / "far" / "step-0000000200")
        assert main(["checkpoints", str(run_folder), "--copy", str(tmp_path / "far")]) == 1
        captured = capsys.readouterr()
        assert captured.out == f"{tmp_path}/far/step-0000001000: copied, 2 files, 1.20 MB\n"
        assert captured.err.startswith("error: ")
        assert "another checkpoint of this name" in captured.err

    def test_nothing_whole(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "notes.txt").write_text("no checkpoint")
        assert main(["checkpoints", str(tmp_path), "--copy", str(tmp_path / "far")]) == 1
        assert "no whole checkpoint" in capsys.readouterr().err


class TestPrune:
    @pytest.fixture
    def dead(self, run_folder: Path) -> Path:
        """What a save has left that died two days ago."""
        folder = run_folder / "step-0000002000"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")
        then_s = time.time() - 2 * 86400
        os.utime(folder / "__0_0.distcp", (then_s, then_s))
        return folder

    def test_it_is_shown_and_asked_for(self, run_folder: Path, dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["checkpoints", str(run_folder), "--prune"]) == 0  # stdin is no terminal here
        captured = capsys.readouterr()
        assert captured.out.splitlines() == [
            f"{dead.name}  1 files, 4 bytes: it is no checkpoint, and nothing in it was written for 2 d",
            "nothing was removed",
        ]
        assert "--yes removes" in captured.err
        assert dead.exists()

    def test_yes_removes_it_and_nothing_else(self, run_folder: Path, dead: Path, ask: Ask) -> None:
        found = ask("checkpoints", run_folder, "--prune")
        assert [row["name"] for row in found["debris"]] == [dead.name]
        assert found["removed"] is False
        assert ask("checkpoints", run_folder, "--prune", "--yes", "--idle", "3d")["debris"] == []
        assert ask("checkpoints", run_folder, "--prune", "--yes")["removed"] is True
        assert sorted(path.name for path in run_folder.iterdir()) == ["step-0000000200", "step-0000001000"]
        assert ask("checkpoints", run_folder, "--prune", "--yes") == {
            "url": str(run_folder),
            "debris": [],
            "removed": False,
        }


class TestTwoDirectories:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> Path:
        """Step 1 in both, step 2 in the local one, which does not get far; beside it what a dead save has left."""
        path = tmp_path / "checkpoint.yaml"
        path.write_text("to: far\nlocal: near\n")
        with loaderkit.CheckpointManager(path) as checkpoints:
            checkpoints.save(1, {"x": torch.ones(1000)})
        with loaderkit.CheckpointManager(tmp_path / "near") as checkpoints:
            checkpoints.save(2, {"x": torch.ones(1000)})
        return path

    def test_both_are_listed(self, settings: Path, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
        found = ask("checkpoints", settings, "--verify")
        assert [(row["step"], row["tier"], row["verified"]) for row in found["checkpoints"]] == [
            (1, "local", True),
            (1, "to", True),
            (2, "local", True),
        ]
        assert found["newest"] == "step-0000000002"
        assert main(["checkpoints", str(settings)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["name", "step", "age", "size", "tier"]
        assert [line.split()[6] for line in lines[1:]] == ["local", "to", "local"]

    def test_each_step_is_copied_once(self, settings: Path, tmp_path: Path, ask: Ask) -> None:
        found = ask("checkpoints", settings, "--copy", tmp_path / "copies")
        assert [(row["name"], row["status"]) for row in found["checkpoints"]] == [
            ("step-0000000001", "copied"),
            ("step-0000000002", "copied"),
        ]

    def test_both_are_pruned(self, settings: Path, tmp_path: Path, ask: Ask) -> None:
        then_s = time.time() - 2 * 86400
        for folder in ("near", "far"):
            half = tmp_path / folder / "step-0000000003" / "__0_0.distcp"
            half.parent.mkdir()
            half.write_bytes(b"half")
            os.utime(half, (then_s, then_s))
        assert len(ask("checkpoints", settings, "--prune", "--yes")["debris"]) == 2
        assert not list(tmp_path.glob("*/step-0000000003"))

    def test_one_that_is_not_there_yet(self, settings: Path, tmp_path: Path, ask: Ask) -> None:
        shutil.rmtree(tmp_path / "far")
        assert [row["tier"] for row in ask("checkpoints", settings)["checkpoints"]] == ["local", "local"]
        assert ask("checkpoints", settings, "--prune")["debris"] == []
        shutil.rmtree(tmp_path / "near")
        assert main(["checkpoints", str(settings)]) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--verify", "--prune"], "one of --verify, --copy, --prune and --advise"),
        (["--prune", "--idle", "soon"], "a duration"),
    ],
)
def test_wrong_use_is_2(options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err
