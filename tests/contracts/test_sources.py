"""What every source promises, whatever its samples are made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tf_records import example, record

from loaderkit.connectors.base import Connector
from loaderkit.errors import SourceError
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.sources.base import Source
from loaderkit.sources.serial.reader import SerialSource

Opened = tuple[Source, Connector | None]


def opened(**source: Any) -> Opened:
    config = parse({"source": source, "stages": ["read", {"batch": {"size": 1}}]})
    parts = compile_pipeline(config, rank=0, world_size=1)
    return parts.source, parts.connector


@pytest.fixture(
    params=["files", "joined", "tar", "array", "windows", "tokens", "parquet", "lines", "tfrecord", "dataset"]
)
def make(
    request: pytest.FixtureRequest, photos: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Opened]:
    """A function that opens a source of 60 samples; keyword arguments go into its description."""
    np.save(tmp_path / "x.npy", np.arange(60 * 100).reshape(60, 100))
    np.arange(60 + 200 - 1, dtype=np.uint16).tofile(tmp_path / "x.bin")
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    np.array([[number, 99] for number in range(60)], np.uint8).tofile(tmp_path / "x.tokens")
    for number in range(2):
        rows = range(30 * number, 30 * number + 30)
        pq.write_table(pa.table({"data": rows}), tmp_path / f"{number}.parquet", row_group_size=1)
    (tmp_path / "x.jsonl").write_text("".join(f'\n{{"x": {number}}}\n' for number in range(60)))
    records = b"".join(record(example({"x": [number]})) for number in range(60))
    (tmp_path / "x.tfrecord").write_bytes(records)
    for number, photo in enumerate(sorted(photos.rglob("*.jpg"))):
        for path, data in ((f"images/{number:02}.jpg", photo.read_bytes()), (f"labels/{number:02}.cls", b"7")):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(data)
    pairs = {"image": "images/*.jpg", "label": "labels/*.cls"}
    described: dict[str, dict[str, Any]] = {
        "joined": {"kind": "files", "url": str(tmp_path), "fields": pairs},
        "files": {"kind": "files", "url": str(photos), "label": "parent"},
        "tar": {"kind": "tar", "url": str(shards)},
        "array": {"kind": "array", "url": str(tmp_path / "x.npy")},
        "windows": {"kind": "array", "url": str(tmp_path / "x.bin"), "dtype": "uint16", "window": 200},
        "tokens": {"kind": "tokens", "url": str(tmp_path / "x.tokens"), "dtype": "uint8", "end": 99, "field": "data"},
        "parquet": {"kind": "parquet", "url": str(tmp_path)},
        "lines": {"kind": "lines", "url": str(tmp_path / "x.jsonl")},
        "tfrecord": {"kind": "tfrecord", "url": str(tmp_path)},
        "dataset": {"kind": "dataset", "object": [{"x": number} for number in range(60)]},
    }
    return lambda **more: opened(**described[request.param], **more)


def test_numbered_keyed_and_the_same_every_time(make: Callable[..., Opened]) -> None:
    (one, _), (other, _) = make(), make()
    assert len(one) == 60
    keys = [one.key(index) for index in range(60)]
    assert len(set(keys)) == 60
    assert keys == [other.key(index) for index in range(60)]
    assert one.fingerprint() == other.fingerprint()
    assert all(one.origin(index) for index in range(60))


def test_limit_is_the_beginning_of_the_canonical_order(make: Callable[..., Opened]) -> None:
    (whole, _), (part, _) = make(), make(limit=7)
    assert len(part) == 7
    assert [part.key(index) for index in range(7)] == [whole.key(index) for index in range(7)]
    assert part.classes == whole.classes
    assert part.fingerprint() != whole.fingerprint()
    assert len(make(limit=1000)[0]) == 60


def test_blocks_cut_everything_once(make: Callable[..., Opened]) -> None:
    source, connector = make()
    if connector is None:
        with pytest.raises(SourceError, match="block"):
            source.blocks(1000)
        return
    for block_bytes in (1, 5000, 10**9):
        bounds = source.blocks(block_bytes)
        assert (bounds[0], bounds[-1]) == (0, 60)
        assert (bounds[1:] > bounds[:-1]).all()
        if block_bytes == 1:
            assert len(bounds) == 61


def test_ranges_are_what_the_connector_holds(make: Callable[..., Opened]) -> None:
    source, connector = make()
    if connector is None:
        with pytest.raises(SourceError, match="byte ranges"):
            source.ranges(0)
        return
    for index in (0, 31, 59):
        for field, extension, (key, start, length, etag) in source.ranges(index):
            data = bytearray(length)
            connector.read_into(key, start, memoryview(data), etag=etag)
            if isinstance(source, SerialSource):
                assert int(source.parse(index, memoryview(data))["x"]) == index
                continue
            assert (field, extension) in (
                ("image", "jpg"), ("label", "cls"), ("data", "raw"), ("row group", "parquet"),
            )  # fmt: skip
            begins = {
                "jpg": data[:2] == b"\xff\xd8",
                "cls": data.isdigit(),
                "raw": data[0] in (index, 100 * index % 256),
                "parquet": bytes([index, 0, 0, 0, 0, 0, 0, 0]) in data,
            }
            assert begins[extension]
        fresh = source.constants(index)
        fresh["mine"] = 1
        assert "mine" not in source.constants(index)
