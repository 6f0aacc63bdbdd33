"""However often it is cut off, and by whomever it is made, what is there in the end is the same, byte by byte."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import HELPERS, ROOT
from packed_shards import files_in, packed

from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.errors import ConfigError, WorkerDiedError
from loaderkit.shards.run import Workers


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{HELPERS}:{ROOT}")


def described(photos: Path, *functions: Any, **sections: Any) -> dict[str, Any]:
    """A pipeline whose pictures are encoded anew, some 1.6 kB each."""
    return {
        "source": {"kind": "files", "url": str(photos), "label": "parent"},
        "order": {"seed": 3},
        "stages": [
            "read",
            "decode",
            {"resize": {"size": [40, 48]}},
            *functions,
            "random_horizontal_flip",
            {"batch": {"size": 8}},
        ],
        **sections,
    }


def calling(path: Path, at: int, name: str = "SIGKILL") -> dict[str, Any]:
    arguments = {"path": str(path), "at": at, "name": name}
    return {"call": {"function": "packed_shards:signal_at", "args": arguments}}


ARRAY = {"stages": ["read", "decode", {"resize": {"size": [40, 48]}}, {"batch": {"size": 8}}], "output": ["image"]}


@pytest.mark.parametrize("num", [4, pytest.param(40, marks=pytest.mark.prove)])
@pytest.mark.parametrize("form", ["tar", "array"])
def test_killed_anywhere_and_run_again(tmp_path: Path, photos: Path, rng: random.Random, form: str, num: int) -> None:
    """Each run dies at a call on files drawn at random, if it comes so far, and the last one gets through."""
    (tmp_path / "p.yaml").write_text(to_yaml(described(photos) | (ARRAY if form == "array" else {})))
    expected, out, seed = tmp_path / "expected", tmp_path / "out", str(rng.randrange(2**32))
    for number in range(num // 4):
        names = [f"{expected}{number}", f"{out}{number}"]
        command: list[Any] = [
            sys.executable,
            HELPERS / "pack_and_die.py",
            tmp_path / "p.yaml",
            form,
            *names,
            f"{seed}{number}",
            "4",
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["num_calls"] > 20
        assert -9 in found["codes"]
        assert found["codes"][-1] > 0
        assert files_in(Path(names[0])) == files_in(Path(names[1]))


def test_processes_write_the_same_bytes(tmp_path: Path, photos: Path) -> None:
    pipeline = described(photos)
    packed(pipeline, tmp_path / "one", shard_bytes=20_000)
    packed(pipeline, tmp_path / "two", Workers(2), shard_bytes=20_000)
    assert len(files_in(tmp_path / "one")) > 10
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


def test_a_process_that_dies_is_named_and_the_next_run_goes_on(tmp_path: Path, photos: Path) -> None:
    pipeline = described(photos, calling(tmp_path / "calls", 45))
    with pytest.raises(WorkerDiedError, match="run it again, and it goes on"):
        packed(pipeline, tmp_path / "out", Workers(2), shard_bytes=20_000)
    result = packed(pipeline, tmp_path / "out", shard_bytes=20_000)
    assert 0 < result.num_found < len(result.manifest["shards"])
    packed(pipeline, tmp_path / "again", shard_bytes=20_000)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "again")


def test_what_is_finished_is_not_made_again(tmp_path: Path, photos: Path) -> None:
    first = packed(described(photos), tmp_path / "out", shard_bytes=20_000)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = packed(described(photos, prefetch={"batches": 2}), tmp_path / "out", shard_bytes=20_000)
    assert again.was_whole
    assert not first.was_whole
    assert json.dumps(again.manifest["shards"]) == json.dumps(first.manifest["shards"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("what", ["shard", "quality", "data", "stage", "seed"])
def test_shards_of_something_else_are_refused(tmp_path: Path, photos: Path, what: str) -> None:
    packed(described(photos), tmp_path / "out")
    before = files_in(tmp_path / "out")
    other = described(photos)
    options: dict[str, Any] = {}
    if what == "data":
        other["source"]["limit"] = 50
    elif what == "stage":
        other["stages"][2]["resize"]["size"] = [40, 40]
    elif what == "seed":
        other["order"]["seed"] = 4
    else:
        options = {"shard_bytes": 10_000} if what == "shard" else {"quality": 50}
    with pytest.raises(ConfigError, match=rf"finished shards of other data or settings \(.*{what}"):
        packed(other, tmp_path / "out", **options)
    assert files_in(tmp_path / "out") == before


def test_archives_of_others_are_not_mixed_with(tmp_path: Path, photos: Path, shards: Path) -> None:
    before = files_in(shards)
    with pytest.raises(ConfigError, match=r"is not empty: there is 'shard-000\.tar'"):
        packed(described(photos), shards)
    assert files_in(shards) == before
    with pytest.raises(ConfigError, match="where the source's samples are"):
        packed(described(photos), photos / "packed")


def test_a_shard_that_was_lost_is_made_again(tmp_path: Path, photos: Path, rng: random.Random) -> None:
    """Of an unfinished run; its record alone is not believed."""
    pipeline = described(photos, calling(tmp_path / "calls", 45))
    with pytest.raises(WorkerDiedError):
        packed(pipeline, tmp_path / "out", Workers(2), shard_bytes=20_000)
    whole = sorted((tmp_path / "out").glob("shard-*.tar"))
    lost = rng.choice(whole)
    if rng.random() < 0.5:
        lost.unlink()
    else:
        lost.write_bytes(lost.read_bytes()[:-512])
    (tmp_path / "out" / ".loaderkit-shards" / "shard-000002.json").write_text("{")
    packed(pipeline, tmp_path / "out", shard_bytes=20_000)
    packed(pipeline, tmp_path / "again", shard_bytes=20_000)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "again")
