"""`kind: tfrecord`: against a writer and a reader of the format of their own, and Google's protobuf."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import kernel_twins
import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from mutate import OPERATORS
from mutate_formats import damaged
from tf_records import crc32c, example, masked, protobuf, record, records_in

import loaderkit
from loaderkit import Pipeline, native
from loaderkit.cli import main
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, FormatError, ObjectChangedError, SourceError, StageError
from loaderkit.sources.serial import records
from loaderkit.sources.serial.tfrecord import TfrecordArgs, TfrecordSource

WAYS = [native, kernel_twins]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_features(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for number in range(rng.randrange(6)):
        size = rng.choice([1, 1, 2, 5, 200])
        made[f"é{number}"] = rng.choice(
            [
                [rng.randbytes(rng.randrange(50)) for _ in range(size)],
                [float(np.float32(rng.gauss(0, 1e9))) for _ in range(size)],
                [rng.choice([0, -1, 127, 128, 2**63 - 1, -(2**63), rng.randrange(10**6)]) for _ in range(size)],
            ]
        )
    return made


def as_lists(features: dict[str, Any]) -> dict[str, Any]:
    """What `parse_example` gives, as Python's numbers."""
    return {
        name: values if type(values) is list else np.frombuffer(values[1], values[0]).tolist()
        for name, values in features.items()
    }


def of_protobuf(data: bytes) -> dict[str, Any]:
    message = protobuf()()
    message.ParseFromString(data)
    kinds = {name: feature.WhichOneof("kind") for name, feature in message.features.feature.items()}
    return {name: list(getattr(message.features.feature[name], kind).value) for name, kind in kinds.items() if kind}


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


@pytest.mark.parametrize("way", WAYS)
class TestExample:
    def test_against_googles_protobuf(self, way: Any, rng: random.Random) -> None:
        for _ in range(100):
            features = random_features(rng)
            data = example(features)
            assert of_protobuf(data) == features
            assert as_lists(way.parse_example(data, None)) == features
            wanted = set(rng.sample(sorted(features), len(features) // 2)) | {"other"}
            some = {name: values for name, values in features.items() if name in wanted}
            assert as_lists(way.parse_example(data, wanted)) == some

    def test_numbers_one_by_one_and_packed(self, way: Any) -> None:
        floats = np.array([0.5, -2.0, 3.25], "<f4")
        of_floats = field(2, field(1, floats[:2].tobytes()) + b"\x0d" + floats[2:].tobytes())
        of_integers = field(3, b"\x08" + varint(-5) + field(1, varint(2**63 - 1) + varint(300)) + b"\x08\x07")
        entries = [(b"f", of_floats), (b"q", of_integers), (b"none", b"")]
        unknown = b"\x1d1234" + b"\x21" + bytes(8) + b"\x28\x01" + field(9, b"abc")
        features = b"".join(unknown + field(1, field(1, name) + field(2, values)) for name, values in entries)
        data = field(1, features) + unknown
        found = as_lists(way.parse_example(data, None))
        assert found == {"f": floats.tolist(), "q": [-5, 2**63 - 1, 300, 7]} == of_protobuf(data)

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            (b"\x0a\x05abc", "reaches beyond"),
            (b"\x0a", "cut off"),
            (b"\x0a" + b"\xff" * 10, "more than 64 bits"),
            (b"\x08\x01", "not of its type"),
            (b"\x0b", "not of its type"),
            (b"\x1b", "a group"),
            (b"\x02\x00", "no number"),
            (b"\x19abc", "cut off"),
            (field(2, b""), "SequenceExample"),
            (field(1, field(1, field(1, b"a") + field(2, field(2, field(1, b"abcde"))))), "list of floats is cut off"),
            (field(1, field(1, field(1, b"a") + field(2, field(3, field(1, b"\x80"))))), "cut off"),
            (field(1, field(1, field(1, b"a") + field(1, b"b"))), "two names"),
            (field(1, field(1, field(1, b"\xff"))), "utf-8"),
        ],
    )
    def test_what_is_none(self, way: Any, data: bytes, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            way.parse_example(data, None)


def test_damaged_examples(rng: random.Random) -> None:
    """In C and in Python the same is read or refused, and what is read is what protobuf reads."""
    generator = np.random.default_rng(rng.randrange(2**32))
    num_read = 0
    for _ in range(1500):
        data = damaged(example({"a": [b"xy", b"z"], "b": [1.5, 2.5], "c": [1, 300], "d": [7]}), OPERATORS, generator)
        found: list[Any] = []
        for way in WAYS:
            try:
                found.append(repr(as_lists(way.parse_example(data, None))))  # NaN is not equal to itself
            except ValueError as error:
                found.append(str(error).partition(" codec")[0])
        assert found[0] == found[1]
        if found[0].startswith("{"):
            num_read += 1
            with suppress(
                DecodeError
            ):  # it has rules of its own, and leaves out features with fields that it does not know
                mine = as_lists(native.parse_example(data, None))
                for name, values in of_protobuf(data).items():
                    assert repr(mine[name]) == repr(values)
    assert 0 < num_read < 1500


def test_checksums(rng: random.Random) -> None:
    assert native.crc32c(b"123456789") == 0xE3069283  # as in RFC 3720
    for size in (0, 1, 7, 8, 9, 64, 500, 3000):
        data = rng.randbytes(size)
        assert native.crc32c(data) == crc32c(data)
    assert records.masked(native.crc32c(b"abc")).to_bytes(4, "little") == masked(b"abc")


def source_of(files: dict[str, bytes], **args: Any) -> TfrecordSource:
    return TfrecordSource(MemoryConnector(files), TfrecordArgs.model_validate({"url": "memory://", **args}))


def parsed(source: TfrecordSource) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for index in range(len(source)):
        ((_, _, (key, start, length, etag)),) = source.ranges(index)
        data = bytearray(length)
        source._connector.read_into(key, start, memoryview(data), etag=etag)
        found.append((source.key(index), source.parse(index, memoryview(data))))
    return found


def test_records_of_all_sizes(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        monkeypatch.setattr(records, "_BLOCK_BYTES", rng.choice([12, 40, 64 << 10]))
        contents = [rng.randbytes(rng.choice([0, 1, 11, 100, 3000])) for _ in range(30)]
        data = b"".join(map(record, contents))
        assert records_in(data) == contents
        source = source_of({"x.tfrecord": data, "y.tfrecords": record(b"last")}, format="bytes")
        keys = [*(f"x.tfrecord:{number}" for number in range(30)), "y.tfrecords:0"]
        expected = [(key, {"data": content}) for key, content in zip(keys, [*contents, b"last"], strict=True)]
        assert parsed(source) == expected
        assert source.blocks(500)[-1] == 31


def test_values_and_fields() -> None:
    data = record(
        example(
            {
                "image/encoded": [b"jpg"],
                "label": [3],
                "score": [0.5],
                "box": [1.0, 2.0],
                "tokens": [9],
                "names": [b"a", b"b"],
            }
        )
    )
    ((_, sample),) = parsed(source_of({"x.tfrecord": data}))
    assert (sample["image/encoded"], sample["label"], sample["names"]) == (b"jpg", 3, [b"a", b"b"])
    assert type(sample["score"]) is np.float32
    assert (sample["box"].dtype, sample["box"].tolist()) == ("float32", [1, 2])
    fields = {"image": "image/encoded", "tokens": "tokens[]", "n": "names[]", "label": "label"}
    ((_, sample),) = parsed(source_of({"x.tfrecord": data}, fields=fields))
    assert [*sample] == [*fields]
    assert (sample["tokens"].dtype, sample["tokens"].tolist()) == ("int64", [9])
    assert (sample["image"], sample["n"], sample["label"]) == (b"jpg", [b"a", b"b"], 3)
    with pytest.raises(FormatError, match=r"has no feature 'nothing', only 'box', 'image/encoded'"):
        parsed(source_of({"x.tfrecord": data}, fields={"a": "nothing"}))
    with pytest.raises(ConfigError, match="can only rename"):
        Pipeline.tfrecord("x", format="bytes", fields={"a": "b"}).read().batch(1).config  # noqa: B018


def test_pictures(photos: Path, tmp_path: Path) -> None:
    """Pictures in records are those in files."""
    paths = sorted(photos.rglob("*.jpg"))[:10]
    rows = [{"image/encoded": [path.read_bytes()], "image/class/label": [number]} for number, path in enumerate(paths)]
    (tmp_path / "x.tfrecord").write_bytes(b"".join(record(example(row)) for row in rows))
    pipeline = Pipeline.tfrecord(tmp_path, fields={"image": "image/encoded", "label": "image/class/label"})
    of_files = Pipeline.files(photos, include=[str(path.relative_to(photos)) for path in paths])
    found = []
    for one in (pipeline, of_files):
        with loaderkit.build(
            one.shuffle(False).read().decode().resize([32, 32]).batch(10).normalize().epochs(1)
        ) as loader:
            found.append(next(iter(loader)))
    assert torch.equal(found[0]["image"], found[1]["image"])
    assert found[0]["label"].tolist() == [*range(10)]


def test_ragged_batches(tmp_path: Path) -> None:
    rows = [[*range(size)] for size in (3, 1, 5, 2)]
    (tmp_path / "x.tfrecord").write_bytes(b"".join(record(example({"tokens": row})) for row in rows))
    pipeline = Pipeline.tfrecord(tmp_path, fields={"tokens": "tokens[]"}).shuffle(False).read()
    with loaderkit.build(pipeline.batch(4, ragged={"tokens": "list"}).epochs(1)) as loader:
        (batch,) = loader
    assert [row.tolist() for row in batch["tokens"]] == rows


WHOLE = b"".join(record(example({"a": [number]})) for number in range(3))
SIZE = len(WHOLE) // 3


def test_damaged_records(tmp_path: Path) -> None:
    data = bytearray(WHOLE)
    data[SIZE + 14] ^= 1
    (tmp_path / "x.tfrecord").write_bytes(data)
    pipeline = Pipeline.tfrecord(tmp_path).shuffle(False).read().batch(1).epochs(1)

    def all_of(one: Pipeline) -> list[int]:
        with loaderkit.build(one) as loader:
            return [batch["a"].item() for batch in loader]

    with pytest.raises(
        StageError, match=rf"'x\.tfrecord:1' in {tmp_path}/x\.tfrecord: the checksum of its data is wrong"
    ):
        all_of(pipeline)
    assert {*all_of(pipeline.errors(on_bad_sample="replace"))} == {0, 2}
    with pytest.raises(StageError, match=r"'x\.tfrecord:1'.*no tf\.train\.Example"):
        all_of(Pipeline.tfrecord(tmp_path, verify="length").shuffle(False).read().batch(1).epochs(1))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (WHOLE[:-1], r"x\.tfrecord: record 2 ends behind the file of \d+ bytes, which is truncated"),
        (WHOLE[: SIZE + 5], r"record 1 ends behind"),
        (WHOLE + b"\x01", r"record 3 ends behind"),
        (WHOLE[:SIZE] + b"\x01" + WHOLE[SIZE + 1 :], "checksum of the length of record 1 is wrong: it is damaged"),
        (b"hello, this is no record", "record 0 is wrong.*holds no TFRecords"),
        (zlib.compress(WHOLE), r"compressed ones \(ZLIB\)"),
        (gzip.compress(WHOLE, mtime=0), r"x\.tfrecord is compressed \(gzip\), whatever.*decompress it"),
        (b"", "is empty"),
    ],
)
def test_files_that_are_none(data: bytes, says: str) -> None:
    with pytest.raises((FormatError, SourceError), match=says):
        source_of({"x.tfrecord": data})


def test_compressed_by_name() -> None:
    with pytest.raises(SourceError, match=r"x\.tfrecord\.gz is compressed \(gzip\).*kind: iterable"):
        source_of({"x.tfrecord.gz": b""})
    files = {"x.tfrecord": WHOLE, "x.tfrecord.idx": b"", "y.tfrecord.gz": b"", "y.txt": b""}
    with pytest.raises(SourceError, match=r"y\.tfrecord\.gz is compressed .*leave it out by `include`"):
        source_of(files)
    with pytest.warns(UserWarning, match="is not used"):
        assert source_of(files, include="*.tfrecord").left_out == {"gz": 1, "txt": 1}


def test_files_of_a_folder_by_their_names() -> None:
    names = ["a.tfrecord", "b.tfrecord-00000-of-00002", "c.tfrec", "d.tfrecords"]
    source = source_of(dict.fromkeys([*names, "e.txt"], WHOLE))
    assert [*dict.fromkeys(key.rpartition(":")[0] for key, _ in parsed(source))] == names


class TestIndex:
    def test_of_dali(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "x.tfrecord"
        path.write_bytes(WHOLE)
        script = Path(sys.executable).with_name("tfrecord2idx")
        if script.exists():
            command = [sys.executable, str(script), str(path), str(tmp_path / "dali")]
            subprocess.run(command, check=True)
        assert main(["index", "--check", str(path)]) == 1
        assert main(["index", str(path)]) == 0
        assert main(["index", "--check", str(path)]) == 0
        written = (tmp_path / "x.tfrecord.idx").read_text()
        assert written == "".join(f"{SIZE * number} {SIZE}\n" for number in range(3))
        if script.exists():
            assert (tmp_path / "dali").read_text() == written
        monkeypatch.setattr(records, "scan_records", lambda *args: pytest.fail("the file was scanned"))
        (tmp_path / "x.tfrecord.idx").rename(tmp_path / "x.idx")
        source = TfrecordSource(FileConnector(tmp_path), TfrecordArgs(url=str(tmp_path)))
        assert [sample["a"] for _, sample in parsed(source)] == [0, 1, 2]

    @pytest.mark.parametrize(
        "text", ["0 10\n", "a b\n", "0", "0 -5 3 9", f"0 {SIZE}\n{SIZE} {SIZE}\n", "0 99999999999999999999"]
    )
    def test_one_that_does_not_fit(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x.tfrecord").write_bytes(WHOLE)
        (tmp_path / "x.tfrecord.idx").write_text(text)
        assert main(["index", "--check", str(tmp_path / "x.tfrecord")]) == 1
        with pytest.warns(UserWarning, match=r"the index .*x\.tfrecord\.idx is not used"):
            source = TfrecordSource(FileConnector(tmp_path), TfrecordArgs(url=str(tmp_path)))
        assert len(source) == 3

    def test_one_that_lies_is_found_out(self, tmp_path: Path) -> None:
        (tmp_path / "x.tfrecord").write_bytes(WHOLE)
        (tmp_path / "x.tfrecord.idx").write_text(f"0 {SIZE + 1}\n{SIZE + 1} {2 * SIZE - 1}\n")
        source = TfrecordSource(FileConnector(tmp_path), TfrecordArgs(url=str(tmp_path)))
        with pytest.raises(FormatError, match="the index of the file says"):
            parsed(source)

    def test_replaced_since_listed(self, tmp_path: Path) -> None:
        (tmp_path / "x.tfrecord").write_bytes(WHOLE)
        source = TfrecordSource(FileConnector(tmp_path), TfrecordArgs(url=str(tmp_path)))
        (tmp_path / "x.tfrecord").write_bytes(WHOLE[SIZE:])
        with pytest.raises(ObjectChangedError, match=r"x\.tfrecord"):
            parsed(source)
