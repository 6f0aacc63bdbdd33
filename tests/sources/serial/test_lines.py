"""`kind: lines`: text and JSON Lines, against Python's own splitting and json."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, ObjectChangedError, SourceError, StageError
from loaderkit.samples.values import as_array
from loaderkit.sources.serial import scan as module
from loaderkit.sources.serial.lines import LinesArgs, LinesSource, parse_json
from loaderkit.sources.serial.offsets_file import write_index

BOM = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source_of(files: dict[str, bytes], **args: Any) -> LinesSource:
    return LinesSource(MemoryConnector(files), LinesArgs.model_validate({"url": "memory://", **args}))


def samples_of(source: LinesSource) -> list[tuple[str, Any]]:
    """All keys and samples, read as `read` reads them."""
    table = source.table(np.arange(len(source)))
    found = []
    for index, (key, start, length, etag) in enumerate(zip(*table.ranges, strict=True)):
        data = bytearray(length)
        source._connector.read_into(key, start, memoryview(data), etag=etag)
        assert source.ranges(index)[0].range == (key, start, length, etag)
        found.append((source.key(index), source.parse(index, memoryview(data))))
    assert source.keys(np.arange(len(source))) == [key for key, _ in found]
    return found


def split(data: bytes) -> list[bytes]:
    """Python's lines: what is between LFs, without a CR before one, and a last line that has no end."""
    *ended, last = data.removeprefix(BOM).split(b"\n")
    return [line.removesuffix(b"\r") for line in ended] + ([last] if last else [])


def random_text(rng: random.Random) -> bytes:
    pieces = [b"\n", b"\n\n", b"\r\n", b" ", b"\t", b"\r", b"a", "é€😀".encode(), b"x" * rng.randrange(200)]
    begin = rng.choice([b"", BOM])
    return begin + b"".join(rng.choice(pieces) for _ in range(rng.randrange(60)))


def test_text_against_pythons_lines(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        monkeypatch.setattr(module, "_BLOCK_BYTES", rng.choice([3, 7, 64, 1 << 20]))  # lines over the borders of blocks
        files = {f"{number}-{name}.txt": random_text(rng) for name in range(rng.randrange(1, 4))}
        expected = [
            (f"{key}:{line + 1}", {"text": text.decode()})
            for key, data in sorted(files.items())
            for line, text in enumerate(split(data))
        ]
        if expected:
            assert samples_of(source_of(files, format="text")) == expected
        else:
            with pytest.raises(SourceError, match="is empty"):
                source_of(files, format="text")


def test_objects_against_pythons_json(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        monkeypatch.setattr(module, "_BLOCK_BYTES", rng.choice([3, 50, 1 << 20]))
        files, expected = {}, []
        for name in range(rng.randrange(1, 4)):
            rows = [random_object(rng) if rng.random() < 0.8 else None for _ in range(rng.randrange(1, 20))]
            texts = [rng.choice(["", " ", "\t "]) if row is None else dumped(row, rng) for row in rows]
            data = rng.choice([b"", BOM]) + rng.choice(["\n", "\r\n"]).join(texts).encode() + rng.choice([b"", b"\n"])
            files[f"{number}-{name}.jsonl"] = data
            lines = [(line, text) for line, text in enumerate(split(data)) if text.strip()]
            expected += [(f"{number}-{name}.jsonl:{line + 1}", json.loads(text)) for line, text in lines]
        if not expected:
            continue
        source = source_of(files)
        found = samples_of(source)
        assert [(key, as_lists(sample)) for key, sample in found] == expected
        for block_bytes in (1, 100, 10**6):
            bounds = source.blocks(block_bytes)
            assert (bounds[0], bounds[-1]) == (0, len(source))
            assert (np.diff(bounds) > 0).all()


def random_object(rng: random.Random) -> dict[str, Any]:
    values: list[Any] = [
        "é\u2028\n",
        1,
        -2.5,
        True,
        None,
        [],
        [1, 2, 3],
        [1, 2.5],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        ["a"],
    ]
    return {f"k{number}": rng.choice([*values, {"b": [1]}]) for number in range(rng.randrange(4))}


def dumped(row: dict[str, Any], rng: random.Random) -> str:
    return rng.choice(["", "  "]) + json.dumps(row, ensure_ascii=rng.random() < 0.5) + rng.choice(["", " "])


def as_lists(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def test_lines_of_a_block(rng: random.Random) -> None:
    for _ in range(500):
        data = bytes(rng.choice(b"ab \t\r\n\n\x0b\x00") for _ in range(rng.randrange(300)))
        is_blank = rng.random() < 0.5
        lines = data.split(b"\n")
        are_blank = [not line.strip(b" \t\r") and (is_blank or number > 0) for number, line in enumerate(lines)]
        starts, blanks, goes_on = module.scan_lines(data, 7, is_blank)
        assert starts.tolist() == [*itertools.accumulate((len(line) + 1 for line in lines[:-1]), initial=7)][1:]
        assert blanks.tolist() == [number for number, one in enumerate(are_blank[:-1]) if one]
        assert goes_on == are_blank[-1]


def test_lists_of_numbers_are_arrays() -> None:
    values: list[Any]
    for values, dtype in (([1, 2], "int64"), ([1.0], "float64"), ([1, 0.5], "float64"), ([True], "bool")):
        array = as_array(values)
        assert (array.dtype, array.tolist()) == (dtype, values)
    assert as_array([[1, 2], [3, 4]]).shape == (2, 2)
    assert as_array([[1, 2], [0.5, 4]]).tolist() == [[1, 2], [0.5, 4]]
    for values in ([], ["a"], [1, "a"], [True, 1], [None, 1], [[1], [2, 3]], [[True], [1]], [[]], [{"a": 1}]):
        assert as_array(values) is values
    with pytest.raises(FormatError, match="beyond 64 bits"):
        as_array([2**64])
    for values in ([2**53 + 1, 0.5], [[2**53 + 1], [0.5]]):
        with pytest.raises(FormatError, match="float64 would round it"):
            as_array(values)


def batches(pipeline: Pipeline, **overrides: Any) -> list[dict[str, Any]]:
    with loaderkit.build(
        pipeline, overrides={f"prefetch.{name}": value for name, value in overrides.items()}
    ) as loader:
        return list(loader)


def test_fields(tmp_path: Path) -> None:
    rows = [{"content": f"t{n}", "meta": {"label": n, "x.y": 3}, "a.b": n, "v": [n, 1]} for n in range(5)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"text": "content", "label": "meta.label", "whole": "a.b", "v": "v"}
    (batch,) = batches(Pipeline.lines(tmp_path, fields=fields).shuffle(False).read().batch(5).epochs(1))
    assert batch.pop("__key__") == [f"x.jsonl:{number}" for number in range(1, 6)]
    assert [*batch] == [*fields]
    assert batch["text"] == [row["content"] for row in rows]
    assert batch["label"].tolist() == batch["whole"].tolist() == [0, 1, 2, 3, 4]
    assert batch["v"].shape == (5, 2)
    (tmp_path / "x.txt").write_text("one\n\ntwo")
    (batch,) = batches(
        Pipeline.lines(tmp_path, format="text", fields={"prompt": "text"}).shuffle(False).read().batch(5).epochs(1)
    )
    assert batch["prompt"] == ["one", "", "two"]


BAD = {
    b'{"a": 1,}': r"it is no JSON: .*, in column [89]",
    b'{"a": 1} x': r"it is no JSON: Extra data, in column 10",
    b"[1]": "it is a list, not an object",
    b"null": "it is null, not an object",
    b'{"a": "\xff"}': "it is not UTF-8: byte 8 of the line is 0xff",
    b'{"b": 1}': "it has no 'a', only 'b'",
    b'{"a": [%d]}' % 2**70: "beyond 64 bits",
    b"[" * 100_000: "no JSON that can be read",
    b'{"a": ' + b"1" * 5000 + b"}": "no JSON that can be read",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_a_bad_sample(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n\n' + line + b'\r\n{"a": 2}')
    pipeline = Pipeline.lines(tmp_path / "x.jsonl", fields={"a": "a"}).shuffle(False).read().batch(1).epochs(1)
    with pytest.raises(StageError, match=rf"'x\.jsonl:3' in {tmp_path}/x\.jsonl: .*{BAD[line]}"):
        batches(pipeline)
    good = batches(pipeline.errors(on_bad_sample="replace"))
    assert len(good) == 3
    assert {batch["a"].item() for batch in good} == {1, 2}


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine\nb\xe9d\n")
    with pytest.raises(StageError, match=r"'x\.txt:2'.*byte 2 of the line is 0xe9"):
        batches(Pipeline.lines(tmp_path, format="text").shuffle(False).read().batch(1).epochs(1))


def test_which_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/x.jsonl", "c.ndjson", "v1.0/y.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"name": name}))

    def names(url: Any, **args: Any) -> list[str]:
        (batch,) = batches(Pipeline.lines(url, **args).shuffle(False).read().batch(9).epochs(1))
        return batch["name"]  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match=r"c\.ndjson is left out"):
        assert names(tmp_path) == ["b.jsonl"]
    assert names(tmp_path, include="**/*.jsonl") == ["a/x.jsonl", "b.jsonl", "v1.0/y.jsonl"]
    assert names(tmp_path, include=["c.ndjson", "b.jsonl"]) == ["b.jsonl", "c.ndjson"]
    assert names(tmp_path / "c.ndjson") == ["c.ndjson"]
    assert names(tmp_path / "{b.jsonl,c.ndjson}") == ["b.jsonl", "c.ndjson"]
    assert names(tmp_path / "v1.0", include="*.jsonl") == ["v1.0/y.jsonl"]
    with pytest.raises(SourceError, match=r"is called '\*.jsonl'; there are 'c.txt'"):
        source_of({"c.txt": b"a"})
    assert LinesArgs(url="s3://my.bucket").root == "s3://my.bucket"
    assert LinesArgs(url="s3://my.bucket/x.jsonl").root == "s3://my.bucket/"
    with pytest.raises(ConfigError, match="can only rename"):
        Pipeline.lines("x", format="text", fields={"a": "b"}).read().batch(1).config  # noqa: B018
    with pytest.raises(ConfigError, match="reserved"):
        Pipeline.lines("x", fields={"__key__": "b"}).read().batch(1).config  # noqa: B018


def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ("b.jsonl.gz", "c.JSONL.zst", "d.ndjson", "e/f.jsonl", "README", ".g.jsonl.gz", "b.jsonl.offsets")
    files = {"a.jsonl": b'{"x": 1}', **dict.fromkeys(others, b"")}
    with pytest.warns(
        UserWarning, match=r"memory://b\.jsonl\.gz and 2 more are left out, .* `include: '\*\.jsonl'` if"
    ) as caught:
        source = source_of(files)
    assert [one.filename for one in caught] == [__file__]
    counts = {"gz": 1, "zst": 1, "ndjson": 1, "jsonl": 1, "": 1}
    assert source.left_out == counts
    assert source_of(files, include="*.jsonl").left_out == counts
    assert not source_of(files, url="memory://a.jsonl").left_out
    for name in ("a.jsonl", "README.md"):
        (tmp_path / name).write_bytes(files["a.jsonl"])
    pipeline = Pipeline.lines(tmp_path, include="*.jsonl").shuffle(False).read().batch(1)
    (tmp_path / "p.yaml").write_text(pipeline.to_yaml())
    assert main(["check", str(tmp_path / "p.yaml")]) == 0
    assert "left out      2 files that `include` does not take: 1 .md, 1 .yaml" in capsys.readouterr().out


def test_what_has_no_random_access() -> None:
    data = b'{"a": 1}\n'
    with pytest.raises(
        SourceError, match=r"memory://x\.jsonl\.gz is compressed \(gzip\).*decompress it, or .*kind: iterable"
    ):
        source_of({"x.jsonl.gz": gzip.compress(data)}, include="*.gz")
    with pytest.raises(FormatError, match=r"compressed \(gzip\), whatever its name says"):
        source_of({"x.jsonl": gzip.compress(data)})
    with pytest.raises(FormatError, match="UTF-16"):
        source_of({"x.jsonl": '{"a": 1}\n'.encode("utf-16")})


class TestIndex:
    def test_is_kept_and_made_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "x.txt"
        path.write_text("a\nbc\n")
        scans = []
        scan = module.scan_lines
        monkeypatch.setattr(module, "scan_lines", lambda *args: (scans.append(1), scan(*args))[1])  # type: ignore[func-returns-value]
        args = LinesArgs(url=str(tmp_path), format="text")
        for _ in range(2):
            assert [text["text"] for _, text in samples_of(LinesSource(FileConnector(tmp_path), args))] == ["a", "bc"]
        assert len(scans) == 1
        path.write_text("ab\nc\n")
        assert [text["text"] for _, text in samples_of(LinesSource(FileConnector(tmp_path), args))] == ["ab", "c"]
        assert len(scans) == 2

    def test_replaced_since_listed(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("a\nbc\n")
        source = LinesSource(FileConnector(tmp_path), LinesArgs(url=str(tmp_path), format="text"))
        (tmp_path / "x.txt").write_text("abcd\n")
        with pytest.raises(ObjectChangedError, match=r"x\.txt"):
            samples_of(source)

    def test_beside_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
        path, beside = tmp_path / "x.jsonl", tmp_path / "x.jsonl.offsets"
        path.write_text('{"a": 1}\n\n{"a": 2}\n')
        assert main(["index", "--check", str(path)]) == 1
        assert main(["index", str(path)]) == 0
        assert main(["index", "--check", str(path)]) == 0
        with monkeypatch.context() as patched:
            patched.setattr(module, "scan_lines", lambda *args: pytest.fail("the file was scanned"))
            expected = samples_of(LinesSource(FileConnector(tmp_path), LinesArgs(url=str(tmp_path))))
        assert expected == [("x.jsonl:1", {"a": 1}), ("x.jsonl:3", {"a": 2})]
        path.write_text('{"a": 11}\n{"a": 2}\n')  # of the same size
        assert main(["index", "--check", str(path)]) == 1
        with pytest.warns(UserWarning, match=r"x\.jsonl\.offsets is not used: it was made for another version"):
            found = samples_of(LinesSource(FileConnector(tmp_path), LinesArgs(url=str(tmp_path))))
        assert found == [("x.jsonl:1", {"a": 11}), ("x.jsonl:2", {"a": 2})]
        beside.write_bytes(b"nonsense")
        path.touch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert samples_of(LinesSource(FileConnector(tmp_path), LinesArgs(url=str(tmp_path)))) == found

    @pytest.mark.parametrize("form", ["json", "text"])
    def test_no_change_in_place_is_silent(self, rng: random.Random, form: str) -> None:
        """Between the ends, by which the index is told to be of this file: what is there now comes, or an error."""
        padded = '{"a": 1}' + 5000 * " "
        seen = {"as it is": 0, "refused": 0}
        for _ in range(40):
            lines = [rng.choice([" " * rng.randrange(12), json.dumps({"a": rng.randrange(10**6)})]) for _ in range(300)]
            whole = "".join(f"{line}\n" for line in [padded, *lines, padded]).encode()
            connector = MemoryConnector({"x.jsonl": whole})
            info = connector.stat("x.jsonl")
            index = write_index(connector, info, module.find_lines(connector, info))
            begin, put = (
                rng.randrange(5008, len(whole) - 5020),
                rng.choice([b'{"a": 1}', b"\n", b" ", b"\n3\n", b"\n\n\n"]),
            )
            changed = whole[:begin] + put + whole[begin + len(put) :]
            source = source_of({"x.jsonl": changed, "x.jsonl.offsets": index}, format=form, include="*.jsonl")
            try:
                found = samples_of(source)
            except FormatError:
                seen["refused"] += 1
                continue
            seen["as it is"] += 1
            if form == "text":
                expected = [{"text": line.decode()} for line in split(changed)]
            else:
                expected = [json.loads(line) for line in split(changed) if line.strip(b" \t\r")]
            assert [value for _, value in found] == expected
        assert all(seen.values())

    def test_one_that_lies_is_found_out(self, tmp_path: Path, cache_dir: Path) -> None:
        (tmp_path / "x.txt").write_text("abc\ndef\n")
        args = LinesArgs(url=str(tmp_path), format="text")
        LinesSource(FileConnector(tmp_path), args)
        (kept,) = cache_dir.rglob("*.offsets")
        data = bytearray(kept.read_bytes())
        data[64:] = np.array([0, 3, 8], "<i8").tobytes()
        kept.write_bytes(data)
        with pytest.raises(FormatError, match="does not end where the index"):
            samples_of(LinesSource(FileConnector(tmp_path), args))
        with pytest.raises(FormatError, match="does not end where the index"):  # one that left out a line
            LinesSource(FileConnector(tmp_path), args).parse(0, memoryview(b"abc\ndef\n"))

    def test_is_no_data(self) -> None:
        """Also where the pattern of files matches it."""
        files = {"x.txt": b"a\n", "x.txt.offsets": b"of another version", "y.offsets": b"b\n"}
        with pytest.warns(UserWarning, match="is not used"):
            source = source_of(files, format="text", include="*")
        assert samples_of(source) == [("x.txt:1", {"text": "a"}), ("y.offsets:1", {"text": "b"})]


def test_a_folder_that_is_called_as_a_file() -> None:
    with pytest.raises(SourceError, match=r"'v1\.0' is a folder: name the files in it, as in 'v1\.0/\*\.jsonl'"):
        source_of({"v1.0/_SUCCESS": b"", "v1.0/part-0.jsonl": b"{}"}, url="memory://v1.0")
    (sample,) = samples_of(source_of({"part-0.jsonl": b"{}"}, url="memory://v1.0/*.jsonl"))
    assert sample == ("part-0.jsonl:1", {})


def test_parse_json_takes_what_json_takes(rng: random.Random) -> None:
    texts = ['{"a": NaN}', '"\\ud800"', "1e999", "-0", '{"a": 1, "a": 2}', " \r\n[1]\t", "", " ", "{", "nul", "1 2"]
    texts += ["\x0b1", "\ufeff1"]
    texts += [json.dumps(random_object(rng)) for _ in range(20)]
    for text in texts:
        try:
            expected = json.loads(text)
        except json.JSONDecodeError:
            with pytest.raises(LoaderkitError):
                parse_json(text)
        else:
            assert repr(parse_json(text)) == repr(expected)
