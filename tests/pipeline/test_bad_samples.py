"""Samples of a quarantine file tried again: as they were, one by one, and nothing else."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import random_failures
from waiting import join_threads

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError
from loaderkit.pipeline.delivery.bad_samples import Quarantined, indices_of, read_quarantine

STAGES = ["read", "decode", {"random_resized_crop": {"size": 16}}, {"batch": {"size": 8}}]


@pytest.fixture
def folder(photos: Path, tmp_path: Path) -> Path:
    """Photographs of which three are damaged, each in a way of its own."""
    found = tmp_path / "data"
    shutil.copytree(photos, found)
    (found / "ant" / "000.jpg").write_bytes(b"no picture")
    whole = (found / "bee" / "001.jpg").read_bytes()
    (found / "bee" / "001.jpg").write_bytes(whole[: len(whole) // 2])
    (found / "cat" / "002.jpg").write_bytes(b"")
    return found


def quarantined(folder: Path, quarantine: Path, url: str | None = None) -> Path:
    """A pipeline's file, after an epoch that wrote down what is bad."""
    path = folder.parent / "pipeline.yaml"
    description = {
        "source": {"kind": "tar" if url else "files", "url": url or str(folder)},
        "stages": STAGES,
        "errors": {"on_bad_sample": "skip", "quarantine": str(quarantine)},
        "order": {"epochs": 2},
    }
    path.write_text(json.dumps(description))
    with loaderkit.build(path) as loader:
        for _ in range(2):
            list(loader)
    return path


def again(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any]]:
    code = main(["run", *map(str, arguments), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_what_is_still_bad_is_reproduced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quarantine = folder.parent / "bad.jsonl"
    pipeline = quarantined(folder, quarantine)
    lines = [json.loads(line) for line in quarantine.read_text().splitlines()]
    code, found = again(capsys, pipeline, "--only-quarantined", quarantine)
    assert code == 1
    assert sorted((one["key"], one["epoch"], one["error"]) for one in found["bad"]) == sorted(
        (line["key"], line["epoch"], line["error"]) for line in lines
    )
    assert len(found["bad"]) == 6
    assert found["good"] == found["gone"] == []
    assert [json.loads(line) for line in quarantine.read_text().splitlines()] == lines, "nothing is written down again"


def test_what_was_mended_is_good_and_what_was_removed_is_gone(folder: Path, photos: Path, capsys: Any) -> None:
    quarantine = folder.parent / "bad.jsonl"
    pipeline = quarantined(folder, quarantine)
    shutil.copy(photos / "ant" / "000.jpg", folder / "ant" / "000.jpg")
    (folder / "bee" / "001.jpg").unlink()
    code, found = again(capsys, pipeline, "--only-quarantined", quarantine)
    assert code == 1
    assert {state: {one["key"] for one in found[state]} for state in ("bad", "good", "gone")} == {
        "bad": {"cat/002.jpg"},
        "good": {"ant/000.jpg"},
        "gone": {"bee/001.jpg"},
    }
    (folder / "cat" / "002.jpg").unlink()
    assert main(["run", str(pipeline), "--only-quarantined", str(quarantine)]) == 0
    said = capsys.readouterr().out
    assert "good  ant/000.jpg (epoch 0)" in said
    assert "gone  cat/002.jpg" in said
    assert said.endswith("0 bad, 2 good, 4 gone\n")


def test_the_same_augmentation_as_in_its_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that fails for some draws only fails for these again."""
    quarantine = tmp_path / "bad.jsonl"
    pipeline = Pipeline.dataset(list(range(40)), fields=["x"]).read().call("random_failures:unlucky").batch(4)
    pipeline = pipeline.errors(on_bad_sample="skip", quarantine=str(quarantine)).epochs(4)
    with loaderkit.build(pipeline) as loader:
        for _ in range(4):
            list(loader)
    lines = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert len({line["epoch"] for line in lines}) > 1
    (tmp_path / "pipeline.yaml").write_text(
        Pipeline.dataset("random_failures:numbers", fields=["x"])
        .read()
        .call("random_failures:unlucky")
        .batch(4)
        .to_yaml()
    )
    code, found = again(capsys, tmp_path / "pipeline.yaml", "--only-quarantined", quarantine)
    assert code == 1
    assert [(one["key"], one["epoch"], one["error"]) for one in found["bad"]] == [
        (line["key"], line["epoch"], line["error"]) for line in lines
    ]
    assert found["good"] == []


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"key": "a"}', "\x00", "3", "[" * 100_000])
def test_a_file_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"key": "a", "source": "b", "epoch": 0, "position": 3, "stage": "read", "error": "c"}\n\n' + text)
    with pytest.raises(ConfigError, match="line 3"):
        read_quarantine(path)


def test_it_goes_with_no_option_of_the_loop(folder: Path) -> None:
    quarantine = folder.parent / "bad.jsonl"
    pipeline = quarantined(folder, quarantine)
    assert main(["run", str(pipeline), "--only-quarantined", str(quarantine), "--batches", "3"]) == 2
    assert main(["run", str(pipeline), "--only-quarantined", str(folder / "none.jsonl")]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": ["a"]},
        {"key": 7},
        {"source": None},
        {"epoch": "0"},
        {"epoch": -1},
        {"epoch": 1.5},
        {"epoch": True},
        {"epoch": 10**30},
        {"position": -3},
        {"position": {}},
    ],
)
def test_a_line_with_a_value_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"key": "a", "source": "b", "epoch": 0, "position": 3, **wrong}))
    with pytest.raises(ConfigError, match=f"line 1: .*{next(iter(wrong))}"):
        read_quarantine(path)


class Shards:
    """The same two keys in every archive."""

    classes = None

    def __init__(self, *names: str) -> None:
        self._names = names

    def __len__(self) -> int:
        return 2 * len(self._names)

    def key(self, index: int) -> str:
        return "ab"[index % 2]

    def keys(self, indices: Any) -> list[str]:
        return list(map(self.key, indices.tolist()))

    def origin(self, index: int) -> str:
        return self._names[index // 2]


def places(source: Any, *lines: tuple[str, str]) -> list[int | None]:
    quarantined = [Quarantined(key, origin, 0, number) for number, (key, origin) in enumerate(lines)]
    found = indices_of(source, quarantined)
    return [found.get(line) for line in quarantined]


def test_keys_that_repeat_are_told_apart_by_their_archive() -> None:
    """One name may be the end of another one, or of its path."""
    source = Shards("01.tar", "1.tar", "a/1.tar")
    lines = [("a", f"/data/{name}") for name in ("01.tar", "1.tar", "a/1.tar")]
    assert places(source, *lines) == [0, 2, 4]
    assert places(source, *reversed(lines)) == [4, 2, 0]


def test_samples_of_another_data_set_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers are keys of every array and every data set."""
    source = Shards("01.tar")
    assert places(source, ("b", "/data/01.tar")) == [1]
    assert caplog.text == ""
    assert places(source, ("b", "/data/moved.tar"), ("c", "/data/01.tar")) == [1, None]
    assert "1 of the samples was in another place: /data/moved.tar" in caplog.text


def test_what_hangs_leaves_no_thread_behind_that_does_not(tmp_path: Path, capsys: Any) -> None:
    """A sample is bad since its `call` took too long; its thread ends with the function, the one after it at once."""
    pipeline = {
        "source": {"kind": "dataset", "object": "random_failures:numbers", "fields": ["x"]},
        "stages": [
            "read",
            {"call": {"function": "random_failures:hang_once", "timeout": "500ms", "thread_safe": True}},
            {"batch": {"size": 4}},
        ],
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(pipeline))
    lines = [{"key": key, "source": "random_failures:numbers", "epoch": 0, "position": 0} for key in ("3", "4")]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, found = again(capsys, tmp_path / "pipeline.yaml", "--only-quarantined", tmp_path / "bad.jsonl")
    assert code == 1
    assert [one["key"] for one in found["bad"]] == ["3"]
    assert "did not return within 0.5s" in found["bad"][0]["error"]
    assert [one["key"] for one in found["good"]] == ["4"]
    join_threads("-limited")


def test_what_follows_a_call_that_hangs_is_untried_not_bad(
    tmp_path: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs, follows = (str(number) for number in sorted(rng.sample(range(10, 40), 2)))
    lines = [
        {"key": key, "source": "numbers", "stage": "call", "error": "", "epoch": 0, "position": int(key)}
        for key in (hangs, follows)
    ]
    quarantine = tmp_path / "bad.jsonl"
    quarantine.write_text("\n".join(map(json.dumps, lines)))
    made = Pipeline.dataset("random_failures:tensors", fields=["x"]).read()
    (tmp_path / "pipeline.yaml").write_text(
        made.call("random_failures:held", args={"key": hangs}, timeout="200ms").batch(4).to_yaml()
    )
    random_failures.IS_FREE.clear()
    try:
        code, found = again(capsys, tmp_path / "pipeline.yaml", "--only-quarantined", quarantine)
        assert code == 1
        assert {state: [one["key"] for one in found[state]] for state in ("bad", "good", "untried")} == {
            "bad": [hangs],
            "good": [],
            "untried": [follows],
        }
    finally:
        random_failures.IS_FREE.set()
        join_threads("-limited-")
