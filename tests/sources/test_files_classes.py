"""`classes` of a folder: numbers that stay, whatever folders there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import SourceError, StateError
from loaderkit.sources.files.source import FilesArgs


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """train has the classes cat, dog, emu; val lacks dog and has no other."""
    for part, folders in (("train", ("cat", "dog", "emu")), ("val", ("cat", "emu"))):
        for folder in folders:
            (tmp_path / part / folder).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (8, 8)).save(tmp_path / part / folder / f"{number}.png")
    return tmp_path


def pipeline(folder: Path, **args: Any) -> Pipeline:
    return Pipeline.files(str(folder), label="parent", **args).shuffle(False).epochs(1).read().decode().batch(6)


def labels(folder: Path, **args: Any) -> dict[str, int]:
    with loaderkit.build(pipeline(folder, **args)) as loader:
        (batch,) = loader
    return {key.partition("/")[0]: label for key, label in zip(batch["__key__"], batch["label"].tolist(), strict=True)}


@pytest.mark.filterwarnings("ignore:the class")
def test_a_validation_set_has_the_numbers_of_the_training_set(photos: Path) -> None:
    assert labels(photos / "train") == {"cat": 0, "dog": 1, "emu": 2}
    assert labels(photos / "val") == {"cat": 0, "emu": 1}
    with loaderkit.build(pipeline(photos / "train")) as loader:
        classes = loader.classes
    assert classes == ["cat", "dog", "emu"]
    assert labels(photos / "val", classes=classes) == {"cat": 0, "emu": 2}
    with loaderkit.build(pipeline(photos / "val", classes=classes)) as loader:
        assert loader.classes == classes


@pytest.mark.parametrize(
    ("classes", "numbers", "names"),
    [
        (["emu", "dog", "cat"], {"cat": 2, "dog": 1, "emu": 0}, ["emu", "dog", "cat"]),
        ({"cat": 1, "dog": 4, "emu": 2}, {"cat": 1, "dog": 4, "emu": 2}, ["", "cat", "emu", "", "dog"]),
        ({"cat": 0, "dog": 0, "emu": 1}, {"cat": 0, "dog": 0, "emu": 1}, ["cat/dog", "emu"]),
    ],
)
def test_names_in_order_or_numbers(photos: Path, classes: Any, numbers: dict[str, int], names: list[str]) -> None:
    made = photos / "pipeline.yaml"
    made.write_text(
        f"source: {{kind: files, url: train, label: parent, classes: {json.dumps(classes)}}}\n"
        "order: {shuffle: none}\nstages: [read, decode, batch: {size: 6}]\n"
    )
    assert labels(photos / "train", classes=classes) == numbers
    with loaderkit.build(made) as loader:
        assert loader.classes == names
        assert loaderkit.build(Pipeline.from_yaml(made)).classes == names
        assert next(iter(loader))["label"].tolist() == [
            numbers[name] for name in ("cat", "cat", "dog", "dog", "emu", "emu")
        ]


def test_a_folder_that_is_no_class_is_an_error_naming_both(photos: Path) -> None:
    with pytest.raises(SourceError, match=r"train/dog/0\.png lies in the folder 'dog'.*`classes` \(cat, emu\).*add it"):
        labels(photos / "train", classes=["cat", "emu"])
    assert labels(photos / "train", classes=["cat", "emu"], include="{cat,emu}/*") == {"cat": 0, "emu": 1}


@pytest.mark.filterwarnings("ignore:the class")
def test_a_state_of_other_classes_is_refused_and_names_both(photos: Path) -> None:
    with loaderkit.build(pipeline(photos / "train")) as loader:
        state = loader.state_dict()
    for classes in (["dog", "cat", "emu"], {"cat": 0, "dog": 1, "emu": 1}):
        with (
            loaderkit.build(pipeline(photos / "train", classes=classes)) as loader,
            pytest.raises(
                StateError, match=r"classes: the state has cat, dog, emu, this loader (dog, cat, emu|cat, dog/emu)"
            ),
        ):
            loader.load_state_dict(state)
    with loaderkit.build(pipeline(photos / "train", classes=["cat", "dog", "emu"])) as loader:
        loader.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:the class")
def test_a_state_from_before_classes_were_named_in_it_still_resumes(photos: Path) -> None:
    with loaderkit.build(pipeline(photos / "train")) as loader:
        state = loader.state_dict()
        assert "classes" in dict(state["fingerprint"])
        state["fingerprint"] = [part for part in state["fingerprint"] if part[0] != "classes"]
        loader.load_state_dict(state)


def test_many_classes_make_a_short_state(photos: Path) -> None:
    names = ["cat", "dog", "emu", *(f"class-{number}" for number in range(1000))]
    states = []
    for classes in (names, [*names[:-1], "other"]):
        with loaderkit.build(pipeline(photos / "train", classes=classes)) as loader:
            states.append(dict(loader.state_dict()["fingerprint"])["classes"])
    assert states[0] != states[1]
    assert len(states[0]) < 200
    assert "1003 in all" in states[0]


@pytest.mark.parametrize(
    "args",
    [
        {"classes": ["a", "b"]},
        {"classes": ["a", "a"], "label": "parent"},
        {"classes": [], "label": "parent"},
        {"classes": {}, "label": "parent"},
        {"classes": {"a": -1}, "label": "parent"},
        {"classes": {"a": 10**9}, "label": "parent"},
        {"classes": {"a": "0"}, "label": "parent"},
        {"classes": "a", "label": "parent"},
    ],
)
def test_wrong_classes(args: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FilesArgs.model_validate({"url": "data", **args})
