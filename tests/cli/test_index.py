"""`loaderkit index`: what it writes, and what `check` says of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaderkit.cli import main
from loaderkit.sources.formats.tar_index import parse_wds_index

SCRIPT = Path(sys.executable).parent / "loaderkit"

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def tars(shards: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(shards, tmp_path / "tars")
    return [str(path) for path in sorted((tmp_path / "tars").glob("*.tar"))]


def test_index_then_check(tars: list[str], ask: Callable[..., Any]) -> None:
    found = ask("index", *tars)
    assert (found["num_samples"], found["num_failed"]) == (60, 0)
    assert [row["num_members"] for row in found["shards"]] == [40, 40, 40]
    for tar, row in zip(tars, found["shards"], strict=True):
        assert row["index"] == tar.replace(".tar", ".idx")
        index = parse_wds_index(Path(row["index"]).read_text(), tar)
        assert index is not None
        with tarfile.open(tar) as opened:
            expected = [(member.name, member.offset_data, member.size) for member in opened]
        assert list(index) == expected
    assert [row["status"] for row in ask("index", "--check", *tars)["shards"]] == ["ok"] * 3
    assert sorted(path.suffix for path in Path("tars").iterdir()) == [".idx"] * 3 + [".tar"] * 3


@pytest.mark.parametrize("name", ["tars", "tars/", "file://{}/tars", "file://{}/tars/"])
def test_a_folder_means_its_shards(tars: list[str], ask: Callable[..., Any], name: str) -> None:
    found = ask("index", name.format(Path.cwd()))
    assert [Path(row["shard"]).absolute() for row in found["shards"]] == list(map(Path, tars))
    assert found["num_samples"] == 60


def test_a_folder_without_shards(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["index", "empty"]) == 1
    assert capsys.readouterr().err == "error: empty/*.tar: there is nothing that is called so\n"


def test_missing_and_stale_ones_fail_the_check(tars: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", *tars[:2]]) == 0
    shutil.copy(tars[2], tars[1])  # other members now
    capsys.readouterr()
    assert main(["index", "--check", *tars, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in found["shards"]] == ["ok", "stale", "missing"]
    assert main(["index", "--check", *tars]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert [line.split(": ")[1] for line in captured.err.splitlines()] == tars[1:]
    assert not Path(tars[2]).with_suffix(".idx").exists()


def test_a_damaged_shard_is_named_and_the_others_are_done(tars: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(tars[1]).read_bytes()
    Path(tars[1]).write_bytes(data[: len(data) // 2])
    assert main(["index", *tars]) == 1
    captured = capsys.readouterr()
    assert [Path(line.partition(":")[0]).name for line in captured.out.splitlines()] == [
        "shard-000.idx",
        "shard-002.idx",
    ]
    assert captured.err.startswith("error: ")
    assert "shard-001.tar" in captured.err
    assert not Path(tars[1]).with_suffix(".idx").exists()


def test_shards_whose_names_end_alike_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "train-1.5.tar", "train-1.6.tar"]) == 2
    assert "would both have the index" in capsys.readouterr().err


def test_warnings_are_one_line(tars: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(tars[0]).read_bytes()
    Path(tars[0]).write_bytes(data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512))  # no end mark
    done = subprocess.run([SCRIPT, "index", tars[0]], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("warning: ")
    assert done.stderr.count("\n") == 1
