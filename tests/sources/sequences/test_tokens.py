"""`kind: tokens`: documents of unequal length, read by ranges from Megatron's .bin, .npy and raw files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import megatron_index, random_documents, write_megatron

import loaderkit
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, ObjectChangedError, SourceError
from loaderkit.pipeline.config.registry import SOURCES
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import Source
from loaderkit.sources.sequences.document_ends import load_document_ends
from loaderkit.sources.sequences.megatron import parse_megatron_index
from loaderkit.sources.sequences.tokens import TokensArgs, TokensSource

DTYPES = ("uint8", "uint16", "int16", "int32", "int64")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def source_of(files: dict[str, bytes], url: str, **args: Any) -> Source:
    opens = SOURCES["tokens"].open
    assert opens is not None
    return opens(TokensArgs.model_validate({"url": f"memory://{url}", **args}), MemoryConnector(files), BadShards())


def documents_in(path: Path, **more: Any) -> list[list[int]]:
    """The documents that a loader delivers, in canonical order."""
    described = {
        "source": {"kind": "tokens", "url": str(path), **more},
        "order": {"shuffle": "none", "epochs": 1},
        "stages": ["read", {"batch": {"size": 3, "ragged": {"tokens": "list"}}}],
    }
    with loaderkit.build(described) as loader:
        return [document.tolist() for batch in loader for document in batch["tokens"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["megatron", "npy", "swapped", "raw"])
def test_every_document_is_a_sample(tmp_path: Path, form: str, dtype: str) -> None:
    documents = random_documents(np.random.default_rng(3), 50, 40, dtype)
    tokens = np.concatenate(documents)
    path = tmp_path / ("x.bin" if form == "megatron" else "x.npy" if form in ("npy", "swapped") else "x.tokens")
    more: dict[str, Any] = {"end": 0}
    if form == "megatron":
        more = {}
        write_megatron(path, documents, dtype)
    elif form == "raw":
        more["dtype"] = dtype
        tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
    else:
        np.save(path, tokens.astype(np.dtype(dtype).newbyteorder(">" if form == "swapped" else "<")))
    for _ in range(2):  # the second time by the index that was kept
        assert documents_in(path, **more) == [document.tolist() for document in documents]
    assert documents_in(path, limit=7, **more) == [document.tolist() for document in documents[:7]]


def test_padded_documents_of_several_sequences(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.arange(10, dtype=np.int32).tofile(path)
    path.with_suffix(".idx").write_bytes(megatron_index([2, 3, 0, 5], [0, 2, 2, 4], "int32"))
    pipeline = loaderkit.Pipeline.tokens(path).shuffle(False).read().batch(3, ragged={"tokens": "pad"}, pad_value=-1)
    with loaderkit.build(pipeline) as loader:
        batch = next(iter(loader))
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4], [-1] * 5, [5, 6, 7, 8, 9]]
    assert batch["tokens_sizes"].tolist() == [5, 0, 5]
    assert batch["__key__"] == ["0", "1", "2"]


def test_without_ragged_the_error_says_so(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [np.arange(3), np.arange(4)], "int32")
    pipeline = loaderkit.Pipeline.tokens(path).shuffle(False).read().batch(2)
    with loaderkit.build(pipeline) as loader, pytest.raises(LoaderkitError, match=r"ragged: \{tokens: list\}"):
        next(iter(loader))


def test_a_function_gets_tensors_of_its_own(tmp_path: Path) -> None:
    documents = random_documents(np.random.default_rng(4), 20, 30)
    path, kept = write_megatron(tmp_path / "x", documents, "uint16"), []

    def keep(sample: dict[str, Any]) -> None:
        kept.append(sample["tokens"])

    pipeline = loaderkit.Pipeline.tokens(path).shuffle(False).read().call(keep)
    with loaderkit.build(pipeline.batch(4, ragged={"tokens": "list"})) as loader:
        list(loader)
    tokens = sorted(value.tolist() for value in kept)
    assert set(map(tuple, tokens)) == {tuple(document.tolist()) for document in documents}


def test_several_processes_read_the_same(tmp_path: Path) -> None:
    documents = random_documents(np.random.default_rng(5), 30, 20)
    path = write_megatron(tmp_path / "x", documents, "uint16")
    described = {
        "source": {"kind": "tokens", "url": str(path)},
        "order": {"epochs": 1},
        "stages": ["read", {"batch": {"size": 4, "ragged": {"tokens": "list"}}}],
    }
    seen = []
    for prefetch in ({"executor": "inline"}, {"executor": "process", "processes": 2}):
        with loaderkit.build({**described, "prefetch": prefetch}) as loader:
            seen.append(
                [[key, *value.tolist()] for b in loader for key, value in zip(b["__key__"], b["tokens"], strict=True)]
            )
    assert seen[0] == seen[1]
    assert sorted(row[1:] for row in seen[0]) == sorted(document.tolist() for document in documents)


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), end=st.integers(0, 4))
def test_documents_end_behind_the_token(tokens: list[int], end: int) -> None:
    wanted: list[list[int]] = [[]]
    for token in tokens:
        wanted[-1].append(token)
        if token == end:
            wanted.append([])
    wanted = [document for document in wanted if document]
    file = {"x.raw": np.array(tokens, "<u2").tobytes()}
    if end not in tokens:
        with pytest.raises(SourceError, match=f"has no token {end}, which `end` says ends a document"):
            source_of(file, "x.raw", dtype="uint16", end=end)
        return
    source = source_of(file, "x.raw", dtype="uint16", end=end)
    assert isinstance(source, TokensSource)
    lengths, starts = source.lengths.tolist(), source.starts.tolist()
    assert [tokens[at // 2 : at // 2 + length] for at, length in zip(starts, lengths, strict=True)] == wanted


def test_ends_are_found_across_blocks_and_kept(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 5, 1003).astype("<i4")
    tokens.tofile(tmp_path / "x.raw")
    connector = FileConnector(tmp_path)
    info = connector.stat("x.raw")
    find: Callable[..., Any] = load_document_ends
    args = {"first_byte": 4, "dtype": np.dtype("<i4"), "end": 2, "block_bytes": 16}
    wanted = np.union1d(np.flatnonzero(tokens[1:] == 2) + 1, [1002])
    assert find(connector, info, tmp_path / "kept", **args).tolist() == wanted.tolist()
    (copy,) = (tmp_path / "kept" / "document-ends").iterdir()

    class Unread(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            raise AssertionError("the kept index was not used")

    unread = Unread(tmp_path)
    assert find(unread, info, tmp_path / "kept", **args).tolist() == wanted.tolist()
    for other in ({**args, "end": 3}, {**args, "first_byte": 0}, {**args, "dtype": np.dtype("<u4")}):
        with pytest.raises(AssertionError):
            find(unread, info, tmp_path / "kept", **other)
    with pytest.raises(AssertionError):
        find(unread, info._replace(etag="other"), tmp_path / "kept", **args)
    copy.write_bytes(copy.read_bytes()[:-40])
    assert find(connector, info, tmp_path / "kept", **args).tolist() == wanted.tolist()


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [np.arange(5)] * 4, "int32")
    pipeline = loaderkit.Pipeline.tokens(path).shuffle(False).read().batch(2, ragged={"tokens": "list"})
    with loaderkit.build(pipeline) as loader:
        np.zeros(19, np.int32).tofile(path)
        with pytest.raises(LoaderkitError) as caught:
            next(iter(loader))
        assert isinstance(caught.value.__cause__, ObjectChangedError)


def test_what_a_fingerprint_depends_on() -> None:
    def fingerprint(lengths: list[int], dtype: str = "int32", **args: Any) -> str:
        data = bytes(np.dtype(dtype).itemsize * sum(lengths))
        index = megatron_index(lengths, range(len(lengths) + 1), dtype)
        return source_of({"x.bin": data, "x.idx": index}, "x.bin", **args).fingerprint()

    prints = [
        fingerprint([2, 3, 5]),
        fingerprint([3, 2, 5]),
        fingerprint([2, 3, 5], "uint16"),
        fingerprint([2, 3, 5], limit=2),
        fingerprint([2, 3, 5, 0]),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint([2, 3, 5]) == prints[0]


INDEX = megatron_index([2, 3], [0, 1, 2], "int32")
FILES = {
    "x.bin": bytes(20),
    "x.idx": INDEX,
    "y.bin": bytes(16),
    "y.idx": INDEX,
    "z.bin": bytes(20),
    "far.bin": bytes(20),
    "far.idx": INDEX[:42] + (2**63 - 2).to_bytes(8, "little") + INDEX[50:],
    "lone.bin": bytes(20),
    "empty.raw": b"",
    "odd.raw": bytes(7),
    "floats.npy": npy(np.zeros(3, np.float32)),
    "rows.npy": npy(np.zeros((3, 2), np.int32)),
    "cut.npy": npy(np.zeros(30, np.int32))[:-4],
    "good.npy": npy(np.zeros(30, np.int32)),
}


@pytest.mark.parametrize(
    ("url", "args", "kind", "message"),
    [
        ("y.bin", {}, FormatError, r"y.idx has documents up to byte 20, and memory://y.bin has 16 bytes"),
        ("far.bin", {}, FormatError, rf"far.idx has documents up to byte {2**63 + 6}, and"),
        ("lone.bin", {}, ConfigError, r"source.dtype: memory://lone.bin has no lone.idx beside it"),
        ("empty.raw", {"dtype": "uint16", "end": 0}, SourceError, "is empty"),
        ("odd.raw", {"dtype": "uint16", "end": 0}, FormatError, "no multiple of a token's 2"),
        ("odd.raw", {"dtype": "uint8", "end": 256}, ConfigError, "source.end: 256 is no uint8"),
        ("floats.npy", {"end": 0}, FormatError, r"is float32 \[3\]: tokens are whole numbers"),
        ("rows.npy", {"end": 0}, FormatError, r"is int32 \[3, 2\]"),
        ("cut.npy", {"end": 0}, FormatError, "it is truncated"),
        ("good.npy", {"end": 0, "dtype": "uint16"}, ConfigError, "which is int32 by its header"),
    ],
)
def test_what_does_not_fit_is_refused(url: str, args: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        source_of(FILES, url, **args)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with"),
        (b"x" * 100, "does not begin with"),
        (INDEX[:9] + b"\x02" + INDEX[10:], "version 2"),
        (INDEX[:17] + b"\x07" + INDEX[18:], "code 7"),
        (INDEX[:-1], "truncated"),
        (megatron_index([2, 3], [0, 2, 1], "int32"), "do not go up"),
        (megatron_index([2, 3], [1, 2], "int32"), "do not go up"),
        (megatron_index([2, -1], [0, 1, 2], "int32"), "negative"),
        (megatron_index([2, 3], [0, 2], "int32", gap=4), "sequence 1 does not begin where"),
    ],
)
def test_a_damaged_index_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_megatron_index(bytearray(data))


def test_gaps_between_documents_are_no_matter() -> None:
    documents = parse_megatron_index(bytearray(megatron_index([2, 3], [0, 1, 2], "int32", gap=4)))
    assert (documents.starts.tolist(), documents.lengths.tolist()) == ([0, 12], [2, 3])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "x.raw", "end": 0}, "`dtype` is missing"),
        ({"url": "x.raw", "dtype": "uint16"}, "`end` is missing"),
        ({"url": "x.npy"}, "`end` is missing"),
        ({"url": "x.bin", "end": 0}, "are in the .idx"),
        ({"url": ["a/x.bin", "a/y.bin"], "include": "*.bin"}, "names the files already"),
        ({"url": "x.arrow", "dtype": "uint16"}, "`dtype` is for raw files"),
        ({"url": ["s3://a/x.bin", "s3://b/y.bin"]}, "in several stores"),
        ({"url": ["s3://a/x.bin", "data/y.bin"]}, "in several stores"),
    ],
)
def test_settings_that_do_not_go_together(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaderkit.build({"source": {"kind": "tokens", **args}, "stages": ["read", {"batch": {"size": 1}}]})
