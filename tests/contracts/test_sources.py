"""What every source promises, whatever its samples are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extensions import forget_after
from hf_folders import saved
from mds_shards import write_mds
from pydantic import Field
from tf_records import example, record

from loaderkit.connectors.base import Connector
from loaderkit.extend import ReadContext, Reader, SampleReader, SourceArgs, SourceKind, StoreArgs, register
from loaderkit.sources.base import Source
from loaderkit.sources.serial.reader import SerialSource
from loaderkit.testing import SourceContract

Opened = tuple[Source, Connector | None]
IMAGES = ("decode", {"resize": {"size": [8, 8]}})


@pytest.fixture(scope="module")
def folder(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What sources of every kind read, 60 samples of each."""
    folder = tmp_path_factory.mktemp("sources")
    np.save(folder / "x.npy", np.arange(60 * 100).reshape(60, 100))
    np.arange(60 + 200 - 1, dtype=np.uint16).tofile(folder / "x.bin")
    np.array([[number, 99] for number in range(60)], np.uint8).tofile(folder / "x.tokens")
    for number in range(2):
        rows = range(30 * number, 30 * number + 30)
        pq.write_table(pa.table({"data": rows}), folder / f"{number}.parquet", row_group_size=1)
    write_mds(folder / "mds", {"x": "int"}, [{"x": number} for number in range(60)], shard_samples=25)
    (folder / "saved").mkdir()
    for name, data in saved(pa.table({"x": range(60)}), random.Random(5), batch_rows=1).items():
        (folder / "saved" / name).write_bytes(data)
    (folder / "x.jsonl").write_text("".join(f'\n{{"x": {number}}}\n' for number in range(60)))
    (folder / "x.tfrecord").write_bytes(b"".join(record(example({"x": [number]})) for number in range(60)))
    for number, photo in enumerate(sorted(photos.rglob("*.jpg"))):
        for path, data in ((f"images/{number:02}.jpg", photo.read_bytes()), (f"labels/{number:02}.cls", b"7")):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(data)
    return folder


KINDS = [
    "files", "joined", "tar", "array", "windows", "tokens", "parquet", "huggingface", "lines", "tfrecord", "mds",
    "dataset",
]  # fmt: skip


class TestSources(SourceContract):
    @pytest.fixture(params=KINDS)
    def described(
        self,
        request: pytest.FixtureRequest,
        photos: Path,
        shards: Path,
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Mapping[str, Any]:
        """A source of 60 samples."""
        monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path))
        pairs = {"image": "images/*.jpg", "label": "labels/*.cls"}
        tokens = {"url": str(folder / "x.tokens"), "dtype": "uint8", "end": 99, "field": "data"}
        sources: dict[str, dict[str, Any]] = {
            "joined": {"kind": "files", "url": str(folder), "fields": pairs},
            "files": {"kind": "files", "url": str(photos), "label": "parent"},
            "tar": {"kind": "tar", "url": str(shards)},
            "array": {"kind": "array", "url": str(folder / "x.npy")},
            "windows": {"kind": "array", "url": str(folder / "x.bin"), "dtype": "uint16", "window": 200},
            "tokens": {"kind": "tokens", **tokens},
            "parquet": {"kind": "parquet", "url": str(folder)},
            "huggingface": {"kind": "huggingface", "url": str(folder / "saved")},
            "lines": {"kind": "lines", "url": str(folder / "x.jsonl")},
            "tfrecord": {"kind": "tfrecord", "url": str(folder)},
            "mds": {"kind": "mds", "url": str(folder / "mds")},
            "dataset": {"kind": "dataset", "object": [{"x": number} for number in range(60)]},
        }
        return sources[request.param]

    def pipeline(self, described: Mapping[str, Any]) -> dict[str, Any]:
        pipeline = super().pipeline(described)
        pipeline["stages"][1:1] = IMAGES if described["kind"] in ("files", "tar") else ()
        return pipeline

    def test_blocks_may_be_single_samples(self, open_source: Callable[..., Opened]) -> None:
        source, connector = open_source()
        if connector is not None:
            assert len(source.blocks(1)) == 61

    def test_ranges_have_the_bytes_of_the_samples(self, open_source: Callable[..., Opened]) -> None:
        source, connector = open_source()
        if connector is None:
            return
        for index in (0, 31, 59):
            for field, extension, (key, start, length, etag) in source.ranges(index):
                data = bytearray(length)
                connector.read_into(key, start, memoryview(data), etag=etag)
                if isinstance(source, SerialSource):
                    assert int(source.parse(index, memoryview(data))["x"]) == index
                    continue
                assert (field, extension) in (
                    ("image", "jpg"), ("label", "cls"), ("data", "raw"), ("row group", "parquet"), ("record batch", "arrow"),
                )  # fmt: skip
                begins = {
                    "jpg": data[:2] == b"\xff\xd8",
                    "cls": data.isdigit(),
                    "raw": data[0] in (index, 100 * index % 256),
                    "parquet": bytes([index, 0, 0, 0, 0, 0, 0, 0]) in data,
                    "arrow": bytes([index, 0, 0, 0, 0, 0, 0, 0]) in data,
                }
                assert begins[extension]


class RowsArgs(StoreArgs):
    """Numbers in a file, 8 bytes each."""

    url: str = Field(description="the folder of x.bin")


class Rows(Source):
    """Read from a store by a reader of its own, which tells no byte ranges."""

    def __init__(self, args: Any, connector: Any) -> None:
        self.num = min(60, args.limit or 60)

    def __len__(self) -> int:
        return self.num

    def key(self, index: int) -> str:
        return str(index)

    def origin(self, index: int) -> str:
        return "x.bin"

    def fingerprint(self) -> str:
        return f"rows {self.num}"

    def reader(self, context: ReadContext) -> Reader:
        def get(index: int) -> dict[str, Any]:
            data = bytearray(8)
            context.store.read_into("x.bin", 8 * index, memoryview(data))
            return {"x": np.frombuffer(data, np.int64)}

        return SampleReader(get, context)


class CountsArgs(SourceArgs):
    """The first numbers."""


class Counts(Rows):
    """Made, of no store, and cut into blocks."""

    def blocks(self, block_bytes: int) -> Any:
        return np.array([*range(0, self.num, min(self.num, max(1, block_bytes // 8))), self.num])

    def reader(self, context: ReadContext) -> Reader:
        return SampleReader(lambda index: {"x": np.array([index])}, context)


class TestSourcesOfOthers(SourceContract):
    @pytest.fixture(params=["rows", "counts"])
    def described(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Mapping[str, Any]:
        forget_after(monkeypatch)
        register("rows", SourceKind(RowsArgs, Rows, root=lambda args: args.url, has_blocks=False))
        register("counts", SourceKind(CountsArgs, Counts))
        np.arange(60).tofile(tmp_path / "x.bin")
        return {"kind": "rows", "url": str(tmp_path)} if request.param == "rows" else {"kind": "counts"}
