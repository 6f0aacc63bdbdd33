"""Shards of every kind, the damage that is drawn for them, and what is left by a plain count of bytes."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tf_records import example, record
from token_files import megatron_index

Rows = list[int]


class Written(NamedTuple):
    """A shard: its bytes, and the byte at which each sample is there whole."""

    data: bytes
    ends: list[int]


def tar_shard(rows: Rows) -> Written:
    """Two members a sample."""
    file, ends = io.BytesIO(), []
    with tarfile.open(fileobj=file, mode="w") as tar:
        for row in rows:
            for extension, data in (("bin", bytes([row % 256]) * (40 + 17 * row)), ("cls", str(row).encode())):
                info = tarfile.TarInfo(f"{row:04}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                ends.append(tar.offset - (-len(data)) % 512)
    return Written(file.getvalue(), ends[1::2])


def parquet_shard(rows: Rows) -> Written:
    """Two row groups."""
    file = io.BytesIO()
    pq.write_table(pa.table({"cls": rows}), file, row_group_size=max(1, len(rows) // 2))
    return Written(file.getvalue(), [len(file.getvalue())] * len(rows))


def tfrecord_shard(rows: Rows) -> Written:
    records = [record(example({"cls": [row]})) for row in rows]
    return Written(b"".join(records), [len(b"".join(records))] * len(rows))


def lines_shard(rows: Rows) -> Written:
    return Written("".join(f"{json.dumps({'cls': row})}\n" for row in rows).encode(), [])


def tokens_of(rows: Rows) -> list[list[int]]:
    """A document for each row, which ends with the token 0."""
    return [[row + 1, 7, 0] for row in rows]


def megatron_shard(rows: Rows) -> Written:
    data = np.array(tokens_of(rows), "<i4").tobytes()
    return Written(data, [len(data)] * len(rows))


def megatron_beside(path: Path, rows: Rows) -> None:
    lengths = [3] * len(rows)
    path.with_suffix(".idx").write_bytes(megatron_index(lengths, range(len(rows) + 1), "int32"))


def npy_shard(rows: Rows) -> Written:
    file = io.BytesIO()
    np.save(file, np.array(tokens_of(rows), np.int32).reshape(-1))
    return Written(file.getvalue(), [len(file.getvalue())] * len(rows))


def token_table(rows: Rows) -> pa.Table:
    return pa.table({"input_ids": pa.array(tokens_of(rows), pa.list_(pa.int32()))})


def arrow_shard(rows: Rows) -> Written:
    file = io.BytesIO()
    table = token_table(rows)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return Written(file.getvalue(), [len(file.getvalue()) - 8] * len(rows))  # without the mark at its end


def token_parquet_shard(rows: Rows) -> Written:
    file = io.BytesIO()
    pq.write_table(token_table(rows), file, row_group_size=max(1, len(rows) // 2))
    return Written(file.getvalue(), [len(file.getvalue())] * len(rows))


def nothing_beside(path: Path, rows: Rows) -> None:
    """Of most kinds there is nothing."""


class Kind(NamedTuple):
    """How shards of a kind, and what lies beside, are written, and what a pipeline over them says."""

    extension: str
    write: Callable[[Rows], Written]
    source: dict[str, Any]
    stages: list[Any]
    beside: Callable[[Path, Rows], None] = nothing_beside


KINDS = {
    "tar": Kind("tar", tar_shard, {"kind": "tar", "fields": {"data": "bin", "cls": "cls"}}, ["decode"]),
    "parquet": Kind("parquet", parquet_shard, {"kind": "parquet"}, []),
    "tfrecord": Kind("tfrecord", tfrecord_shard, {"kind": "tfrecord"}, []),
    "lines": Kind("jsonl", lines_shard, {"kind": "lines"}, []),
    "tokens": Kind("bin", megatron_shard, {"kind": "tokens", "field": "cls"}, [], megatron_beside),
    "tokens-npy": Kind("npy", npy_shard, {"kind": "tokens", "field": "cls", "end": 0}, []),
    "tokens-arrow": Kind("arrow", arrow_shard, {"kind": "tokens", "field": "cls"}, []),
    "tokens-parquet": Kind("parquet", token_parquet_shard, {"kind": "tokens", "field": "cls"}, []),
}


def cut(kind: Kind, rows: Rows, path: Path, rng: random.Random) -> Rows:
    """The shard, cut at any byte that shows it; returns the rows that are left."""
    written = kind.write(rows)
    at = rng.randrange(1, written.ends[-1])
    if kind.extension == "tfrecord":  # not between two records, which cannot be told from a shorter file
        at = written.ends[-1] - rng.randrange(1, 16)
    path.write_bytes(written.data[:at])
    return [row for row, end in zip(rows, written.ends, strict=True) if end <= at]


def break_header(kind: Kind, rows: Rows, path: Path, rng: random.Random) -> Rows:
    """The shard with other bytes where its format has a checksum, or a mark."""
    written = kind.write(rows)
    data, left = bytearray(written.data), Rows()
    if kind.extension == "tar":
        number = rng.randrange(len(rows))
        begin = 0 if number == 0 else -(-written.ends[number - 1] // 512) * 512  # of that sample's first header
        data[begin + rng.randrange(100)] ^= 0x15
        left = rows[:number]
    elif kind.extension == "parquet":
        if rng.random() < 0.5:
            data[rng.randrange(4)] ^= 0x15
        else:
            data[-8:-4] = (len(data) + rng.randrange(1, 1000)).to_bytes(4, "little")
    elif kind.extension == "tfrecord":
        data[rng.randrange(12)] ^= 0x15
    elif kind.extension in ("npy", "arrow"):
        data[rng.randrange(6 if kind.extension == "npy" else 8)] ^= 0x15
    elif kind.extension == "bin":
        index = bytearray(path.with_suffix(".idx").read_bytes())
        index[rng.randrange(17)] ^= 0x15  # its mark, or its version
        path.with_suffix(".idx").write_bytes(index)
    else:
        data = bytearray(gzip.compress(data))
    path.write_bytes(data)
    return left


def remove(kind: Kind, rows: Rows, path: Path, rng: random.Random) -> Rows:
    """A shard that is named and missing."""
    path.unlink(missing_ok=True)
    return []


DAMAGES = [cut, break_header, remove]
