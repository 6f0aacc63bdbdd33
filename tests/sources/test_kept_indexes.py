"""What is kept of a file is not used for another of its size and time, as reproducible archives and images have them."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderkit


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def lengths_of(rng: random.Random) -> list[int]:
    """Of three documents, together the same at each call."""
    first, second = sorted(rng.sample(range(1, 30), 2))
    return [first, second - first, 30 - second]


def a_tar(lengths: list[int]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, length in enumerate(lengths):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = length
            archive.addfile(member, io.BytesIO(b"x" * length))
    return file.getvalue()


def a_token_file(lengths: list[int]) -> bytes:
    return np.concatenate([[7] * (length - 1) + [0] for length in lengths]).astype("<u2").tobytes()


def a_saved_column(lengths: list[int]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"input_ids": pa.array([[7] * length for length in lengths], pa.list_(pa.int32()))})
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def some_lines(lengths: list[int]) -> bytes:
    return b"".join(b"x" * length + b"\n" for length in lengths)


@pytest.mark.parametrize(
    ("name", "make", "source", "field"),
    [
        ("a.tar", a_tar, {"kind": "tar"}, "txt"),
        ("a.txt", some_lines, {"kind": "lines", "format": "text"}, "text"),
        ("a.bin", a_token_file, {"kind": "tokens", "dtype": "uint16", "end": 0}, "tokens"),
        ("a.arrow", a_saved_column, {"kind": "tokens", "column": "input_ids"}, "tokens"),
    ],
)
def test_a_file_of_the_same_size_and_time(
    tmp_path: Path,
    rng: random.Random,
    name: str,
    make: Callable[[list[int]], bytes],
    source: dict[str, Any],
    field: str,
) -> None:
    sizes = set()
    for _ in range(4):
        lengths = lengths_of(rng)
        (tmp_path / "new").write_bytes(make(lengths))
        os.utime(tmp_path / "new", (1, 1))
        (tmp_path / "new").replace(tmp_path / name)
        sizes.add((tmp_path / name).stat().st_size)
        batch = {"size": 3} if field in ("txt", "text") else {"size": 3, "ragged": {field: "list"}}
        pipeline = {
            "source": {**source, "url": str(tmp_path / name)},
            "order": {"shuffle": "none"},
            "stages": ["read", {"batch": batch}],
        }
        with loaderkit.build(pipeline) as loader:
            assert [[len(each) for each in batch[field]] for batch in loader] == [lengths]
    assert len(sizes) == 1
