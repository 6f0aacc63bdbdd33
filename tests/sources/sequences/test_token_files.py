"""`kind: tokens` over many files: folders, globs and lists of every form, read as each format's own reader reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, SourceError
from loaderkit.sources.sequences.arrow_lists import load_list_bounds
from loaderkit.testing import SourceContract

Document = list[int]
NUM_FILES, NUM_EACH = 5, 12


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def table_of(documents: Sequence[Document | None], kind: Any = None) -> pa.Table:
    """The documents between other columns."""
    lists = pa.array(documents, kind or pa.list_(pa.int32()))
    texts, masks = ["x" * len(one or ()) for one in documents], [[1] for _ in documents]
    return pa.table({"text": texts, "input_ids": lists, "attention_mask": masks})


def write_arrow(
    path: Path, table: pa.Table, *, rows: int = 5, compression: str | None = None, as_file: bool = False
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


def _megatron(path: Path, documents: list[Document]) -> None:
    write_megatron(path, [np.array(one) for one in documents], "int32")


def _npy(path: Path, documents: list[Document]) -> None:
    np.save(path.with_suffix(".npy"), np.concatenate(documents).astype(np.int32))


def _raw(path: Path, documents: list[Document]) -> None:
    np.concatenate(documents).astype("<i4").tofile(path.with_suffix(".bin"))


def _arrow(path: Path, documents: list[Document]) -> None:
    write_arrow(path.with_suffix(".arrow"), table_of(documents))


def _arrow_file(path: Path, documents: list[Document]) -> None:
    write_arrow(path.with_suffix(".arrow"), table_of(documents, pa.large_list(pa.int32())), as_file=True)


def _parquet(path: Path, documents: list[Document]) -> None:
    pq.write_table(table_of(documents), path.with_suffix(".parquet"), row_group_size=5)


Write = Callable[[Path, list[Document]], None]
RAW = {"dtype": "int32", "end": 0, "include": "*.bin"}
FORMS: dict[str, tuple[Write, str, dict[str, Any]]] = {
    "megatron": (_megatron, "bin", {}),
    "npy": (_npy, "npy", {"end": 0}),
    "raw": (_raw, "bin", RAW),
    "arrow": (_arrow, "arrow", {}),
    "arrow-file": (_arrow_file, "arrow", {}),
    "parquet": (_parquet, "parquet", {}),
}


@pytest.fixture
def shards(rng: random.Random) -> list[list[Document]]:
    numbers = np.random.default_rng(rng.randrange(2**32))
    return [[one.tolist() for one in random_documents(numbers, NUM_EACH, 15, "int32")] for _ in range(NUM_FILES)]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(tmp_path: Path, shards: list[list[Document]], form: str) -> Path:
    (tmp_path / "data").mkdir()
    for number, documents in enumerate(shards):
        FORMS[form][0](tmp_path / f"data/s{number:03}", documents)
    return tmp_path / "data"


def documents_in(**source: Any) -> dict[str, Document]:
    """By key, in canonical order."""
    described = {
        "source": {"kind": "tokens", **source},
        "order": {"shuffle": "none", "epochs": 1},
        "stages": ["read", {"batch": {"size": 7, "ragged": {"tokens": "list"}}}],
    }
    with loaderkit.build(described) as loader:
        pairs = [pair for one in loader for pair in zip(one["__key__"], one["tokens"], strict=True)]
    return {key: tokens.tolist() for key, tokens in pairs}


def test_a_folder_a_glob_a_list(folder: Path, form: str, shards: list[list[Document]]) -> None:
    """Each twice: the second time by what was kept."""
    _, extension, settings = FORMS[form]
    plain = {name: value for name, value in settings.items() if name != "include"}
    names = [f"s{number:03}.{extension}" for number in range(NUM_FILES)]
    expected = {
        f"{name}/{n}": one for name, documents in zip(names, shards, strict=True) for n, one in enumerate(documents)
    }
    for source in (
        {"url": str(folder), **settings},
        {"url": f"{folder}/s*.{extension}", **plain},
        {"url": f"{folder}/s{{000..004}}.{extension}", **plain},
        {"url": [f"{folder}/{name}" for name in names], **plain},
        {"url": str(folder), **plain, "include": names},
    ):
        for _ in range(2):
            found = documents_in(**source)
            assert found == expected
            assert list(found) == list(expected)
    assert list(documents_in(url=str(folder), **settings, limit=17).items()) == list(expected.items())[:17]
    one = documents_in(url=f"{folder}/{names[1]}", **plain)
    assert [*one.values()] == shards[1]


def test_packed_pieces_come_from_all_files(folder: Path, form: str, shards: list[list[Document]]) -> None:
    """No token is lost or doubled, in the order of blocks, too."""
    _, _, settings = FORMS[form]
    pipeline = Pipeline.tokens(folder, **settings).epochs(1).read().pack(32, window=20).batch(4)
    for shuffle in ("global", "block"):
        with loaderkit.build(pipeline.shuffle(shuffle, block=200 if shuffle == "block" else None)) as loader:
            pieces: dict[str, dict[int, list[int]]] = {}
            for batch in loader:
                for row, keys in enumerate(batch["__key__"]):
                    for place, key in enumerate(keys.split(" ")):
                        name, _, part = key.partition("[")
                        tokens = batch["input_ids"][row][batch["document_ids"][row] == place]
                        pieces.setdefault(name, {})[int(part.partition(":")[0] or 0)] = tokens.tolist()
        for name, parts in pieces.items():
            shard, _, document = name.partition("/")
            whole = shards[int(shard[1:4])][int(document)]
            assert [token for first in sorted(parts) for token in parts[first]] == whole
        assert len(pieces) == NUM_FILES * NUM_EACH


class TestManyFiles(SourceContract):
    """What every source promises, of files of every form."""

    stages = ({"batch": {"size": 4, "ragged": {"tokens": "pad"}}},)

    @pytest.fixture
    def described(self, folder: Path, form: str) -> dict[str, Any]:
        return {"kind": "tokens", "url": str(folder), **FORMS[form][2]}

    def pipeline(self, described: Any) -> dict[str, Any]:
        return {"source": {**described}, "stages": ["read", *self.stages], "order": {"seed": 3}}

    @pytest.mark.matrix(2)
    def test_worker_processes_give_the_same(self, described: Any) -> None:
        super().test_worker_processes_give_the_same(described)


def test_arrow_of_all_types_of_lists(tmp_path: Path, rng: random.Random) -> None:
    """By Arrow's own reader; also of no rows, and of lists of one length."""
    connector = FileConnector(tmp_path)
    for number in range(40):
        item = rng.choice([pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()])
        size = rng.randint(1, 5)
        kind = rng.choice([pa.list_(item), pa.large_list(item), pa.list_(item, size)])
        lengths = [
            size if kind.num_fields and pa.types.is_fixed_size_list(kind) else rng.randint(0, 9)
            for _ in range(rng.randint(0, 20))
        ]
        table = table_of([[rng.randrange(100) for _ in range(length)] for length in lengths], kind)
        write_arrow(tmp_path / "x.arrow", table, rows=rng.randint(1, 8), as_file=bool(number % 2))
        info, data = connector.stat("x.arrow"), (tmp_path / "x.arrow").read_bytes()
        found = load_list_bounds(connector, info, None, column="input_ids")
        pairs = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
        # Where a list of nothing begins says nothing.
        lists = [np.frombuffer(data, found.dtype, length, start).tolist() if length else [] for start, length in pairs]
        assert lists == table["input_ids"].to_pylist()
        assert found.dtype == np.dtype(item.to_pandas_dtype())


def test_little_of_an_arrow_file_is_read(tmp_path: Path) -> None:
    """Its metadata and the offsets, not the tokens or other columns."""
    write_arrow(tmp_path / "x.arrow", table_of([list(range(1000))] * 200), rows=100)
    read = []

    class Counting(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            read.append(len(buffer))
            super().read_into(key, start, buffer, etag=etag)

    connector = Counting(tmp_path)
    info = connector.stat("x.arrow")
    assert len(load_list_bounds(connector, info, None, column="input_ids").starts) == 200
    assert sum(read) < info.size // 100


def test_damaged_arrow_files_are_refused(tmp_path: Path, rng: random.Random) -> None:
    """Cut anywhere, with flipped bits, with absurd sizes: an error of ours that names it, or the ranges inside the file."""
    write_arrow(tmp_path / "x.arrow", table_of([[1, 2, 3], [4]] * 9))
    data = (tmp_path / "x.arrow").read_bytes()

    def load(damaged: bytes) -> None:
        connector = MemoryConnector({"x.arrow": damaged})
        info = connector.stat("x.arrow")
        found = load_list_bounds(connector, info, None, column="input_ids")
        ends = found.starts + found.lengths * found.dtype.itemsize
        assert not len(ends) or (found.starts.min() >= 0 and ends.max() <= info.size)

    for _ in range(150):
        with pytest.raises(LoaderkitError, match=r"x\.arrow"):
            load(data[: rng.randrange(1, len(data) - 8)])
        flipped = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with suppress(LoaderkitError):
            load(bytes(flipped))
    with pytest.raises(FormatError, match="metadata of 2147483647 bytes"):
        load(data[:4] + b"\xff\xff\xff\x7f" + data[8:])


def _deeper(path: Path) -> None:
    (path / "train").mkdir()
    np.save(path / "train/x.npy", np.ones(3, np.int32))


def _several(path: Path) -> None:
    _megatron(path / "x", [[1]])
    _npy(path / "y", [[1]])


def _unequal(path: Path) -> None:
    write_megatron(path / "x", [np.ones(3)], "uint16")
    write_megatron(path / "y", [np.ones(3)], "int32")


def _part_of_a_data_set(path: Path) -> None:
    write_arrow(path / "data-0.arrow", table_of([[1]]))
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]})
    )


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda path: write_arrow(path / "x.arrow", table_of([[1]]), compression="zstd"), FormatError, "compress"),
        (lambda path: write_arrow(path / "x.arrow", table_of([[1]]), compression="lz4"), FormatError, "compress"),
        (lambda path: write_arrow(path / "x.arrow", table_of([[1], None])), FormatError, "nulls"),
        (lambda path: pq.write_table(table_of([[1], None]), path / "x.parquet"), FormatError, "nulls, in row group 0"),
        (
            lambda path: write_arrow(path / "x.arrow", pa.table({"tokens": [[1]]})),
            FormatError,
            "no column 'input_ids', but tokens",
        ),
        (
            lambda path: write_arrow(path / "x.arrow", pa.table({"input_ids": ["a"]})),
            FormatError,
            "lists of whole numbers",
        ),
        (
            lambda path: pq.write_table(pa.table({"input_ids": [[0.5]]}), path / "x.parquet"),
            ConfigError,
            "lists of whole numbers",
        ),
        (lambda path: (path / "x.txt").write_text("1 2"), SourceError, r"no files of tokens .* there are 1 \.txt"),
        (_deeper, SourceError, r"include: '\*\*/\*\.npy'"),
        (_several, SourceError, r"several forms \(1 \.bin, 1 \.npy\): .* include: '\*\.bin'"),
        (_unequal, FormatError, r"y\.bin has tokens of <i4, and .*x\.bin of <u2"),
        (_part_of_a_data_set, SourceError, "the folder is not whole"),
    ],
)
def test_what_is_refused(tmp_path: Path, make: Callable[[Path], object], kind: type[Exception], message: str) -> None:
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    with pytest.raises(kind, match=message):
        documents_in(url=str(tmp_path / "data"))


def test_a_raw_folder_says_which_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    _raw(tmp_path / "data/x", [[1, 0]])
    with pytest.raises(SourceError, match=r"is a folder: .*include: '\*\.bin'"):
        documents_in(url=str(tmp_path / "data"), dtype="int32", end=0)


def test_what_datasets_has_cached_is_no_data(tmp_path: Path) -> None:
    write_arrow(tmp_path / "data-0.arrow", table_of([[1, 2]]))
    write_arrow(tmp_path / "cache-12ab.arrow", table_of([[3]]))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    assert [*documents_in(url=str(tmp_path)).values()] == [[1, 2]]


def test_hundreds_of_shards(tmp_path: Path) -> None:
    urls = [write_megatron(tmp_path / f"{number:03}", [np.array([number, number])], "uint16") for number in range(300)]
    pipeline = Pipeline.tokens(list(map(str, urls[:290]))).shuffle(False).epochs(1).read().batch(64)
    with loaderkit.build(pipeline) as loader:
        batches = list(loader)
    assert [row[0] for batch in batches for row in batch["tokens"].tolist()] == list(range(290))
    assert batches[0]["__key__"][:2] == ["000.bin/0", "001.bin/0"]


def test_a_data_set_of_other_files_is_another_one(tmp_path: Path) -> None:
    """Also if the documents are as long, so that a state is not taken for that of other shards."""
    for name in "abc":
        _megatron(tmp_path / name, [[1, 2], [3]])
    states = []
    for names in ("ab", "ac"):
        urls = [str(tmp_path / f"{name}.bin") for name in names]
        with loaderkit.build(Pipeline.tokens(urls).read().batch(1, ragged={"tokens": "list"})) as loader:
            states.append(loader.state_dict()["fingerprint"])
    assert states[0] != states[1]
