"""`labels`: labels from a table beside the files, against a plain loop over drawn tables."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from posixpath import basename, splitext
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, SourceError

FORMS = [lambda key: key, lambda key: splitext(key)[0], basename, lambda key: splitext(basename(key))[0]]
KINDS = {
    "texts": lambda rng: rng.choice(["cat", "dog", "n01", "Ärger, gro\u2028ß", 'a "b"', "-"]),
    "codes": lambda rng: rng.choice(["007", "07", "010", "7a"]),
    "whole": lambda rng: rng.randrange(-5, 5),
    "numbers": lambda rng: rng.choice([0.5, -3.25, 7, 1e-3]),
}


def write(
    file: Path, rows: list[tuple[str, Any]], rng: random.Random, columns: tuple[str, str] = ("name", "class")
) -> None:
    """The table in the format that the file's name says, with a column that is not asked for."""
    if file.suffix == ".json" and rng.random() < 0.5:
        file.write_text(json.dumps([dict(zip(("x", *columns), (0, *row), strict=True)) for row in rows]))
    elif file.suffix == ".jsonl":
        file.write_text(
            "\n".join(json.dumps({"x": [1], columns[0]: row[0], columns[1]: row[1]}) for row in rows) + "\n\n"
        )
    elif file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="", encoding=rng.choice(["utf-8", "utf-8-sig"])) as out:
            writer = csv.writer(out, delimiter="\t" if file.suffix == ".tsv" else ",")
            writer.writerows([("x", *columns), *(("0,5", *row) for row in rows)])
    else:
        file.write_text(json.dumps([{columns[0]: row[0], columns[1]: row[1]} for row in rows]))


def labelled(folder: Path, table: str, **more: Any) -> Pipeline:
    labels = {"file": table, "key": "name", "value": "class"} | more.pop("labels", {})
    return Pipeline.files(folder, include="**/*.bin", labels=labels, **more).shuffle("none").read().batch(3)


def delivered(pipeline: Pipeline) -> dict[str, Any]:
    with loaderkit.build(pipeline) as loader:
        pairs = [
            (key, value)
            for batch in loader
            for key, value in zip(batch["__key__"], batch["label"].tolist(), strict=True)
        ]
    assert pairs == sorted(pairs)
    return dict(pairs)


def make_files(folder: Path, rng: random.Random, num: int = 11) -> list[str]:
    keys = [f"{rng.choice(['a/', 'b/c/', ''])}{number}.{rng.randrange(9)}é.bin" for number in range(num)]
    for key in keys:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(b"x")
    return keys


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_a_plain_loop_has_it(suffix: str, kind: str, tmp_path: Path, rng: random.Random) -> None:
    """Whatever names the files, in whatever order, with rows and files alone or without."""
    keys, form = make_files(tmp_path, rng), rng.choice(FORMS)
    rows = [(form(key), KINDS[kind](rng)) for key in keys]
    lone = [(f"gone{n}.bin", KINDS[kind](rng)) for n in range(rng.randrange(3))]
    num_without = rng.randrange(3)
    table = [*rows[num_without:], *lone]
    rng.shuffle(table)
    write(tmp_path / f"train{suffix}", table, rng)
    pipeline = labelled(tmp_path, f"train{suffix}", labels={"unmatched": "skip"})
    names = sorted({value for _, value in table})
    expected = {
        key: names.index(value) if kind in ("texts", "codes") else value
        for key, (_, value) in zip(keys, rows, strict=True)
        if key not in keys[:num_without]
    }
    assert delivered(pipeline) == pytest.approx(expected)
    with loaderkit.build(pipeline) as loader:
        assert loader.classes == (names if kind in ("texts", "codes") else None)
        assert next(iter(loader))["label"].dtype == (torch.float64 if kind == "numbers" else torch.int64)
    if lone or num_without:
        with pytest.raises(SourceError, match=r"have no (file|row).*unmatched: skip"):
            delivered(labelled(tmp_path, f"train{suffix}"))


def test_one_object(tmp_path: Path, rng: random.Random) -> None:
    keys = make_files(tmp_path, rng)
    labels = {key: rng.randrange(3) for key in keys}
    (tmp_path / "all.json").write_text(json.dumps(labels))
    pipeline = Pipeline.files(tmp_path, include="**/*.bin", labels={"file": "all.json"}).shuffle("none").read().batch(4)
    assert delivered(pipeline) == labels


def test_given_classes_number_the_texts(tmp_path: Path, rng: random.Random) -> None:
    keys = make_files(tmp_path, rng)
    numbers = {"cat": 4, "dog": 1, "hound": 1, "never": 0}
    rows = [(key, rng.choice(["cat", "dog", "hound"])) for key in keys]
    write(tmp_path / "t.csv", rows, rng)
    pipeline = labelled(tmp_path, "t.csv", classes=numbers)
    assert delivered(pipeline) == {key: numbers[value] for key, value in rows}
    with loaderkit.build(pipeline) as loader:
        assert loader.classes == ["never", "dog/hound", "", "", "cat"]
    with pytest.raises(SourceError, match="which is none of `classes`"):
        delivered(labelled(tmp_path, "t.csv", classes=["dog", "hound"]))


def test_partners_and_limit_are_of_the_files_with_a_label(tmp_path: Path, rng: random.Random) -> None:
    numbers = [f"{n:02}" for n in range(12)]
    for number in numbers:
        (tmp_path / f"{number}.bin").write_bytes(number.encode())
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    chosen = sorted(rng.sample(numbers, 7))
    write(tmp_path / "t.csv", [(number, int(number)) for number in reversed(chosen)], rng)
    pipeline = (
        Pipeline.files(
            tmp_path,
            fields={"x": "*.bin", "text": "*.txt"},
            labels={"file": "t.csv", "key": "name", "value": "class", "unmatched": "skip"},
            limit=5,
        )
        .shuffle("none")
        .read()
        .decode()
        .batch(5)
    )
    with loaderkit.build(pipeline) as loader:
        (batch,) = loader
    assert batch["text"] == [f"text {number}" for number in chosen[:5]]
    assert batch["x"] == [number.encode() for number in chosen[:5]]
    assert batch["label"].tolist() == [int(number) for number in chosen[:5]]


def test_from_any_store_and_back_from_a_state(rng: random.Random) -> None:
    labels = {f"{n}.bin": rng.randrange(99) for n in range(20)}
    table = "name,class\n" + "".join(f"{key},{label}\n" for key, label in labels.items())
    objects = dict.fromkeys(labels, b"x")
    args = {"include": "*.bin", "labels": {"file": "t.csv", "key": "name", "value": "class"}}
    pipeline = Pipeline.files("memory://x", **args).shuffle(seed=1).read().batch(4)  # type: ignore[arg-type]
    with loaderkit.build(pipeline, connectors={"memory": MemoryConnector({**objects, "t.csv": table.encode()})}) as one:
        batches = [(batch["__key__"], batch["label"].tolist()) for batch, _ in zip(one, range(2), strict=False)]
        state = one.state_dict()
        batches += [(batch["__key__"], batch["label"].tolist()) for batch in one]
    assert {key: label for keys, found in batches for key, label in zip(keys, found, strict=True)} == labels
    changed = table.replace(f"0.bin,{labels['0.bin']}", "0.bin,100")
    with (
        loaderkit.build(
            pipeline, connectors={"memory": MemoryConnector({**objects, "t.csv": changed.encode()})}
        ) as other,
        pytest.raises(loaderkit.errors.StateError),
    ):
        other.load_state_dict(state)


BAD = {
    "an empty file": ("t.csv", b"", "has no column 'name'; it has: nothing"),
    "no rows": ("t.csv", b"name,class\n", "has no rows"),
    "another column": ("t.csv", b"id,class\n0,1\n", "has no column 'name'; it has: id, class"),
    "a column twice": ("t.csv", b"name,class,class\n0,1,2\n", "several columns 'class'"),
    "a row that is cut": ("t.csv", b"name,class\n0,1\n1\n", "row 2, has 1 values; the header has 2"),
    "an open quote": ("t.csv", b'name,class\n0,"1\n', "unexpected end of data"),
    "no text": ("t.csv", b"name,class\n\xff,1\n", "is no UTF-8 text"),
    "no label": ("t.csv", b"name,class\n0,1\n1,\n", "row 2, has no label"),
    "no name": ("t.csv", b"name,class\n,1\n", "row 1, names no file"),
    "two labels": ("t.csv", b"name,class\n0,1\n0,2\n", "two labels for '?0"),
    "no JSON": ("t.json", b'{"0": 1', "is no JSON"),
    "deep JSON": ("t.json", b"[" * 100_000, "is no JSON"),
    "a name twice": ("t.json", b'{"0": 1, "0": 2}', "'0' is there twice"),
    "no number": ("t.json", b'{"0": NaN}', "NaN is no number"),
    "a list as a label": ("t.json", b'{"0": [1]}', r"the label \[1\], which is neither"),
    "texts and numbers": ("t.json", b'{"0": 1, "1": "a"}', "neither all texts nor"),
    "too large": ("t.json", b'{"0": 1e400, "1": 2}', "neither all texts nor"),
    "mostly numbers": ("t.csv", b"name,class\n0,1\n1,nan\n2,4\n", "'nan' among labels of which most are numbers"),
    "rows that are none": ("t.jsonl", b"1\n", "row 1, is int"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_table_that_is_none(case: str, tmp_path: Path) -> None:
    name, data, message = BAD[case]
    for number in range(2):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
    (tmp_path / name).write_bytes(data)
    if case == "mostly numbers":
        (tmp_path / "2.bin").write_bytes(b"x")
    columns = {} if case not in ("rows that are none",) and name == "t.json" else {"key": "name", "value": "class"}
    with pytest.raises(SourceError, match=message):
        loaderkit.build(Pipeline.files(tmp_path, include="*.bin", labels={"file": name, **columns}).read().batch(1))


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.bin").write_bytes(b"x")
    (tmp_path / "t.csv").write_text("name,class\n1.bin,3\n")
    with pytest.raises(SourceError, match=r"by their file name, and both .*a/1\.bin and .*b/1\.bin have the same"):
        delivered(labelled(tmp_path, "t.csv"))


def test_one_label_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`labels` makes the field `label`"):
        delivered(labelled(tmp_path, "t.csv", label="parent"))
    with pytest.raises(ConfigError, match="csv"):
        delivered(labelled(tmp_path, "t.parquet"))


def test_check_tells_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from loaderkit.cli.app import main

    for number in range(5):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
    (tmp_path / "t.csv").write_text("name,class\n0,3\n1,4\n9,1\n")
    (tmp_path / "p.yaml").write_text(labelled(tmp_path, "t.csv", labels={"unmatched": "skip"}).to_yaml())
    assert main(["check", str(tmp_path / "p.yaml")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 of 5 files have no row in" in out
    assert "1 of 3 rows of" in out


def test_no_class_of_that_name(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
    (tmp_path / "t.json").write_text(json.dumps({"0": 0, "1": 1}))
    with pytest.raises(SourceError, match="the label 0, which is none of `classes`"):
        delivered(labelled(tmp_path, "t.json", labels={"key": None, "value": None}, classes=["1"]))
