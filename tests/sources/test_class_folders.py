"""Class folders: which folder is the class, and what shifts the numbers of classes without an error elsewhere."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import SourceError
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.sources.files.source import FilesArgs, FilesSource


def source_of(keys: list[str], **args: Any) -> FilesSource:
    described = {"url": "memory://", "include": "**/*.txt", **args}
    return FilesSource(MemoryConnector(dict.fromkeys(keys, b"x")), FilesArgs.model_validate(described))


def labels_of(source: FilesSource) -> dict[str, int]:
    return {source.key(index): source.constants(index)["label"] for index in range(len(source))}


def written(root: Path, *keys: str) -> Path:
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"x")
    return root


def warned(root: Path, **args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = Pipeline.files(str(root), include="**/*.txt", **({"label": "parent"} | args)).read().batch(1)
        compile_pipeline(made.config, rank=0, world_size=1).close()
    return [str(one.message) for one in caught]


def test_top_is_the_first_folder_as_imagefolder_has_it(rng: random.Random) -> None:
    names = [f"class {n}" for n in range(6)]
    keys = [f"{rng.choice(names)}/day{rng.randrange(3)}/{n}.txt" for n in range(40)]
    source = source_of(keys, label="top")
    tops = sorted({key.partition("/")[0] for key in keys})
    assert source.classes == tops
    assert labels_of(source) == {key: tops.index(key.partition("/")[0]) for key in keys}


def test_one_folder_name_under_several_parents_is_no_silent_class() -> None:
    keys = ["cat/day1/1.txt", "cat/day2/1.txt", "dog/day1/1.txt"]
    with pytest.raises(SourceError, match=r"'cat/day1' and 'dog/day1'.*`label: top`"):
        source_of(keys, label="parent")
    meant = source_of(keys, label="parent", classes=["day1", "day2"])
    assert labels_of(meant) == {"cat/day1/1.txt": 0, "cat/day2/1.txt": 1, "dog/day1/1.txt": 0}
    nested = source_of(["a/x/1.txt", "b/y/1.txt", "b/y/2.txt"], label="parent")
    assert nested.classes == ["x", "y"]


def test_what_a_nas_leaves_behind_is_no_class_and_no_sample() -> None:
    thumbnails = ["cat/@eaDir/1.txt/SYNO.txt", "@eaDir/a/b.txt", "#recycle/dog/2.txt", "__MACOSX/cat/3.txt"]
    source = source_of(["cat/1.txt", "dog/1.txt", *thumbnails], label="parent")
    assert source.classes == ["cat", "dog"]
    assert len(source) == 2
    assert source.num_of_systems == len(thumbnails)
    assert source.left_out.total() == 0
    assert len(source_of(thumbnails, include="**/@eaDir/**/*.txt")) == 2


def test_numbers_that_a_sibling_set_has_otherwise_are_warned_about(tmp_path: Path, rng: random.Random) -> None:
    names = sorted(f"class{n:02}" for n in rng.sample(range(99), 6))
    missing = names[rng.randrange(5)]
    written(tmp_path, *(f"train/{name}/1.txt" for name in names))
    written(tmp_path, *(f"val/{name}/1.txt" for name in names if name != missing))
    (tmp_path / "val" / missing).mkdir()
    for here, there in (("train", "here"), ("val", "there")):
        (said,) = warned(tmp_path / here)
        assert f"only {there}: {missing}" in said
        assert "give both the same `classes`" in said
        assert not warned(tmp_path / here, classes=names)
    (tmp_path / "val" / missing / "1.txt").write_bytes(b"x")
    assert not warned(tmp_path / "train")


def test_check_says_what_is_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = normalize("NFC", "é")
    written(tmp_path / "set", "10/1.txt", "2/1.txt", "1/1.txt", "@eaDir/10/1.txt")
    (tmp_path / "set" / "3").mkdir()
    names = {"set": "are numbers that are sorted as text", "other": "have one name"}
    written(tmp_path / "other", f"{composed}/1.txt", f"{normalize('NFD', composed)}/1.txt")
    monkeypatch.chdir(tmp_path)
    for name, said in names.items():
        source = {"kind": "files", "url": name, "include": "**/*.txt", "label": "parent"}
        (tmp_path / "p.yaml").write_text(json.dumps({"source": source, "stages": ["read", {"batch": {"size": 1}}]}))
        assert main(["check", "p.yaml"]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
    assert main(["check", "p.yaml", "--set", "source.url=set"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "these folders have no sample, and are no classes: 3" in out
    assert "1 files in folders that a NAS" in out
