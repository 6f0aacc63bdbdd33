"""However often it is cut off, and by whomever it is made, what is there in the end is the same, byte by byte."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HELPERS, ROOT
from packed_shards import files_in, packed

import loaderkit
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError, LoaderkitError, ObjectNotFoundError, SourceError, WorkerDiedError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.shards import state
from loaderkit.shards.planning import Options, ShardPlan, plan_shards
from loaderkit.shards.run import PackProgress, PackResult, Workers, pack_shards


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


@pytest.mark.matrix(1)
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


@pytest.mark.prove
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
    (tmp_path / "link").symlink_to(photos)
    with pytest.raises(ConfigError, match="where the source's samples are"):
        packed(described(photos), tmp_path / "link" / "packed")


def test_another_text_of_a_function_is_another_setting(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    pipeline = described(photos, {"call": {"function": "mine_of_a_kind:mark"}})
    for mark in ("1", "22"):
        (tmp_path / "mine_of_a_kind.py").write_text(f"def mark(sample):\n    sample['mark'] = {mark}\n")
        monkeypatch.delitem(sys.modules, "mine_of_a_kind", raising=False)
        if mark == "1":
            packed(pipeline, tmp_path / "out")
            assert packed(pipeline, tmp_path / "out").was_whole
    with pytest.raises(ConfigError, match=r"code of call was .*remove what is there, \.loaderkit-shards/ too"):
        packed(pipeline, tmp_path / "out")


@pytest.mark.prove
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


@contextmanager
def planned(pipeline: Any, out: Path, **options: Any) -> Iterator[ShardPlan]:
    plan = plan_shards(to_config(pipeline), Options(str(out), **options))
    with closing(plan.job.plan):
        yield plan


def packed_with(pipeline: Any, out: Path, at: int, do: Callable[[], Any], **options: Any) -> PackResult:
    """Pack; `do` is called once, when `at` shards are there."""
    calls: list[Any] = []

    def watch(progress: PackProgress) -> None:
        if progress.num_shards == at and not calls:
            calls.append(do())

    with planned(pipeline, out, **options) as plan:
        return pack_shards(plan, Workers(1), watch)


class TestTwoAtOnce:
    """The one that began last goes on, and the other one stops."""

    def test_other_settings_at_a_place_that_both_have_seen_empty(self, tmp_path: Path, photos: Path) -> None:
        out, other = tmp_path / "out", described(photos, order={"seed": 4})

        def begin() -> None:
            with planned(other, out, shard_bytes=30_000) as plan:
                state.begin(FileConnector(out), plan.job, plan.fingerprint)

        with pytest.raises(LoaderkitError, match=r"another `loaderkit pack` is at work in .*out"):
            packed_with(described(photos), out, 0, begin, shard_bytes=20_000)
        assert not list(out.glob("shard-*"))
        assert packed(other, out, shard_bytes=30_000).num_found == 0
        packed(other, tmp_path / "again", shard_bytes=30_000)
        assert files_in(out) == files_in(tmp_path / "again")

    def test_the_same_settings(self, tmp_path: Path, photos: Path, rng: random.Random) -> None:
        out, pipeline = tmp_path / "out", described(photos)
        with pytest.raises(LoaderkitError, match="another `loaderkit pack` has finished there"):
            packed_with(
                pipeline, out, rng.randrange(3), lambda: packed(pipeline, out, shard_bytes=20_000), shard_bytes=20_000
            )
        packed(pipeline, tmp_path / "again", shard_bytes=20_000)
        assert files_in(out) == files_in(tmp_path / "again")

    def test_a_file_that_the_other_one_has_removed(
        self, tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It clears away what it takes for the rest of a run that died: the error says so."""
        out = tmp_path / "out"

        def overtaken(*arguments: Any) -> None:
            with planned(described(photos), out) as plan:
                state.own(FileConnector(out), plan.job, plan.fingerprint)
            raise ObjectNotFoundError("there is no file")

        monkeypatch.setattr("loaderkit.shards.job.write_parts", overtaken)
        with pytest.raises(LoaderkitError, match="another `loaderkit pack` is at work"):
            packed(described(photos), out)

    def test_one_that_was_overtaken_writes_no_manifest(self, tmp_path: Path, photos: Path) -> None:
        out = tmp_path / "out"
        with planned(described(photos), out) as plan:
            job = state.begin(FileConnector(out), plan.job, plan.fingerprint)
            state.own(FileConnector(out), plan.job, plan.fingerprint)
            with pytest.raises(LoaderkitError, match="another `loaderkit pack` is at work"):
                state.finish(FileConnector(out), {"shards": []}, job)
        assert not (out / "loaderkit-shards.json").exists()

    def test_a_shard_of_neither_is_not_left_among_the_others(self, tmp_path: Path, photos: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(LoaderkitError, match=r"shard-000099\.tar.* is none of these shards"):
            packed_with(described(photos), out, 0, lambda: (out / "shard-000099.tar").write_bytes(b"x"))
        assert not (out / "loaderkit-shards.json").exists()


def test_what_is_left_of_other_shards_is_not_taken_for_these(tmp_path: Path, photos: Path) -> None:
    """Of a run that was killed while it removed its records, and whose results were then removed by hand."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    array = described(photos) | ARRAY
    options: dict[str, Any] = {"format": "array", "shard_bytes": 40_000}
    packed_with(array, out, 3, lambda: shutil.copytree(out / ".loaderkit-shards", kept), **options)
    shutil.rmtree(out)
    shutil.copytree(kept, out / ".loaderkit-shards")
    assert len(list((out / ".loaderkit-shards").glob("part-*.bin"))) >= 3
    (out / ".loaderkit-shards" / "plan.json").unlink()
    other = array | {"order": {"seed": 9}}
    assert packed(other, out, **options).num_found == 0
    packed(other, tmp_path / "again", **options)
    assert files_in(out) == files_in(tmp_path / "again")


class TestLostWhenAllWereThere:
    @pytest.mark.parametrize("how", ["removed", "cut", "index"])
    def test_a_shard_is_made_again(self, tmp_path: Path, photos: Path, rng: random.Random, how: str) -> None:
        out, pipeline = tmp_path / "out", described(photos)
        result = packed(pipeline, out, shard_bytes=20_000)
        before = files_in(out)
        lost = rng.choice(sorted(out.glob("shard-*.tar")))
        if how == "cut":
            lost.write_bytes(lost.read_bytes()[:-512])
        else:
            (lost if how == "removed" else lost.with_suffix(".idx")).unlink()
        if how != "index":
            with pytest.raises(SourceError, match=rf"{lost.name}.* (is not there|has \d+ bytes).*pack` again"):
                loaderkit.build(result.pipeline.to_dict())
        again = packed(pipeline, out, shard_bytes=20_000)
        assert (again.was_whole, again.num_found) == (False, len(result.manifest["shards"]) - 1)
        assert files_in(out) == before

    def test_an_array_is_made_again(self, tmp_path: Path, photos: Path, rng: random.Random) -> None:
        out, pipeline = tmp_path / "out", described(photos) | ARRAY
        packed(pipeline, out, format="array")
        before = files_in(out)
        if rng.random() < 0.5:
            (out / "image.npy").unlink()
        else:
            np.save(out / "image.npy", np.zeros(3))
        assert not packed(pipeline, out, format="array").was_whole
        assert files_in(out) == before

    def test_one_that_would_be_another_is_an_error(self, tmp_path: Path, photos: Path) -> None:
        """A picture has changed, and has the size that it had."""
        mine = tmp_path / "photos"
        shutil.copytree(photos, mine)
        out, pipeline = tmp_path / "out", described(mine, order={"shuffle": "none"})
        packed(pipeline, out, shard_bytes=20_000)
        small, large = sorted(sorted(mine.rglob("*.jpg"))[:2], key=lambda path: path.stat().st_size)
        large.write_bytes(small.read_bytes().ljust(large.stat().st_size, b"\0"))
        (out / "shard-000000.tar").unlink()
        with pytest.raises(SourceError, match="differs from what the manifest has"):
            packed(pipeline, out, shard_bytes=20_000)
        assert not (out / "shard-000000.tar").exists()
