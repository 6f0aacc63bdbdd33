"""`loaderkit init PLACE`: for each kind of data the pipeline that it writes passes the check, and its first batch is what
another reader finds."""

from __future__ import annotations

import io
import json
import random
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from buckets import upload
from containers import write as write_store
from doc_examples import ROOT
from hf_folders import saved
from mds_shards import write_mds
from numpy.typing import NDArray
from PIL import Image
from seaweed import Seaweed
from tar_archives import archive
from tf_records import example, record
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit.cli import main

Rng = np.random.Generator
Expected = Mapping[str, Mapping[str, Any]]
"""The key of a sample -> field -> its value."""
SIDE = 12
MEAN, STD = (np.array(values).reshape(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
RANDOM = ("random_resized_crop", "random_horizontal_flip", "random_volume_flip", "resize")

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def numbers(rng: random.Random) -> Rng:
    return np.random.default_rng(rng.getrandbits(32))


def picture(rng: Rng, kind: str = "png") -> tuple[bytes, NDArray[np.float64]]:
    """An encoded picture, and it normalised as ImageNet's are."""
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue(), (pixels.transpose(2, 0, 1) / 255 - MEAN) / STD


def put(files: Mapping[str, bytes], folder: str = "data") -> None:
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def init(place: str = "data", *options: str) -> dict[str, Any]:
    """The pipeline that is written, which another check passes as well."""
    assert main(["init", place, *options]) == 0
    assert main(["check", "pipeline.yaml"]) == 0
    found = from_yaml(Path("pipeline.yaml").read_text())
    assert isinstance(found, dict)
    return found


def names_of(pipeline: dict[str, Any]) -> list[str]:
    return [stage if isinstance(stage, str) else next(iter(stage)) for stage in pipeline["stages"]]


def first_batch(pipeline: dict[str, Any]) -> dict[str, Any]:
    """The first batch without what is random in a sample."""
    names = names_of(pipeline)
    kept = [stage for name, stage in zip(names, pipeline["stages"], strict=True) if name not in RANDOM]
    with loaderkit.build({**pipeline, "stages": kept}, overrides={"stages.transfer.device": "cpu"}) as loader:
        return dict(next(iter(loader)))


def around(array: NDArray[Any]) -> list[tuple[int, int]]:
    """What makes 96 of each side."""
    return [((96 - side) // 2, 96 - side - (96 - side) // 2) for side in array.shape]


def compare(batch: dict[str, Any], expected: Expected, least: int = 2) -> None:
    """The samples of the batch are the expected ones of their keys."""
    assert len(batch["__key__"]) >= least
    assert {*batch} - {"__key__"} == {*next(iter(expected.values()))}
    for row, key in enumerate(batch["__key__"]):
        for field, value in expected[key].items():
            found = batch[field][row]
            if isinstance(found, torch.Tensor):
                np.testing.assert_allclose(found.numpy(), value, atol=1e-5)
            else:
                assert found == value


def test_class_folders(numbers: Rng, capsys: pytest.CaptureFixture[str]) -> None:
    """Of folders that are called by splits the training split; the classes are numbered in the order of their names."""
    files, expected = {}, {}
    for split in ("train", "val"):
        for label, name in enumerate(("ant", "bee", "cow")):
            for number in range(3):
                key = f"{name}/{number}.png"
                files[f"{split}/{key}"], pixels = picture(numbers)
                if split == "train":
                    expected[key] = {"image": pixels, "label": label}
    put(files)
    pipeline = init()
    assert pipeline["source"] == {"kind": "files", "url": "data/train", "label": "parent"}
    assert names_of(pipeline)[:4] == ["read", "decode", "random_resized_crop", "random_horizontal_flip"]
    compare(first_batch(pipeline), expected)
    out = capsys.readouterr().out
    assert "data: 9 PNG files in 3 class folders" in out
    assert "there are others as well: val" in out


@pytest.mark.matrix(4)
@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "none"])
def test_a_flat_folder(form: str, numbers: Rng) -> None:
    """Labels of a table beside the folder, if there is one whose column names the files."""
    files, labels = {}, {}
    expected: dict[str, dict[str, Any]] = {}
    for number in range(8):
        key = f"photos/{number:03}.jpg.png" if form == "json" else f"photos/{number:03}.png"
        files[key], pixels = picture(numbers)
        labels[key.rpartition("/")[2]] = int(numbers.integers(0, 5))
        expected[key] = {"image": pixels, "label": labels[key.rpartition("/")[2]]}
    if form in ("csv", "tsv"):
        sign = {"csv": ",", "tsv": "\t"}[form]
        rows = [f"{name[:-4]}{sign}{label}{sign}x" for name, label in labels.items()]
        files[f"t.{form}"] = "\n".join([f"id{sign}class{sign}other", *rows, ""]).encode()
    elif form == "json":
        files["t.json"] = json.dumps(labels).encode()
    elif form == "jsonl":
        files["t.jsonl"] = "\n".join(
            json.dumps({"file": f"photos/{name}", "y": y}) for name, y in labels.items()
        ).encode()
    put({**files, "README.md": b"x", "notes.json": b"{}"})
    pipeline = init()
    if form == "none":
        assert pipeline["source"] == {"kind": "files", "url": "data/photos"}
        expected = {key.partition("/")[2]: {"image": sample["image"]} for key, sample in expected.items()}
    compare(first_batch(pipeline), expected)


def test_tar_shards(numbers: Rng) -> None:
    expected: dict[str, dict[str, Any]] = {}
    for shard in range(2):
        members: list[Any] = []
        for number in range(5):
            data, pixels = picture(numbers)
            key, label, text = f"{shard}{number}", int(numbers.integers(0, 9)), f"text {numbers.integers(0, 99)}"
            members += [(f"{key}.png", data), (f"{key}.cls", str(label).encode()), (f"{key}.txt", text.encode())]
            members.append((f"{key}.json", json.dumps({"label": label}).encode()))
            expected[key] = {"image": pixels, "label": label, "txt": text, "json": {"label": label}}
        put({f"shards/{shard}.tar": archive(members)})
    pipeline = init()
    assert pipeline["source"] == {"kind": "tar", "url": "data/shards"}
    compare(first_batch(pipeline), expected)
    assert init("data/shards/0.tar", "--force")["source"]["url"] == "data/shards/0.tar"


@pytest.mark.parametrize("form", ["bytes", "struct", "dense", "chats", "unequal", "labels"])
def test_parquet(form: str, numbers: Rng) -> None:
    rows: list[dict[str, Any]] = []
    expected: dict[str, dict[str, Any]] = {}
    for number in range(10):
        label = int(numbers.integers(0, 9))
        row: dict[str, Any] = {"label": label}
        sample: dict[str, Any] = {"label": label}
        if form in ("bytes", "struct"):
            data, sample["image"] = picture(numbers)
            row["image"] = data if form == "bytes" else {"bytes": data, "path": "x.png"}
        elif form == "dense":
            row["dense"] = sample["dense"] = numbers.random(4).tolist()
        elif form == "chats":
            row = {"messages": [{"role": "user", "content": f"{label}"}, {"role": "assistant", "content": "yes"}]}
            sample = row
        else:
            ids = numbers.integers(1, 99, 3 + number).tolist()
            row["x" if form == "unequal" else "input_ids"] = ids
            padded = ids + [0] * (9 - number)
            sample |= {"x": padded, "x_sizes": len(ids)} if form == "unequal" else {"input_ids": padded}
            if form == "labels":
                row = {"input_ids": ids, "labels": ids}
                sample = {"input_ids": padded, "labels": ids + [-100] * (9 - number)}
                sample |= {"input_ids_sizes": len(ids), "labels_sizes": len(ids)}
                sample["attention_mask"] = [1] * len(ids) + [0] * (9 - number)
        rows.append(row)
        expected[f"train-0.parquet/{number}"] = sample
    Path("data").mkdir()
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, "data/train-0.parquet")
    pq.write_table(table.slice(0, 1), "data/test-0.parquet")
    pipeline = init()
    assert pipeline["source"] == {"kind": "parquet", "url": "data", "include": "train*.parquet"}
    if "x" not in rows[0] and "input_ids" not in rows[0]:
        compare(first_batch(pipeline), expected)
        return
    batch = first_batch(pipeline)
    for place, key in enumerate(batch["__key__"]):  # as long as the longest of the batch
        for field, value in expected[key].items():
            found = np.ravel(batch[field][place]).tolist()
            assert found == np.ravel(value).tolist()[: len(found)]
    assert {*batch} - {"__key__"} == {*expected["train-0.parquet/0"]}


@pytest.mark.parametrize("form", ["parquet", "huggingface", "megatron", "npy"])
def test_documents_of_tokens(form: str, numbers: Rng, rng: random.Random) -> None:
    """Packed: each piece of a sequence is a document, or, where it was cut, a part of one."""
    documents = random_documents(numbers, 60, 200)
    table = pa.table({"input_ids": [list(map(int, document)) for document in documents]})
    Path("data").mkdir()
    if form == "parquet":
        pq.write_table(table, "data/x.parquet")
    elif form == "huggingface":
        put(saved(table, rng))
    elif form == "megatron":
        write_megatron(Path("data/x"), documents, "uint16")
    else:
        for number in range(2):
            np.save(f"data/{number}.npy", np.concatenate(documents[number::2]))
    pipeline = init()
    assert pipeline["source"]["kind"] == "tokens"
    assert "pack" in names_of(pipeline)
    assert pipeline["source"].get("end") == (0 if form == "npy" else None)
    batch = first_batch(pipeline)
    texts = [f" {' '.join(map(str, document))} " for document in documents]
    num = 0
    for ids, of in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for document in {*of.tolist()} - {-1}:
            piece = f" {' '.join(map(str, ids[of == document].tolist()))} "
            assert any(piece in text for text in texts)
            num += 1
    assert num > 10


@pytest.mark.parametrize("form", ["jsonl", "json", "chats", "text"])
def test_lines(form: str, numbers: Rng) -> None:
    if form == "chats":
        said = [[f"say {number}" for number in numbers.integers(0, 999, 2)] for _ in range(9)]
        chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in said]
        lines = [json.dumps({"messages": chat}) for chat in chats]
        put({"chats.jsonl": "\n".join(lines).encode()})
    else:
        values: list[dict[str, Any]] = [
            {"text": f"line {numbers.integers(0, 999)}", "score": float(numbers.random())} for _ in range(9)
        ]
        lines = [value["text"] if form == "text" else json.dumps(value) for value in values]
        put({"x.txt" if form == "text" else f"x.{form}": "\n".join(lines).encode()})
    pipeline = init()
    name = next(Path("data").glob("*.*")).name
    parsed = [{"text": line} if form == "text" else json.loads(line) for line in lines]
    compare(first_batch(pipeline), {f"{name}:{number}": value for number, value in enumerate(parsed, 1)})
    assert "tokenize" in Path("pipeline.yaml").read_text()


def test_tfrecords(numbers: Rng) -> None:
    expected, data = {}, b""
    for number in range(6):
        encoded, pixels = picture(numbers)
        label = int(numbers.integers(0, 9))
        data += record(example({"image": [encoded], "label": [label]}))
        expected[f"a.tfrecord-00000:{number}"] = {"image": pixels, "label": label}
    put({"a.tfrecord-00000": data})
    compare(first_batch(init()), expected)


def test_mds(numbers: Rng) -> None:
    samples: list[dict[str, Any]] = []
    expected = {}
    for number in range(7):
        encoded, pixels = picture(numbers)
        samples.append({"image": encoded, "label": int(numbers.integers(0, 9))})
        expected[f"shard.0000{number // 4}.mds:{number % 4}"] = {"image": pixels, "label": samples[-1]["label"]}
    write_mds(Path("data/train"), {"image": "png", "label": "int"}, samples, 4)
    write_mds(Path("data/val"), {"image": "png", "label": "int"}, samples[:2], 4)
    pipeline = init()
    assert pipeline["source"] == {"kind": "mds", "url": "data/train"}
    compare(first_batch(pipeline), expected)


def test_hugging_face(numbers: Rng, rng: random.Random) -> None:
    rows, expected = [], {}
    for number in range(8):
        encoded, pixels = picture(numbers)
        rows.append({"image": {"bytes": encoded, "path": None}, "label": number % 2})
        key = f"data-0000{number // 4}-of-00002.arrow/{number % 4}"
        expected[key] = {"image": pixels, "label": number % 2}
    put({f"train/{name}": data for name, data in saved(pa.Table.from_pylist(rows), rng).items()})
    put({"dataset_dict.json": b'{"splits": ["train"]}'})
    pipeline = init()
    assert pipeline["source"] == {"kind": "huggingface", "url": "data/train"}
    compare(first_batch(pipeline), expected)


@pytest.mark.parametrize("kind", ["videos", "sounds"])
def test_media(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"make_{kind}.py", "data", "4"])
    runpy.run_path(str(ROOT / f"examples/make_{kind}.py"), run_name="__main__")
    pipeline = init()
    batch = first_batch(pipeline)
    names = sorted(path.name for path in Path("data").iterdir())
    assert batch["label"].tolist() == [names.index(key.partition("/")[0]) for key in batch["__key__"]]
    if kind == "videos":
        assert batch["video"].shape[1:3] == (16, 3)
    else:
        assert batch["audio"].shape == (4, 1, 64000)
        assert (batch["num_samples"] > 3 * 16000 - 2).all()


@pytest.mark.parametrize("form", ["nifti", "npy"])
def test_volumes(form: str, numbers: Rng) -> None:
    """A scan and its labels, of which the same window is cut; those that are smaller are padded at their ends."""
    expected = {}
    for number in range(4):
        arrays = {"images": numbers.integers(-99, 99, (20, 17, 9)), "labels": numbers.integers(0, 3, (20, 17, 9))}
        for name, array in arrays.items():
            path = Path(f"data/{name}/{number}.{'nii.gz' if form == 'nifti' else 'npy'}")
            path.parent.mkdir(parents=True, exist_ok=True)
            if form == "nifti":
                nibabel = pytest.importorskip("nibabel")
                nibabel.Nifti1Image(array.astype(np.int16), np.eye(4)).to_filename(path)
            else:
                np.save(path, array.astype(np.int16))
        padded = [np.pad(array, around(array)) for array in arrays.values()]
        expected[f"images/{path.name}"] = {"image": padded[0], "label": padded[1]}
    pipeline = init()
    assert names_of(pipeline)[:4] == ["read", "decode", "random_volume_crop", "random_volume_flip"]
    assert pipeline["stages"][2]["random_volume_crop"]["foreground"] == "label"
    compare(first_batch(pipeline), expected)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
@pytest.mark.parametrize("samples", ["rows", "whole"])
def test_containers(kind: str, samples: str, numbers: Rng) -> None:
    Path("data").mkdir()
    shape = (11, 9, 10)
    stores = []
    for number in range(1 if samples == "rows" else 3):
        arrays = {"image": numbers.random(shape), "label": numbers.integers(0, 4, shape if samples == "whole" else 11)}
        stores.append((write_store(kind, Path(f"data/s{number}"), arrays, numbers), arrays))
    pipeline = init()
    assert pipeline["source"]["samples"] == samples
    if samples == "rows":
        ((path, arrays),) = stores
        one = pipeline["source"]["url"].endswith(path.name)
        expected = {
            str(row) if one else f"{path.name}/{row}": {n: a[row] for n, a in arrays.items()} for row in range(11)
        }
    else:
        expected = {path.name: {n: np.pad(a, around(a)) for n, a in arrays.items()} for path, arrays in stores}
    compare(first_batch(pipeline), expected)


def test_pictures_with_masks_and_texts(numbers: Rng) -> None:
    """Files of one name are one sample; only with masks alone are pictures cropped and flipped."""
    files, expected = dict[str, bytes](), {}
    for number in range(5):
        file = io.BytesIO()
        classes = numbers.integers(0, 9, (SIDE, SIDE), np.uint8)
        Image.fromarray(classes).save(file, "png")
        files[f"masks/{number}.png"] = file.getvalue()
        files[f"images/{number}.png"], pixels = picture(numbers)
        expected[f"images/{number}.png"] = {"image": pixels, "mask": classes[None]}
    put(files)
    pipeline = init()
    assert {"random_resized_crop", "random_horizontal_flip"} < {*names_of(pipeline)}
    compare(first_batch(pipeline), expected)
    put({f"images/{number}.txt": b"a text" for number in range(5)}, "pairs")
    put({name: data for name, data in files.items() if name.startswith("images")}, "pairs")
    pipeline = init("pairs", "--force")
    assert "resize" in names_of(pipeline)
    assert "random_horizontal_flip" not in names_of(pipeline)
    captioned = {key[7:]: {"image": sample["image"], "txt": "a text"} for key, sample in expected.items()}
    compare(first_batch(pipeline), captioned)


@pytest.mark.parametrize("shape", [(300, 5), (5000,)])
def test_one_npy_file(shape: tuple[int, ...], numbers: Rng) -> None:
    """Records, or of whole numbers in one dimension windows."""
    array = numbers.integers(0, 99, shape)
    np.save("x.npy", array)
    pipeline = init("x.npy")
    field = "tokens" if len(shape) == 1 else "data"
    samples = {str(row): {field: array[row : row + 2049] if len(shape) == 1 else array[row]} for row in range(shape[0])}
    compare(first_batch(pipeline), samples)


def test_a_folder_of_npy_files(numbers: Rng) -> None:
    expected = {f"{number}.npy": {"npy": numbers.random((3, 4))} for number in range(5)}
    Path("data").mkdir()
    for name, sample in expected.items():
        np.save(Path("data", name), sample["npy"])
    compare(first_batch(init()), expected)


def test_a_bucket(numbers: Rng, seaweed: Seaweed, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    expected = {}
    for label, name in enumerate(("ant", "bee")):
        for number in range(3):
            data, pixels = picture(numbers)
            put({f"{name}/{number}.png": data})
            expected[f"{name}/{number}.png"] = {"image": pixels, "label": label}
    upload(seaweed, Path("data"), "init", "photos/")
    pipeline = init("s3://init/photos")
    assert pipeline["source"]["url"] == "s3://init/photos"
    compare(first_batch(pipeline), expected)


def _twice(numbers: Rng) -> dict[str, bytes]:
    return {"a.png": picture(numbers)[0], "b.jsonl": b'{"x": 1}\n', "c.jsonl": b'{"x": 2}\n'}


def _pictures(*names: str, table: bytes = b"") -> Callable[[Rng], dict[str, bytes]]:
    tables = {"t.csv": table} if table else {}
    return lambda rng: {name: picture(rng)[0] for name in names} | tables


REFUSED: dict[str, tuple[Callable[[Rng], dict[str, bytes]], str]] = {
    "two kinds": (_twice, "several kinds, 1 of pictures (a.png) and 2 of lines (b.jsonl)"),
    "nothing": (lambda rng: {}, "there is no file"),
    "unknown": (lambda rng: {"a.xyz": b"x", "b.xyz": b"y"}, "holds 2 .xyz: no file has a name that says its kind"),
    "compressed": (lambda rng: {"a.jsonl.gz": b"x"}, "compressed files have no random access"),
    "raw": (lambda rng: {"a.bin": b"xx"}, "write `source: {kind: tokens, url: ..., dtype: uint16, end: 0}`"),
    "document": (lambda rng: {"a.json": b'[\n{"a": 1}]'}, "one JSON document, not one object a line"),
    "tables": (lambda rng: {"a.csv": b"a,b\n"}, "convert them"),
    "loose": (_pictures("a/0.png", "b/1.png", "2.png"), "1 beside them, such as 2.png: name the folder"),
    "both": (_pictures("a/0.png", "b/1.png", table=b"name,label\n0,x\n1,y\n"), "class folders and the table t.csv"),
    "columns": (_pictures("0.png", table=b"name,u,v\n0,1,2\n"), "which column is the label cannot be told of u, v"),
    "damaged": (lambda rng: {"a/0.png": b"\x89PNG", "b/0.png": b"\x89PNG"}, "none of the 2 samples that were tried"),
    "no fields": (lambda rng: {"a.jsonl": b"{}\n{}\n"}, "hold no field"),
    "cut array": (lambda rng: {"a.npy": b"\x93NUMPY"}, "a.npy: truncated .npy"),
    "end": (lambda rng: {"a.npy": saved_array([1, 2]), "b.npy": saved_array([1, 3])}, "which token ends a document"),
    "partner": (_pictures("images/0.png", "images/1.png", "images/2.png", "masks/0.png", "masks/1.png"), "no partner"),
}


def saved_array(values: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(values))
    return file.getvalue()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name: str, numbers: Rng, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = REFUSED[name]
    Path("data").mkdir()
    put(make(numbers))
    assert main(["init", "data"]) != 0
    assert message in capsys.readouterr().err
    assert not Path("pipeline.yaml").exists()


def test_other_outputs(numbers: Rng, capsys: pytest.CaptureFixture[str]) -> None:
    """A file is not overwritten without --force; a path counts from the file; - prints, and nothing else is printed there."""
    put({f"{number}.png": picture(numbers)[0] for number in range(2)}, "my data ${HOME}")
    place = "my data ${HOME}"
    Path("pipeline.yaml").write_text("mine")
    assert main(["init", place]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("pipeline.yaml").read_text() == "mine"
    assert main(["init", place, "--out", "-"]) == 0
    printed = capsys.readouterr()
    assert "2 PNG files" in printed.err
    Path("pipeline.yaml").write_text(printed.out)
    assert main(["check", "pipeline.yaml"]) == 0
    Path("below").mkdir()
    assert main(["init", place, "--out", "below/p.yaml"]) == 0
    assert main(["check", "below/p.yaml"]) == 0
    assert main(["init", f"{place}/*.png", "--force"]) == 2
    assert main(["init", "missing", "--force"]) == 1
